"""Tests of the work of kernel calls, and of the tool that compares kernels with the machine's limits."""

import time

import limits
import numpy as np
import pytest
from copies import seconds_of_all
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.model.parameters import step_operations
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.training.cost import features, work_of

SMALL = ModelConfig(blocks=2, heads=2, channels=32, vocabulary=50, padded_vocabulary=50, positions=16)
SHAPE = BenchConfig(batch_size=4, sequence_length=16)


@pytest.mark.parametrize(("chunk", "barrier"), [((4, 16), "step"), ((1, 16), "step"), ((2, 8), "phase")])
def test_operations_of_all_calls_are_those_of_the_model(chunk, barrier, monkeypatch):
    monkeypatch.setattr(limits, "EXPONENTIAL", 0)
    cut = dict(zip(("batch_chunk", "sequence_chunk"), chunk))
    job = job_of(SMALL, SHAPE, DataflowConfig(scheduler="sync", grain="block", barrier=barrier, **cut))
    with daskgpt.open_scheduler("sync") as scheduler:
        graph = TimedEngine(job, scheduler, 0).engine.step.kernels.graph
    works = [work for key in graph if (work := work_of(graph, key))]
    products = [
        work for work in works if "b" in (axes := work[0].rpartition(" ")[2]) and len(set(axes) & set("OCV")) == 2
    ]
    of_tokens = [work for work in products if not work[0].startswith(("attention", "embedding"))]
    operations = sum(limits.operations_of(*work) for work in of_tokens if "P" not in work[0] and "bt->V" not in work[0])
    attention = 6 * SMALL.blocks * SMALL.channels * 4 * 16 * 17
    assert operations == step_operations(SMALL, 4, 16) - attention
    pairs = sum(limits.operations_of(*work) for work in works if work[0].startswith("attention"))
    assert pairs == 7 * SMALL.blocks * SMALL.channels * 4 * 16 * 16  # the backward makes the scores again


def test_bytes_and_features_of_a_call():
    kind, sizes = "linear.forward btC,OC,O->btO", {"b": 2, "t": 8, "C": 16, "O": 32, "n": 1}
    assert features(kind, sizes) == [1, 2 * 8 * 16 + 32 * 16 + 32, 2 * 8 * 32, 2 * 8 * 16 * 32]
    assert limits.bytes_of(kind, sizes) == (4 * (2 * 8 * 16 + 2 * 8 * 32), 4 * (32 * 16 + 32))
    assert limits.operations_of(kind, sizes) == 2 * 2 * 8 * 16 * 32
    update = "adamw update btO,btC->OC"
    assert limits.bytes_of(update, sizes)[1] == 6 * 4 * 32 * 16


def test_tiles_whose_rate_is_taken_are_products():
    columns = limits.tiles.WIDTH * limits.tiles.LANES
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((limits.STEPS, size), np.float32) for size in (limits.tiles.ROWS, columns))
    sums = np.full((limits.tiles.ROWS, columns), np.nan, np.float32)
    limits.multiply_tiles(left, right, sums, 2)
    np.testing.assert_allclose(sums, left.T.astype("f8") @ right, **TOLERANCES["kernel float32"])


LLAMA = "--preset smollm2-135m --kv-heads 1 --hidden 32 --head-size 8 --vocabulary 64 --padded-vocabulary 64"


@pytest.mark.parametrize(("model", "call"), [("", "btC,OC,O->btO"), (LLAMA, "btC,OC->btO")])
def test_table_of_a_step(model, call, capsys, monkeypatch):
    monkeypatch.setattr(limits, "LEAST", 0.0)  # a call that is interrupted may take nearly all of a step this small
    flags = "--blocks 1 --heads 2 --channels 16 --batch-size 2 --sequence-length 16 --threads 2 --warmup 3 --recorded 1"
    assert limits.main([*model.split(), *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert f"linear.forward {call}" in shown
    assert "attention.backward" in shown
    assert "all kernels" in shown


def test_all_threads_are_waited_for():
    done = []
    seconds = seconds_of_all(lambda number, count: (time.sleep(0.01 * number), done.append(count)), 3, 1)
    assert (done, seconds >= 0.02) == ([1, 1, 1], True)
