"""Tests of `benchmarks/generation.py`: its measurements and output."""

import pytest
from generation import EARLY, TOKENS, Writing, main
from records import read_records

from daskgpt.config.model import ModelConfig
from daskgpt.generation.decoder import Weights
from daskgpt.model.parameters import initial_parameters, parameter_count

FLAGS = "--blocks 1 --heads 2 --channels 16 --vocabulary 300 --positions 40 --steps 1 --threads 2"


def test_measurement_record(tmp_path, monkeypatch):
    monkeypatch.setattr("generation.copy_rate", lambda threads, size: 1e9 / threads)
    monkeypatch.setattr("compare.turns.DISTURBED", float("inf"))  # one turn
    assert main([*FLAGS.split(), "--record", str(tmp_path / "record")]) == 0
    (record,) = read_records(tmp_path / "record")
    figures = {name: figure.median for name, figure in record.figures.items()}
    rows = [f"{precision}_{row}" for precision in ("float32", "bfloat16") for row in ("1_10", "1_24", "8_10")]
    assert [name.removesuffix("_step") for name in figures if name.endswith("_step")] == rows
    for row in rows:
        texts, step = int(row.split("_")[1]), figures[f"{row}_step"]
        assert figures[f"{row}_tokens"] == pytest.approx(texts / step * 1e3, rel=1e-2)
        assert figures[f"{row}_share"] == pytest.approx(figures[f"{row}_read"] / step, rel=1e-2)
    flat = figures["float32_1_24_step"] / figures["float32_1_10_step"]
    assert figures["flat_float32"] == pytest.approx(flat, rel=5e-2)
    eight = 8 * figures["bfloat16_1_10_step"] / figures["bfloat16_8_10_step"]
    assert figures["batch_bfloat16"] == pytest.approx(eight, rel=5e-2)
    assert (record.settings["threads"], record.command.split()[:2]) == (2, ["python", "benchmarks/generation.py"])
    with pytest.raises(ValueError, match="positions=20"):
        main(["--positions", "20"])


def test_bytes_of_a_token_match_the_arrays():
    config = ModelConfig(blocks=2, heads=2, channels=32, vocabulary=100, padded_vocabulary=128, positions=64)
    parameters = initial_parameters(config, 0)
    read = parameter_count(config) - 64 * 32  # no positions; padding is not counted
    kept = 3 * 2 * 2 * 32 * (EARLY + TOKENS // 2 + 1)  # texts, blocks, keys and values, channels, positions
    matrices = parameter_count(config, multiplied=True)
    expected = {"float32": 4 * (read + kept), "bfloat16": 4 * (read - matrices) + 2 * (matrices + kept)}
    for precision, size in expected.items():
        assert Writing(Weights(config, parameters, precision), 3, EARLY, 1, 0).read == size
