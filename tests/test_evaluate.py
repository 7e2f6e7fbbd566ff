"""Tests of the loss of texts and token files against the layers of training."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import random_parameters, whole_logits
from llmc_samples import write_tokens
from numpy.testing import assert_allclose
from tolerances import TOLERANCES

import daskgpt
from daskgpt import evaluate
from daskgpt.data.pairs import Examples
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation.decoder import Weights

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


def nats_of(parameters, tokens):
    """Of all tokens but the first, in float64, by the scores of training's layers for the whole text."""
    logits = whole_logits(CONFIG, parameters, tokens[:-1]).astype(np.float64)
    likely = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - likely


def test_every_token_but_the_first_is_predicted_once(parameters, random):
    tokens = random.integers(0, 257, 100)
    for length in (24, 40, 33, 1):
        expected = np.concatenate([nats_of(parameters, tokens[s : s + length + 1]) for s in range(0, 99, length)])
        assert expected.size == 99
        rows = evaluate.rows_of(tokens, 0, length)
        for threads in (1, 2):
            losses = evaluate.losses_of(Weights(CONFIG, parameters, "float32"), rows, length, threads)
            assert_allclose(np.concatenate(list(losses)), expected, **TOLERANCES["nats a token"])


def test_loss_perplexity_and_bits(evaluated, parameters, tmp_path):
    (tmp_path / "text.txt").write_text(text := "Größe, naïve: €\n" * 12)
    ids = np.array([256, *text.encode()])
    write_tokens(tmp_path / "tokens.bin", ids)
    expected = np.concatenate([nats_of(parameters, ids[s : s + 25]) for s in range(0, len(ids) - 1, 24)])
    files = [str(tmp_path / name) for name in ("text.txt", "tokens.bin")]
    figures, other = (json.loads(evaluated("--data", file, "--json", "--threads", 2)) for file in files)
    assert [figures.pop("data"), other.pop("data")] == files
    assert figures == other
    count = len(text.encode())
    assert (figures["tokens"], figures["bytes"], figures["sequence_length"]) == (count, count, 24)
    assert figures["loss"] == pytest.approx(expected.mean(), abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-4)
    assert figures["bits_a_byte"] == pytest.approx(expected.mean() / math.log(2), abs=1e-5)
    told = evaluated("--data", files[0], "--limit", 30, "--sequence-length", 40)
    assert "30 tokens, 30 bytes" in told
    assert f"{nats_of(parameters, ids[:31]).mean():.4f} nats a token" in told


def test_a_perplexity_beyond_every_float(tmp_path, parameters, evaluated, monkeypatch):
    (tmp_path / "text.txt").write_text("text")
    for nats, shown in ((705.0, math.exp(705)), (710.0, None)):
        monkeypatch.setattr(evaluate, "losses_of", lambda *_, nats=nats: iter([np.full(4, nats)]))
        assert json.loads(evaluated("--data", tmp_path / "text.txt", "--json"))["perplexity"] == shown
    assert "\nperplexity   inf\n" in evaluated("--data", tmp_path / "text.txt")


def test_ids_beyond_the_encoding_of_a_larger_model_are_refused():
    config = replace(CONFIG, vocabulary=300, padded_vocabulary=0)
    weights = Weights(config, daskgpt.initial_parameters(config, seed=0), "float32")
    tokens, options = np.array([1, 280, 2]), evaluate.EvaluateConfig(data="tokens")
    examples = Examples(tokens, np.array([3]), tokens > 1, 256)
    for data in (tokens, examples):
        with pytest.raises(ValueError, match="largest=280, vocabulary=257"):
            evaluate.measure(weights, options, get_encoding("bytes"), data, 8)


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
