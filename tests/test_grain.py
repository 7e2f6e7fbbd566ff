"""Merging tasks: the same bits at every grain, fewer tasks, no cycles, values dropped when nobody needs them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from test_model import losses_and_parameters

import daskgpt
from daskgpt.config.model import preset
from daskgpt.config.run import DataConfig, OptimizerConfig, RunConfig
from daskgpt.graph import calls, inplace
from daskgpt.graph.grain import GRAINS
from daskgpt.graph.nodes import is_leaf
from daskgpt.graph.program import Call, Program, calls_of
from daskgpt.graph.spans import Span
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.grain_choice import GrainChoice, expected_block
from daskgpt.training.step import TrainingStep


def assert_same_bits(found, expected, what):
    assert found[0] == expected[0], what
    for name, value in found[1].items():
        np.testing.assert_array_equal(value, expected[1][name], err_msg=f"{what} {name}")


@pytest.mark.parametrize("chunk", [(2, 12), (2, 4), (4, 12)], ids=str)
def test_every_grain_gives_the_same_bits(chunk):
    expected = losses_and_parameters("sync", 1, chunk, grain="kernel", in_place=False)
    for grain in GRAINS:
        for scheduler, in_place in (("sync", True), ("threads", True), ("threads", False)):
            found = losses_and_parameters(scheduler, 2, chunk, grain=grain, in_place=in_place)
            assert_same_bits(found, expected, f"{grain} {scheduler} {in_place}")


@pytest.mark.parametrize("rows", [1, 40])
def test_tensors_shared_by_several_update_tasks_give_the_same_bits(rows, monkeypatch):
    """Two ways to share the embedding: its two gradients in one task, or the first one on its own."""
    monkeypatch.setattr(calls, "ROWS_ELEMENTS", 1)  # 64 rows at a time
    monkeypatch.setattr(inplace, "TASK_ELEMENTS", 1)  # each in a task of its own
    config = replace(SMALL, vocabulary=200, padded_vocabulary=0, channels=rows * 2)
    random = np.random.default_rng(8)
    parameters, batch = random_parameters(config, random), random_batch(config, random)
    results = []
    for in_place in (False, True):
        step = TrainingStep(config, (4, 12), (2, 12), OptimizerConfig(), in_place=in_place)
        with open_scheduler("threads", 2) as scheduler:
            state = step.initial(parameters)
            for _ in range(2):
                loss, state = step(scheduler, state, *batch, 2)
            results.append(([loss], state.parameters(scheduler)))
    assert_same_bits(results[1], results[0], rows)
    shares = [key for key in step.runnable.graph if key[0].startswith("adamw-wte.weight")]
    assert len(shares) == 4


def test_updates_in_place_wait_for_every_reader_of_the_old_value():
    step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="kernel", in_place=True)
    graph = step.runnable.graph
    homes = {call.key: key for key, node in graph.items() if not is_leaf(node) for call in node.func.calls}
    checked = 0
    for update, readers in step.recorded.after.items():
        for reader in readers:
            assert homes[reader] in graph[homes[update]].dependencies
            checked += 1
    assert checked > 50


def test_parameters_that_were_given_are_not_written_over(random, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    config = replace(SMALL, vocabulary=257, padded_vocabulary=0)
    parameters = random_parameters(config, random)
    before = {name: value.copy() for name, value in parameters.items()}
    data = DataConfig(data=str(text), batch_size=4, sequence_length=12)
    result = daskgpt.fit(config, data, run=RunConfig(steps=2, validation_batches=1), parameters=parameters)
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, before[name])
        assert not np.array_equal(result.parameters[name], before[name])


def tasks_of(grain, chunk):
    graph = TrainingStep(SMALL, (4, 12), chunk, OptimizerConfig(), grain=grain).runnable.graph
    return [key for key, node in graph.items() if not is_leaf(node)]


def test_a_coarser_grain_has_fewer_tasks():
    whole = [len(tasks_of(grain, (2, 12))) for grain in GRAINS]
    assert whole == sorted(whole, reverse=True)
    assert len(set(whole)) == 4
    cut = [len(tasks_of(grain, (2, 6))) for grain in ("kernel", "segment")]
    assert cut[0] > 2 * cut[1]


def test_tasks_of_a_chunk_that_holds_whole_sequences_become_one():
    names = [key[0] for key in tasks_of("chunk", (2, 12)) if not key[0].startswith(("update", "mean"))]
    assert len([name for name in names if name.startswith("tokens")]) == 2  # one a chunk


def chunk_of_call(call):
    """(b, t) of what a call computes, None for a sum or an update."""
    axes = getattr(call.function, "__self__", call.function).axes
    index = dict(zip(axes, call.key[1:]))
    return (index.get("b"), index.get("t")) if {"b", "t"} & set(axes) else None


def test_a_segment_stays_in_its_chunk():
    graph = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="segment").runnable.graph
    programs = [node.func for node in graph.values() if not is_leaf(node)]
    sizes = [len(program.calls) for program in programs]
    assert max(sizes) > 10
    for program in programs:
        assert len({chunk_of_call(call) for call in program.calls}) == 1


@pytest.mark.parametrize(("seconds", "threads", "grain"), [(1.0, 2, "segment"), (1e-6, 2, "chunk"), (1e-6, 4, "block")])
def test_auto_takes_the_finest_merged_grain_that_is_long_enough(seconds, threads, grain):
    step = TrainingStep(SMALL, (4, 12), (2, 12), OptimizerConfig(), grain="segment", in_place=True)
    calls = [call.key for node in step.runnable.graph.values() for call in calls_of(node)]
    choice = GrainChoice("auto", "step", in_place=True, block_seconds=seconds)
    assert (choice.first, choice.open) == ("segment", True)
    assert choice.settle(step, [Span(key, 1, 0.0, seconds) for key in calls], threads).startswith(f"{grain}, tasks of")
    assert not choice.open
    assert step.grain == grain


@pytest.mark.parametrize(
    ("config", "batch", "workers", "grain"),
    [
        (preset("tiny"), (12, 64), 2, "chunk"),
        (preset("tiny", blocks=6, heads=6, channels=384), (32, 64), 2, "block"),
        (preset("gpt2"), (8, 256), 2, "block"),
        (preset("gpt2"), (8, 256), 8, "block"),
    ],
)
def test_a_cluster_begins_with_large_tasks(config, batch, workers, grain):
    choice = GrainChoice("auto", "step", in_place=False, block_seconds=expected_block(config, batch, workers))
    assert (choice.first, choice.open) == (grain, False)


def test_a_program_drops_a_value_after_its_last_reader():
    alive = []

    class Value:
        pass

    def make():
        value = Value()
        alive.append(weakref.ref(value))
        return value

    def read(value):
        return 1

    def look(number):
        gc.collect()
        return alive[0]() is None

    calls = [
        Call(("a",), make, [], 0, (), True),
        Call(("b",), read, [0], 1, (0,), True),
        Call(("c",), look, [1], 2, (), True),
    ]
    assert Program(calls, [], [2])() is True
