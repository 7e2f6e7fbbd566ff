"""Tests of `bench --generation`: its measurements and output."""

import pytest

from daskgpt.bench import main
from daskgpt.config.model import GPT2Config
from daskgpt.generation.decoder import Weights
from daskgpt.instruments.generating import EARLY, TOKENS, Generation, Row, Writing
from daskgpt.instruments.measure import Turn
from daskgpt.instruments.records import Record
from daskgpt.instruments.statistics import Spread
from daskgpt.model.parameters import initial_parameters, parameter_count

FLAGS = "--generation --blocks 1 --heads 2 --channels 16 --vocabulary 300 --positions 40 --steps 1 --threads 2"


def test_measurement_record(capsys, monkeypatch):
    monkeypatch.setattr("daskgpt.instruments.generating.copy_rate", lambda threads: 1e9)
    monkeypatch.setattr("daskgpt.instruments.measure.DISTURBED", float("inf"))  # one turn
    assert main([*FLAGS.split(), "--json"]) == 0
    record = Record.of_line(capsys.readouterr().out.encode())
    found = {name: figure.median for name, figure in record.figures.items()}
    rows = [f"{precision}_{row}" for precision in ("float32", "bfloat16") for row in ("1_10", "1_24", "8_10")]
    assert [name.removesuffix("_step") for name in found if name.endswith("_step")] == rows
    for row in rows:
        texts, step = int(row.split("_")[1]), found[f"{row}_step"]
        assert found[f"{row}_tokens"] == pytest.approx(texts / step * 1e3, rel=1e-2)
        assert found[f"{row}_share"] == pytest.approx(found[f"{row}_read"] / step, rel=1e-2)
    assert found["flat_float32"] == pytest.approx(found["float32_1_24_step"] / found["float32_1_10_step"], rel=5e-2)
    eight = 8 * found["bfloat16_1_10_step"] / found["bfloat16_8_10_step"]
    assert found["batch_bfloat16"] == pytest.approx(eight, rel=5e-2)
    assert record.settings["threads"] == 2


def test_printed_measurement():
    row = Row("float32", 8, 10, Spread((0.5, 0.25, 1.0)), 3_000_000, Spread((0.25,)))
    ratios = {name: Spread((2.0,)) for name in ("flat_float32", "batch_float32")}
    turns = [Turn(((1,),), others) for others in (0.0, 0.0, 1.0)]
    found = Generation(GPT2Config(), 2, Spread((3e9,)), (row,), ratios, turns)
    lines = " ".join(found.describe().split())
    for words in ("3.0 (3.0 .. 3.0) GB/s", "ran in 1 of these", "float32 8 10 500.0 (250.0 .. 1,000.0) 16.0 3 0.25 ("):
        assert words in lines
    expected = {"copy": 3, "float32_8_10_step": 500, "float32_8_10_share": 0.25}
    expected |= {"float32_8_10_tokens": 16, "float32_8_10_read": 3} | dict.fromkeys(ratios, 2)
    assert {name: figure.median for name, figure in found.figures().items()} == expected


def test_bytes_of_a_token_match_the_arrays():
    config = GPT2Config(blocks=2, heads=2, channels=32, vocabulary=100, padded_vocabulary=128, positions=64)
    parameters = initial_parameters(config, 0)
    read = parameter_count(config) - 64 * 32  # no positions; padding is not counted
    kept = 3 * 2 * 2 * 32 * (EARLY + TOKENS // 2 + 1)  # texts, blocks, keys and values, channels, positions
    matrices = parameter_count(config, multiplied=True)
    expected = {"float32": 4 * (read + kept), "bfloat16": 4 * (read - matrices) + 2 * (matrices + kept)}
    for precision, size in expected.items():
        assert Writing(Weights(config, parameters, precision), 3, EARLY, 1, 0).read == size


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
