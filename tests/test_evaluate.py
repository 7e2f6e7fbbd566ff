"""Loss of texts and token files, and multiple choice, beside what training's layers compute."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from command_lines import refused, run
from conftest import GOLDEN, random_parameters
from numpy.testing import assert_allclose
from tolerances import TOLERANCES

import daskgpt
from daskgpt.data.encodings import get_encoding
from daskgpt.data.hellaswag import read_hellaswag
from daskgpt.evaluate import sizes_of
from daskgpt.formats.llmc_questions import Question, read_questions
from daskgpt.formats.llmc_tokens import write_tokens
from daskgpt.generation.decoder import Weights
from daskgpt.generation.likelihood import answers, sequence_losses
from daskgpt.training.inference import Inference
from daskgpt.training.step import State

CONFIG = daskgpt.GPT2Config(blocks=2, heads=2, channels=16, vocabulary=257, positions=40)
QUESTIONS = [([1, 2, 3], [[4], [5, 6], [7, 8, 9], [10]], 2), ([9] * 60, [[7, 7], [8]], 0), ([5], [[1, 2], [3] * 20], 1)]


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(CONFIG, np.random.default_rng(8))


@pytest.fixture(scope="module")
def model(parameters, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    daskgpt.save(path, CONFIG, parameters, encoding="bytes", sequence_length=24)
    return path


def nats_of(parameters, tokens):
    """Of all tokens but the first, in float64, by the scores of training's layers for the whole text."""
    state, shape = State.of_weights(CONFIG, parameters), (1, len(tokens) - 1)
    inference = Inference(CONFIG, shape, shape, state.layout, ("logits",), grain="chunk")
    with daskgpt.open_scheduler("sync") as scheduler:
        logits = inference(scheduler, state, np.array([tokens[:-1]], np.int32))["logits"][0].astype(np.float64)
    likely = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - likely


def question_file(path, questions):
    """What llm.c's `write_evalfile` writes."""
    rows = []
    for index, (context, completions, label) in enumerate(questions):
        lists = [number for tokens in (context, *completions) for number in (len(tokens), *tokens)]
        rows += [65535, 2 * (5 + len(lists)), index, label, len(completions), *lists]
    header = np.zeros(256, "<i4")
    header[:4] = 20240522, 1, len(questions), max(2 * len(rows), 0)
    path.write_bytes(header.tobytes() + np.array(rows, "<u2").tobytes())
    return path


def test_every_token_but_the_first_is_predicted_once(parameters, random):
    tokens = random.integers(0, 257, 100)
    for length in (24, 40, 33, 1):
        expected = np.concatenate([nats_of(parameters, tokens[s : s + length + 1]) for s in range(0, 99, length)])
        assert expected.size == 99
        for threads in (1, 2):
            found = np.concatenate(
                list(sequence_losses(Weights(CONFIG, parameters, "float32"), tokens, length, threads))
            )
            assert_allclose(found, expected, **TOLERANCES["nats a token"])


def test_loss_perplexity_and_bits_of_a_text_and_of_its_tokens(model, parameters, tmp_path):
    text = "Größe, naïve: €\n" * 12
    (tmp_path / "text.txt").write_text(text)
    ids = np.array([256, *text.encode()])
    write_tokens(tmp_path / "tokens.bin", ids)
    expected = np.concatenate([nats_of(parameters, ids[s : s + 25]) for s in range(0, len(ids) - 1, 24)])
    results = {}
    for name in ("text.txt", "tokens.bin"):
        result = run("evaluate", model, "--data", tmp_path / name, "--json", "--threads", 2)
        assert result.returncode == 0, result.stderr
        results[name] = json.loads(result.stdout)
        assert results[name].pop("data") == str(tmp_path / name)
    found = results["text.txt"]
    assert found == results["tokens.bin"]
    assert (found["tokens"], found["bytes"], found["sequence_length"]) == (len(text.encode()), len(text.encode()), 24)
    assert found["loss"] == pytest.approx(expected.mean(), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-4)
    assert found["bits_a_byte"] == pytest.approx(expected.mean() / math.log(2), abs=1e-5)
    told = run("evaluate", model, "--data", tmp_path / "text.txt", "--limit", 30, "--sequence-length", 40).stdout
    assert "30 tokens, 30 bytes, sequences of 30" in told or "30 tokens, 30 bytes, sequences of 40" in told
    assert f"{nats_of(parameters, ids[:31]).mean():.4f} nats a token" in told


def test_end_of_text_has_no_bytes_and_every_other_token_its_own():
    sizes = sizes_of(get_encoding("bytes"))
    assert sizes.tolist() == [1] * 256 + [0]


def test_multiple_choice_is_that_of_whole_sequences(parameters, random):
    questions = []
    for _ in range(40):
        context = random.integers(0, 257, random.integers(1, 60))
        lengths = random.integers(1, 12, random.integers(2, 6))
        completions = tuple(random.integers(0, 257, length) for length in lengths)
        questions.append(Question(context, completions, int(random.integers(len(completions)))))
    found = list(answers(Weights(CONFIG, parameters, "float32"), questions, CONFIG.positions, threads=2))
    kinds = set()
    for question, answer in zip(questions, found, strict=True):
        longest = max(map(len, question.completions))
        context = question.context[-(CONFIG.positions - longest) :]
        nats = [
            nats_of(parameters, np.concatenate([context, each]))[len(context) - 1 :] for each in question.completions
        ]
        assert answer.right == (np.argmin([each.sum() for each in nats]) == question.label)
        assert answer.right_normalised == (np.argmin([each.mean() for each in nats]) == question.label)
        kinds.add((answer.right, answer.right_normalised))
    assert len(kinds) > 2  # both accuracies are seen to differ


def test_llmc_questions_are_read_as_they_were_written(model, tmp_path):
    path = question_file(tmp_path / "questions.bin", QUESTIONS)
    found = read_questions(path)
    for question, (context, completions, label) in zip(found, QUESTIONS, strict=True):
        assert question.context.tolist() == context
        assert [each.tolist() for each in question.completions] == completions
        assert question.label == label
    result = run("evaluate", model, "--data", path)
    assert result.returncode == 0, result.stderr
    assert "3 questions of 2.67 completions" in result.stdout
    assert "accuracy     " in result.stdout
    assert "normalised   " in result.stdout


def test_hellaswag_lines_are_questions(model, tmp_path):
    path = tmp_path / "hellaswag_val.jsonl"
    lines = [
        {"ind": 1, "ctx": "A man é", "endings": ["sits.", "runs away.", "flies", "é"], "label": 2, "split": "val"},
        {"ind": 2, "ctx": "She", "endings": ["is.", "was."], "label": "1"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_hellaswag(path, get_encoding("bytes"))
    assert [question.label for question in found] == [2, 1]
    assert bytes(found[0].context.tolist()).decode() == "A man é"
    assert [bytes(each.tolist()).decode() for each in found[0].completions] == [" sits.", " runs away.", " flies", " é"]
    record = json.loads(run("evaluate", model, "--data", path, "--json").stdout)
    assert record["questions"] == 2
    assert record["accuracy"] == record["right"] / 2
    assert json.loads(run("evaluate", model, "--data", path, "--json", "--limit", 1).stdout)["questions"] == 1


DAMAGED = {
    "version": (lambda data: data[:4] + b"\x07" + data[5:], "the version must be 1"),
    "count": (lambda data: data[:8] + b"\x00" + data[9:], "the file must hold questions"),
    "more questions": (lambda data: data[:8] + b"\x04" + data[9:], "the file must hold all of its questions"),
    "odd": (lambda data: data + b"x", "the questions must be 2-byte numbers"),
    "more": (lambda data: data + b"xx", "nothing must follow the last question"),
    "cut": (lambda data: data[:-2], "the file must hold all of its questions"),
    "header": (lambda data: data[:1000], "the file must begin with a header of 1024 bytes"),
    "mark": (lambda data: data[:1024] + b"\x00" + data[1025:], "a question must begin with its mark and its number"),
    "size": (lambda data: data[:1026] + b"\x0c" + data[1027:], "contexts and completions must be whole"),
    "label": (lambda data: data[:1030] + b"\x09" + data[1031:], "the label must be one of the completions"),
    "completions": (lambda data: data[:1032] + b"\x03" + data[1033:], "a question must be as long as it says"),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_damaged_question_file_is_refused(tmp_path, name):
    damage, message = DAMAGED[name]
    path = question_file(tmp_path / "questions.bin", QUESTIONS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^read_questions: {message}.*; got path="):
        read_questions(path)


def test_what_cannot_be_evaluated_is_one_line(model, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": 0}\n{"ctx": "a"}\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"ctx": "\xe9"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "label.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": 2}')
    (tmp_path / "short.txt").write_text("é")
    question_file(tmp_path / "ids.bin", [([1], [[2], [300]], 0)])
    question_file(tmp_path / "long.bin", [([1], [[2], [3] * 40], 0)])
    cases = {
        "bad.jsonl": 'a line must be a JSON object with "ctx" (a text), "endings" (texts) and "label"',
        "latin.jsonl": "the file must be UTF-8 text",
        "empty.jsonl": "the file must hold questions",
        "label.jsonl": "found=a label that names none of the endings",
        "ids.bin": "every id must be at least 0 and below the vocabulary; got id=300",
        "long.bin": "a completion must fit the model's context behind a token; got tokens=40, context=40",
        "missing.txt": "missing.txt",
        "missing.jsonl": "missing.jsonl",
    }
    for name, message in cases.items():
        assert message in refused(run("evaluate", model, "--data", tmp_path / name)), name
    assert "line=2, found=no endings" in refused(run("evaluate", model, "--data", tmp_path / "bad.jsonl"))
    assert "--data must name a file" in refused(run("evaluate", model))
    assert "sequence_length=41" in refused(
        run("evaluate", model, "--data", tmp_path / "short.txt", "--sequence-length", 41)
    )
    assert refused(run("evaluate", GOLDEN / "missing.bin", "--data", tmp_path / "short.txt"))
