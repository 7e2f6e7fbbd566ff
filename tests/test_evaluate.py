"""Tests of the loss of texts, token files and pairs against the layers of training."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import random_parameters, whole_logits
from llmc_samples import write_tokens
from prepared_texts import BYTES, prepared, text_of, tokens_of

import daskgpt
from daskgpt import evaluate, train
from daskgpt.data.pairs import Examples
from daskgpt.formats.encoding import get_encoding
from daskgpt.formats.stored_model import StoredModel
from daskgpt.graph.lowering import NativeRun
from daskgpt.graph.program import calls_of
from daskgpt.training.inference import compile_loss

CONFIG = daskgpt.ModelConfig(blocks=2, heads=2, channels=16, vocabulary=257, positions=40)


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(CONFIG, np.random.default_rng(8))


@pytest.fixture(scope="module")
def model(parameters, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    daskgpt.save(path, CONFIG, parameters, encoding="bytes", sequence_length=24)
    return path


@pytest.fixture
def evaluated(model, called):
    """What the command prints with these flags."""
    return lambda *flags: called(evaluate, model, *flags)[1]


def nats_of(parameters, tokens, config=CONFIG):
    """Of all tokens but the first, in float64, by the scores of training's layers for the whole text."""
    logits = whole_logits(config, parameters, tokens[:-1]).astype(np.float64)
    likely = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - likely


@pytest.mark.parametrize(("length", "threads"), [(24, 2), (40, 1), (33, 2), (1, 1)])
def test_loss_perplexity_and_bits(length, threads, evaluated, parameters, tmp_path):
    """Every token but the first is predicted once."""
    (tmp_path / "text.txt").write_text(text := "Größe, naïve: €\n" * 5)
    ids = np.array([256, *text.encode()])
    write_tokens(tmp_path / "tokens.bin", ids)
    sequences = [ids[first : first + length + 1] for first in range(0, len(ids) - 1, length)]
    nats = np.concatenate([nats_of(parameters, tokens) for tokens in sequences])
    files = [str(tmp_path / name) for name in ("text.txt", "tokens.bin")]
    flags = ["--json", "--threads", threads, *(["--sequence-length", length] if length != 24 else [])]
    figures, other = (json.loads(evaluated("--data", file, *flags)) for file in files)
    assert [figures.pop("data"), other.pop("data")] == files
    assert figures == other
    assert (figures["tokens"], figures["bytes"], figures["sequence_length"]) == (nats.size, nats.size, length)
    assert figures["loss"] == pytest.approx(nats.mean(), abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    assert figures["bits_a_byte"] == pytest.approx(nats.mean() / math.log(2), abs=1e-5)
    told = evaluated("--data", files[0], "--limit", 30, "--sequence-length", 40)
    assert "30 tokens, 30 bytes" in told
    assert f"{nats_of(parameters, ids[:31]).mean():.4f} nats a token" in told


def test_prepared_tokens_are_those_that_are_held_out(evaluated, tmp_path):
    (tmp_path / "text.txt").write_text(text_of(2000))
    tokens = prepared(tmp_path, tmp_path / "text.txt", *BYTES)
    whole, shards = (json.loads(evaluated("--json", "--data", data)) for data in (tokens, tokens / "val_*.bin"))
    assert whole | {"data": 0} == shards | {"data": 0}
    assert whole["tokens"] == tokens_of(tokens, "val").size - 1


def test_the_loss_of_pairs_is_that_of_their_responses(model, evaluated, tmp_path, called):
    records, path = [{"prompt": f"{n} plus 1 is", "response": f" {n + 1}."} for n in range(60)], tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--data", path, "--validation-data", path, "--init", model, "--sequence-length", 40, "--batch-size", 4]
    flags += ["--validation-batches", 99, "--learning-rate", 0, "--final-learning-rate", 0, "--sample-tokens", 0]
    _, said = called(train, *flags, "--steps", 1, "--out", tmp_path / "run")
    figures = json.loads(evaluated("--json", "--data", path))
    assert (figures["pairs"], figures["bytes"]) == (60, sum(len(record["response"]) for record in records))
    assert f"{figures['loss']:.3f} on held-out text" in said
    assert json.loads(evaluated("--json", "--data", path, "--limit", 7))["pairs"] == 7


def test_a_perplexity_beyond_every_float(tmp_path, parameters, evaluated, monkeypatch):
    (tmp_path / "text.txt").write_text("text")
    for nats, shown in ((705.0, math.exp(705)), (710.0, None)):
        monkeypatch.setattr(evaluate, "losses_of", lambda *_, nats=nats: [nats])
        assert json.loads(evaluated("--data", tmp_path / "text.txt", "--json"))["perplexity"] == shown
    assert "\nperplexity   inf\n" in evaluated("--data", tmp_path / "text.txt")


def test_ids_beyond_the_encoding_of_a_larger_model_are_refused():
    config = replace(CONFIG, vocabulary=300, padded_vocabulary=0)
    model = StoredModel(config, daskgpt.initial_parameters(config, seed=0))
    tokens, options = np.array([1, 280, 2]), evaluate.EvaluateConfig(data="tokens")
    examples = Examples(tokens, np.array([3]), tokens > 1, 256)
    for data in (tokens, examples):
        with pytest.raises(ValueError, match="largest=280, vocabulary=257"):
            evaluate.measure(model, options, get_encoding("bytes"), data, 8)


def test_threads_change_no_digit_and_lengths_are_mixed(model, evaluated, parameters, tmp_path):
    prompts = ["a" * n for n in (1, 2, 3, 7, 8, 9, 30, 1, 5)] * 40
    records = [{"prompt": prompt, "response": f"{n}{prompt}"[:9]} for n, prompt in enumerate(prompts)]
    (path := tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    told = [evaluated("--json", "--data", path, "--threads", threads) for threads in (1, 2, 3)]
    assert told[0] == told[1] == told[2]
    nats = []
    for record in records:
        text = [*record["prompt"].encode(), *record["response"].encode(), 256][: 24 + 1]
        nats += nats_of(parameters, np.array(text))[len(record["prompt"]) - 1 :].tolist()
    figures = json.loads(told[0])
    assert (figures["tokens"], figures["pairs"]) == (len(nats), len(records) - 40)
    assert figures["loss"] == pytest.approx(np.mean(nats), abs=1e-5)


def test_precisions_and_native_calls(evaluated, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("text" * 500)
    compiled, losses = [], []
    monkeypatch.setattr(evaluate, "compile_loss", lambda *given: compiled.append(compile_loss(*given)) or compiled[-1])
    for precision in ("float32", "bfloat16"):
        told = evaluated("--json", "--data", tmp_path / "text.txt", "--precision", precision)
        losses.append(json.loads(told)["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert losses[1] != losses[0]
    tasks = [node for node in compiled[0].graph.values() if calls_of(node)]
    assert all(isinstance(item, NativeRun) for task in tasks for item in task.func.lowered.items or [None])


def test_layers_from_outside_are_evaluated(tmp_path, called):
    config = replace(CONFIG, activation="custom_layers:SQUARED_RELU")
    parameters = random_parameters(config, np.random.default_rng(1))
    daskgpt.save(tmp_path / "m.safetensors", config, parameters, encoding="bytes", sequence_length=40)
    (tmp_path / "text.txt").write_text(text := "some text" * 4)
    told = json.loads(called(evaluate, tmp_path / "m.safetensors", "--data", tmp_path / "text.txt", "--json")[1])
    nats = nats_of(parameters, np.array([256, *text.encode()]), config)
    assert (told["tokens"], told["loss"]) == (nats.size, pytest.approx(nats.mean(), abs=1e-5))


def test_a_batch_has_rows_of_about_one_length():
    rows = [(np.arange(length), np.arange(length) > length - 3) for length in (2, 5, 4, 19, 21, 20, *[6] * 300)]
    batches = list(evaluate.batches_of(rows, 20))
    assert [tokens.shape for tokens, *_ in batches] == [(1, 1), (2, 4), (128, 8), (128, 8), (128, 8), (3, 20)]
    assert [np.count_nonzero(weights) for *_, weights in batches] == [1, 4, 256, 256, 88, 6]


@pytest.mark.parametrize(
    ("flags", "keyword"),
    [
        ("", "--data must name a file"),
        ("--data empty.txt", "must not be empty"),
        ("--data missing.txt", "missing.txt"),
        ("--data short.txt --sequence-length 41", "sequence_length=41"),
        (
            "--data short.txt --encoding learn:257",
            "must not get a new vocabulary; got encoding=learn:257[.] Leave it out",
        ),
    ],
)
def test_impossible_evaluation_is_refused(flags, keyword, evaluated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("é")
    with pytest.raises((ValueError, OSError), match=keyword):
        evaluated(*flags.split())
