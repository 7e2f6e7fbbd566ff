"""A model stays on the cluster that trains it: a worker answers what is asked of it, who writes it holds little."""

from __future__ import annotations

import os

import numpy as np
import pytest
from conftest import SMALL, random_batch
from small_runs import FLAGS

import daskgpt
from daskgpt import train
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.parameters import parameter_shapes
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.schedulers.losses import LostResults
from daskgpt.training.asked import asked
from daskgpt.training.fetched_state import FetchedState
from daskgpt.training.step import State, TrainingStep

TEXT = "first citizen before we proceed any further hear me speak " * 40


@pytest.fixture(scope="module")
def workers():
    with open_scheduler("local", 2) as scheduler:
        yield scheduler


def summed(parameters):
    """Where it runs, and what it finds."""
    return os.getpid(), {name: (value.dtype, value.shape, float(value.sum())) for name, value in parameters.items()}


def state_after_a_step(scheduler, precision, parts):
    step = TrainingStep(
        SMALL, (4, 12), (2, 12), OptimizerConfig(), precision_of(precision), in_place=scheduler.in_place, parts=parts
    )
    initial = step.initial(daskgpt.initial_parameters(SMALL, 0))
    _, state = step(scheduler, initial, *random_batch(SMALL, np.random.default_rng(1), (4, 12)), 10)
    return state


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_worker_answers_with_the_parameters_of_threads(workers, precision, parts, monkeypatch):
    with open_scheduler("threads", 2) as threads:
        here, wanted = asked(threads, state_after_a_step(threads, precision, parts), summed)
    state = state_after_a_step(workers, precision, parts)
    monkeypatch.setattr(State, "parameters", None)  # nobody fetches them
    process, found = asked(workers, state, summed)
    assert here == os.getpid() != process
    assert found == wanted


def test_a_sample_is_the_same_text_wherever_it_is_written(workers):
    with open_scheduler("threads", 2) as threads:
        wanted = asked(threads, state_after_a_step(threads, "float32", 2), _written)
    assert asked(workers, state_after_a_step(workers, "float32", 2), _written) == wanted


def _written(parameters):
    return list(daskgpt.sample(SMALL, parameters, [1, 2], 8, seed=3))


def test_a_sample_that_is_lost_costs_no_model(tmp_path, monkeypatch, capsys):
    def lost(*_):
        raise LostResults("fetch", "a result must stay somewhere", "none")

    monkeypatch.setattr(train, "shown_sample", lost)
    (tmp_path / "text.txt").write_text(TEXT)
    flags = [*FLAGS.split(), "--data", str(tmp_path / "text.txt"), "--steps", "3", "--out", str(tmp_path / "run")]
    assert train.main([*flags, "--sample-tokens", "5"]) == 0
    assert "sample     there is none: a result must stay somewhere; got none\n" in "".join(capsys.readouterr())
    assert daskgpt.load(tmp_path / "run")


def test_who_writes_a_state_of_a_cluster_holds_one_array_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("daskgpt.training.fetched_state.TOGETHER", 1)
    fetched, held = FetchedState._fetched, []

    def counted(self, group):
        held.append((len(self.latest), len(group)))
        return fetched(self, group)

    monkeypatch.setattr(FetchedState, "_fetched", counted)
    (tmp_path / "text.txt").write_text(TEXT)
    data = {"data": str(tmp_path / "text.txt"), "sequence_length": 8, "batch_size": 4}
    run = {"steps": 3, "validation_batches": 1}
    config = daskgpt.preset("tiny", blocks=1, heads=2, channels=8, positions=8)
    both = [
        daskgpt.fit(config, data, dataflow={"scheduler": scheduler, "threads": 2}, run=run | {"out": out}, quiet=True)
        for scheduler, out in [("threads", ""), ("local", str(tmp_path / "run"))]
    ]
    assert set(held) == {(0, 1)}
    assert len(held) == 3 * len(parameter_shapes(config)), "weights and two moments, once each"
    np.testing.assert_equal(both[1].parameters, dict(both[0].parameters))
