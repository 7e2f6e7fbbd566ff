"""`bench --generation`: what it measures and says, and transformers beside it."""

from __future__ import annotations

import importlib.util
import json

import pytest

from daskgpt.bench import main
from daskgpt.config.model import GPT2Config
from daskgpt.generation.decoder import Weights
from daskgpt.instruments.generating import EARLY, TOKENS, Writing
from daskgpt.model.parameters import initial_parameters, parameter_count

FLAGS = "--generation --blocks 1 --heads 2 --channels 16 --vocabulary 300 --positions 40 --steps 1 --threads 2"
FLAGS = FLAGS.split()


def test_the_record_of_a_measurement(capsys):
    assert main([*FLAGS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    kinds = [(row["precision"], row["texts"], row["position"]) for row in record["rows"]]
    points = [(1, 10), (1, 24), (8, 10)]
    assert kinds == [(precision, *point) for precision in ("float32", "bfloat16") for point in points]
    for row in record["rows"]:
        assert row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"]
        assert row["tokens_per_s"] == pytest.approx(row["texts"] / row["step_ms"] * 1e3, rel=1e-2)
        assert row["bandwidth_share"] > 0
    assert record["flat_float32"] == pytest.approx(record["rows"][1]["step_ms"] / record["rows"][0]["step_ms"], rel=1)
    assert record["threads"] == 2


def test_what_a_person_reads(capsys):
    assert main(FLAGS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "texts" in line)
    for start in ("copy   ", "float32      1    10", "bfloat16     8    10", "a late token / an early one"):
        assert any(line.startswith(start) for line in lines), start


def test_bytes_of_a_token_are_those_of_the_arrays():
    config = GPT2Config(blocks=2, heads=2, channels=32, vocabulary=100, padded_vocabulary=128, positions=64)
    parameters = initial_parameters(config, 0)
    read = parameter_count(config) - 64 * 32  # no positions; padding is not counted
    writing = Writing(Weights(config, parameters, "float32"), 3, EARLY, 1, 0)
    kept = 3 * 2 * 2 * 32 * (EARLY + TOKENS // 2 + 1)  # texts, blocks, keys and values, channels, positions
    assert writing.read == 4 * (read + kept)
    matrices = parameter_count(config, multiplied=True)
    rounded = Writing(Weights(config, parameters, "bfloat16"), 3, EARLY, 1, 0)
    assert rounded.read == 4 * (read - matrices) + 2 * (matrices + kept)


def test_every_turn_writes_the_same_tokens():
    config = GPT2Config(blocks=1, heads=2, channels=16, vocabulary=100, positions=64)
    weights = Weights(config, initial_parameters(config, 0), "float32")
    writing, whole = (Writing(weights, 2, EARLY, 1, 0, whole) for whole in (False, True))
    assert len(writing.run(TOKENS)) == TOKENS
    first = writing.written
    writing.run(TOKENS)
    whole.run(TOKENS)
    assert writing.written == first == whole.written
    assert [len(text) for text in first] == [TOKENS] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan"], "--generation must come alone, or with --against transformers; got against=none, plan=True"),
        (["--against", "torch"], "--generation must come alone, or with --against transformers; got against=torch"),
        (["--positions", "20"], "a model that writes must have enough positions; got positions=20. Give 26 or more."),
    ],
)
def test_bad_input_is_found_before_anything_runs(flags, message):
    with pytest.raises(ValueError, match=f"^bench: {message}"):
        main([*FLAGS, *flags])


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="transformers and PyTorch are not installed (the extra test-peers)",
)
def test_transformers_writes_the_same(capsys):
    assert main([*FLAGS, "--json", "--against", "transformers"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["against"].startswith("transformers ")
    assert record["rate_float32"] > 0
    assert record["theirs_ms"] > 0
