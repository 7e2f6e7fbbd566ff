"""Tests of what `--plan --workers` says of a step that is spread over workers."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, random_parameters

from daskgpt import bench
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.instruments.memory import predict
from daskgpt.instruments.traffic import SHOWN, describe_loads, loads
from daskgpt.model.precision import precision_of
from daskgpt.training.step import TrainingStep

# So large that what passes is numbers: a message's frame has some hundred bytes.
CONFIG = replace(SMALL, channels=128, blocks=4)
LOOKED_UP = 32 * 12 * 4  # bytes of a channel of a worker's tokens


def spread(batch, chunk, parts=2, config=SMALL, precision="float32", **options):
    options |= {"parts": parts, "precision": precision_of(precision)}
    return TrainingStep(config, batch, chunk, OptimizerConfig(), **options)


def test_what_passes_by_kind():
    few, many = loads(spread((2, 1), (1, 1))), loads(spread((64, 12), (8, 12)))
    assert sum(own.sent["sums"] for own in few) == 0 < sum(own.sent["activations"] for own in few)
    assert sum(own.sent["activations"] for own in many) == 0 < sum(own.sent["sums"] for own in many)
    parameters = sum(value.nbytes for value in random_parameters(SMALL, np.random.default_rng(0)).values())
    assert sum(own.sent["weights"] for own in many) == parameters, "each weight once, to who does not own it"
    assert sum(own.sent["losses"] for own in many) == 64 * 12 * 4 / 2
    assert [own.sent.total() for own in many] == [own.received.total() for own in reversed(many)]


@pytest.mark.parametrize(("precision", "size"), [("float32", 1), ("bfloat16", 0.5)])
def test_the_owner_of_a_large_table_is_not_everybodys_server(precision, size):
    """It sends the table twice, to who hands it on, and gets as many totals of it as the tree of eight has levels."""
    config = replace(CONFIG, blocks=1, vocabulary=400 * CONFIG.channels, padded_vocabulary=0)
    found = loads(spread((64, 12), (8, 12), 8, config, precision, groups=8))
    table = 4 * config.vocabulary * config.channels
    assert sum(own.sent["weights"] for own in found) == pytest.approx(7 * size * table, rel=0.1)
    assert max(own.sent["weights"] for own in found) == pytest.approx(2 * size * table, rel=0.1)
    assert max(own.received["weights"] for own in found) == pytest.approx(size * table, rel=0.1)
    tables = 2  # its gradient is the sum of two, as table and as unembedding; one of them goes on from the other
    assert max(own.received["sums"] for own in found) <= 1.1 * tables * 3 * table
    assert max(own.sent["sums"] for own in found) <= 1.1 * tables * table


def test_in_bfloat16_weights_pass_in_bfloat16():
    """Halves but of the vectors, and of what is looked up in the tables the activations."""
    whole, half = (loads(spread((64, 12), (32, 12), 2, CONFIG, name)) for name in ("float32", "bfloat16"))
    assert 0.5 < sum(own.sent["weights"] for own in half) / sum(own.sent["weights"] for own in whole) < 0.55
    assert sum(own.sent["activations"] for own in half) == LOOKED_UP * CONFIG.channels


def test_a_large_table_stays_where_it_is_until_it_multiplies(monkeypatch):
    for smallest, sent in ((10**9, 0), (1, LOOKED_UP * SMALL.channels)):  # what the owner has found for the other's
        monkeypatch.setattr("daskgpt.training.step.LARGE_TABLE", smallest)
        assert sum(own.sent["activations"] for own in loads(spread((64, 12), (32, 12)))) == sent


def test_memory_of_a_worker_is_its_part():
    def job_of(workers):
        asked = bench.BenchConfig(batch_size=8, sequence_length=12)
        return bench.job_of(CONFIG, asked, DataflowConfig(scheduler="local", threads=workers))

    alone = predict(job_of(1), 1).peak
    assert alone / 4 < max(own.memory for own in predict(job_of(4), 4).loads) < alone


def test_the_table_of_a_plan_for_workers(capsys):
    assert bench.main(["--plan", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("worker ")]
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [row[0] for row in rows] == ["0", "1", "together"]
    assert int(rows[2][1]) == int(rows[0][1]) + int(rows[1][1])
    assert f"tasks         {rows[2][1]} a step" in lines
    many = describe_loads(loads(spread((12, 12), (1, 12), 12))).splitlines()
    assert many[SHOWN + 1] == "and 4 more"
