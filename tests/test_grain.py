"""Tests of the tasks of a step: how they are merged, where they wait, and micro-batches."""

import gc
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from math import prod
from operator import attrgetter

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from one_number import Dials, Model, bits_after_steps
from small_runs import fit
from steps import run_step, state_of, step_of
from tolerances import TOLERANCES

from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.graph import calls, update_in_place
from daskgpt.graph.accumulate import MicroBatches
from daskgpt.graph.barriers import memory_waits
from daskgpt.graph.calls import origin_of
from daskgpt.graph.fuse import GRAINS
from daskgpt.graph.nodes import is_leaf
from daskgpt.graph.program import Call, Program, Span, calls_of
from daskgpt.model.layers import CROSSENTROPY
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import precision_of
from daskgpt.profiling.plan import predict
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.autotune import GrainChoice
from daskgpt.training.job import Job


@pytest.mark.parametrize("rows", [1, 40])
def test_shared_update_tasks_give_the_same_bits(rows, monkeypatch):
    """Two ways to share the embedding: its two gradients in one task, or the first one on its own."""
    monkeypatch.setattr(calls, "ROWS_ELEMENTS", 1)  # 64 rows at a time
    for name in ("TASK_ELEMENTS", "LEAST_ELEMENTS"):
        monkeypatch.setattr(update_in_place, name, 1)  # each in a task of its own
    config = replace(SMALL, vocabulary=200, padded_vocabulary=0, channels=rows * 2)
    model, dials = Model(config, (4, 12)), [Dials((2, 12), "step", "block", "threads", 2, one) for one in (False, True)]
    assert len({bits_after_steps(model, "float32", one) for one in dials}) == 1
    step = step_of(config, (4, 12), (2, 12), OptimizerConfig(), in_place=True)
    shares = [key for key in step.graph if key[0].startswith("adamw-wte.weight")]
    assert len(shares) == 4


@pytest.mark.parametrize(("precision", "of_piece"), [("float32", 8), ("bfloat16", 1)])
def test_more_threads_share_updates_and_heads_and_change_no_bit(precision, of_piece, monkeypatch):
    monkeypatch.setattr(update_in_place, "THREADS_OF_PIECE", of_piece)
    monkeypatch.setattr(update_in_place, "TASK_ELEMENTS", 1 << 13)
    monkeypatch.setattr(update_in_place, "LEAST_ELEMENTS", 1)
    config = replace(SMALL, vocabulary=300, padded_vocabulary=0)
    model, by_threads = (config, (8, 12), (1, 12), OptimizerConfig(), precision_of(precision)), {}
    for threads in (2, 3, 8):
        graph = step_of(*model, in_place=True, threads=threads).kernels.graph
        waits = memory_waits(graph, CROSSENTROPY.name, MicroBatches(1, 8), threads=threads)
        heads = sum(origin_of(graph[key]).layer == CROSSENTROPY.name for key in waits)
        updates = sum(key[0].startswith("adamw-wte.weight") for key in graph)
        dials = Dials((1, 12), "step", "block", "threads", threads, in_place=True)
        by_threads[threads] = heads, updates, bits_after_steps(Model(config, (8, 12)), precision, dials)
    (heads, updates, bits), (few, _, same), (none, more, also) = by_threads.values()
    assert (heads, few, none) == (6, 5, 0)
    assert more > updates
    assert bits == same == also


def test_updates_in_place_wait_for_every_reader_of_the_old_value():
    step = step_of(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="kernel", in_place=True)
    graph = step.graph
    homes = {call.key: key for key, node in graph.items() if not is_leaf(node) for call in node.func.calls}
    waits = [(update, reader) for update, readers in step.kernels.after.items() for reader in readers]
    assert len(waits) > 50
    assert all(homes[reader] in graph[homes[update]].dependencies for update, reader in waits)


def test_given_parameters_are_not_overwritten(random, small_text):
    config = replace(SMALL, vocabulary=257, padded_vocabulary=0)
    parameters = random_parameters(config, random)
    before = {name: value.copy() for name, value in parameters.items()}
    result = fit(small_text, config=config, parameters=parameters, steps=2)
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, before[name])
        assert not np.array_equal(result.parameters[name], before[name])


def tasks_of(grain, chunk, **more):
    graph = step_of(SMALL, (4, 12), chunk, OptimizerConfig(), grain=grain, **more).graph
    return [key for key, node in graph.items() if not is_leaf(node)]


def test_coarser_grains_have_fewer_tasks():
    whole = [len(tasks_of(grain, (2, 12))) for grain in GRAINS]
    assert whole == sorted(whole, reverse=True)
    assert len(set(whole)) == 4
    cut = [len(tasks_of(grain, (2, 6))) for grain in ("kernel", "segment")]
    assert cut[0] > 2 * cut[1]
    for grain, passes in (("block", [4, 2, 4]), ("chunk", [0, 2, 0])):  # of two chunks
        named = Counter(key[0].partition("-")[0] for key in tasks_of(grain, (2, 12)))
        assert [named[f"tokens.{way}"] for way in ("forward", "head", "backward")] == passes
    waits = {key[0].rpartition("-")[0] for key in tasks_of("block", (1, 12), accumulate=2)}
    assert "accumulate.backward-micro-batch.1_" in waits


@pytest.mark.parametrize(
    ("head", "threads", "clip"),
    [("tied", 1, 0.0), ("untied", 2, 0.1), ("tied", 5, 0.0), ("tied", 5, 0.1), ("untied", 16, 0.0)],
)
def test_updates_of_whole_chunks_are_shared_out_evenly(head, threads, clip):
    """As many tasks as threads, of like sizes; with as many chunks as threads nothing else comes after the chunks."""
    config = replace(SMALL, blocks=8, vocabulary=200, padded_vocabulary=0, head=head)
    dials = {"grain": "chunk", "in_place": True, "threads": threads}
    step = step_of(config, (4, 12), (2, 12), OptimizerConfig(clip=clip), **dials)
    sizes = defaultdict(int)
    for key, node in step.graph.items():
        for call in calls_of(node):
            if isinstance(update := getattr(call.function, "__self__", None), update_in_place.RowUpdate):
                sizes[key] += update.size
    assert len(sizes) == threads
    largest = max(prod(tensor.shape) for tensor in tensors(config).values())
    assert sum(sizes.values()) == sum(prod(tensor.shape) for tensor in tensors(config).values())
    assert max(sizes.values()) - min(sizes.values()) <= 2 * largest
    if threads > 1 and not clip:
        assert step.tasks == 2 + threads
    model, one = Model(config, (4, 12), clip=clip), Dials((4, 12), grain="kernel")
    many = Dials((2, 12), "step", "chunk", "threads", threads, in_place=True)
    assert bits_after_steps(model, "float32", many) == bits_after_steps(model, "float32", one)


def chunk_of_call(call):
    """(b, t) of what a call computes, None for a sum or an update."""
    index = dict(zip(getattr(call.function, "__self__", call.function).axes, call.key[1:]))
    return (index.get("b"), index.get("t")) if {"b", "t"} & index.keys() else None


def test_a_segment_stays_in_its_chunk():
    graph = step_of(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="segment").graph
    programs = [node.func for node in graph.values() if not is_leaf(node)]
    assert max(len(program.calls) for program in programs) > 10
    assert {len({chunk_of_call(call) for call in program.calls}) for program in programs} == {1}


@pytest.mark.parametrize(
    ("seconds", "chunks", "threads", "grain"),
    [
        (1.0, 2, 2, "segment"),
        (1e-6, 2, 2, "chunk"),
        (1e-6, 2, 4, "block"),
        (1.0, 4, 4, "chunk"),
        (1.0, 4, 3, "segment"),
    ],
)
def test_auto_grain_is_the_finest_with_long_tasks(seconds, chunks, threads, grain):
    dials = {"grain": "segment", "in_place": True, "threads": threads}
    step = step_of(SMALL, (4, 12), (4 // chunks, 12), OptimizerConfig(), **dials)
    calls = [call.key for node in step.graph.values() for call in calls_of(node)]
    on_a_cluster, choice = (GrainChoice("auto", "step", in_place=here) for here in (False, True))
    assert (on_a_cluster.first, on_a_cluster.undecided) == ("block", False), "it follows the packs"
    assert (choice.first, choice.undecided) == ("segment", True)
    step, line = choice.choose(step, [Span(key, 1, 0.0, seconds) for key in calls], threads, 1e9)
    tasks = sum(bool(calls_of(node)) for node in step.graph.values())
    assert line.startswith(f"{grain}, tasks of {1e3 * seconds * len(calls) / tasks:.1f} ms")
    assert (step.dials.grain, choice.undecided) == (grain, False)


def test_program_drops_values_after_their_last_reader():
    alive = []

    def make():
        alive.append(weakref.ref(value := np.zeros(3)))
        return value

    def read(value):
        return 1

    def look(number):
        gc.collect()
        return alive[0]() is None

    first, second = Call(("a",), make, [], 0, ()), Call(("b",), read, [0], 1, (0,))
    assert Program([first, second, Call(("c",), look, [1], 2, ())], [], [2])() is True


def spans_of(barrier, grain="kernel", steps=2):
    random = np.random.default_rng(5)
    step = step_of(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain=grain, barrier=barrier, in_place=True)
    state = state_of(step, random_parameters(SMALL, random))
    with open_scheduler("threads", 2) as scheduler:
        for _ in range(steps):
            with scheduler.record() as processes:
                _, state = run_step(scheduler, step, state, random_batch(SMALL, random), steps)
        return [(step.kernels.origin(span.key), span) for span in processes[0].spans]


def intervals(spans, name_of):
    """From the first start to the last end of the spans of each name."""
    times_by_name = defaultdict(list)
    for origin, span in spans:
        times_by_name[name_of(origin)] += [span.start, span.end]
    return sorted((min(times), max(times)) for times in times_by_name.values())


@pytest.mark.parametrize(("barrier", "stage"), [("layer", "stage"), ("phase", "phase"), ("step", "stage")])
def test_barriers_separate_stages(barrier, stage):
    stages = intervals(spans_of(barrier), attrgetter(stage))
    assert (len(stages) == 3) == (barrier == "phase")
    assert all(end <= start for (_, end), (start, _) in pairwise(stages)) == (barrier != "step")


def test_overlapping_steps_wait_only_for_updates():
    step = step_of(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="kernel", barrier="none", in_place=True)
    graph = step.window(2)
    earlier = {
        calls_of(node)[0].key: {need[0].split("-")[0] for need in node.dependencies if need[0].endswith("-0")}
        for key, node in graph.items()
        if key[0].endswith("-1") and not is_leaf(node)
    }
    assert set().union(*earlier.values()) == {"adamw"}
    assert all(names for key, names in earlier.items() if key[0].startswith("linear.forward"))
    assert not any(names for key, names in earlier.items() if key[0].startswith(("attention", "gelu", "add")))


def test_two_steps_on_a_cluster_share_no_key():
    """There, equal keys mean equal results; the packs of a state get keys of their own."""
    steps = [step_of(SMALL, (4, 12), (2, 12), OptimizerConfig()) for _ in range(2)]
    one, other = (step.submission([defaultdict(lambda: np.empty((4, 12)))], ()) for step in steps)
    assert not (one.graph.keys() | one.leaves.keys()) & (other.graph.keys() | other.leaves.keys())


def job(config, batch_size, accumulate):
    data = DataConfig(batch_size=batch_size, sequence_length=64, accumulate=accumulate, groups=1)
    return Job(config, data, OptimizerConfig(), DataflowConfig(scheduler="threads", threads=2), RunConfig())


@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(blocks=3, channels=64, vocabulary=2000)], ids=str)
def test_memory_of_micro_batches(config):
    """And what the tied table's last sum waits for: the gradients of the embedding's output, a row a token.

    Of several groups more gradients are held at once, one for each level of the tree that has a total.
    """
    one, four = (predict(job(config, 12, accumulate)) for accumulate in (1, 4))
    gradients = 4 * sum(prod(tensor.shape) for tensor in tensors(config).values())
    kept = 4 * 4 * 12 * 64 * config.channels
    factor = TOLERANCES["memory of a micro-batch"]["factor"]
    joined = predict(job(config, 48, 1))
    assert sum(four.at_peak.values()) <= factor * sum(one.at_peak.values()) + gradients + kept
    assert four.at_peak["gradients"] <= gradients
    assert sum(joined.at_peak.values()) > sum(four.at_peak.values()) + one.at_peak["activations"]
