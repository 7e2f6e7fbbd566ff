"""Where everybody waits: the same bits at every barrier, and the waits and overlaps that each one means."""

from __future__ import annotations

import itertools
from operator import attrgetter

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from test_grain import assert_same_bits
from test_model import losses_and_parameters

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.barriers import with_barriers
from daskgpt.graph.nodes import is_leaf, task
from daskgpt.graph.program import calls_of
from daskgpt.graph.spans import recorded_spans
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.step import TrainingStep

STAGE = attrgetter("stage")


@pytest.mark.parametrize("barrier", ["layer", "phase"])
def test_barriers_change_no_bit(barrier):
    expected = losses_and_parameters("sync", 1, (2, 6), grain="kernel")
    for grain, scheduler, in_place in itertools.product(("kernel", "segment"), ("sync", "threads"), (True, False)):
        found = losses_and_parameters(scheduler, 2, (2, 6), grain=grain, barrier=barrier, in_place=in_place)
        assert_same_bits(found, expected, f"{grain} {scheduler} {in_place}")


def test_barriers_on_a_cluster_change_no_bit():
    expected = losses_and_parameters("sync", 1, (2, 12), steps=1)
    found = losses_and_parameters("local", 2, (2, 12), steps=1, barrier="layer")
    assert_same_bits(found, expected, "local")


def spans_of(barrier, grain="kernel", steps=2):
    random = np.random.default_rng(5)
    step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain=grain, barrier=barrier, in_place=True)
    state = step.initial(random_parameters(SMALL, random))
    with open_scheduler("threads", 2) as scheduler, recorded_spans() as spans:
        for _ in range(steps):
            spans.clear()
            _, state = step(scheduler, state, *random_batch(SMALL, random), steps)
        return [(step.recorded.origin(span.key), span) for span in spans]


def intervals(spans, name_of):
    """From the first start to the last end of the spans of each name."""
    found = {}
    for origin, span in spans:
        start, end = found.get(name_of(origin), (span.start, span.end))
        found[name_of(origin)] = min(start, span.start), max(end, span.end)
    return sorted(found.values())


@pytest.mark.parametrize(
    ("barrier", "name_of"), [("layer", STAGE), ("phase", attrgetter("phase"))], ids=("layer", "phase")
)
def test_a_stage_is_over_before_the_next_one_starts(barrier, name_of):
    found = intervals(spans_of(barrier), name_of)
    assert len(found) == 3 or barrier == "layer"
    for (_, end), (start, _) in itertools.pairwise(found):
        assert end <= start


def test_without_barriers_layers_overlap_in_a_step():
    found = intervals(spans_of("step"), STAGE)
    assert any(end > start for (_, end), (start, _) in itertools.pairwise(found))


def test_a_window_of_overlapping_steps_gives_the_same_bits():
    results = []
    for window in (1, 3):
        random = np.random.default_rng(5)
        step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(), barrier="none", in_place=True)
        state = step.initial(random_parameters(SMALL, random))
        batches = [random_batch(SMALL, random) for _ in range(6)]
        losses = []
        with open_scheduler("threads", 2) as scheduler:
            for first in range(0, 6, window):
                own, state = step.window(scheduler, state, batches[first : first + window], 6)
                losses += own
            results.append((losses, state.parameters(scheduler)))
    assert state.step == 6
    assert_same_bits(results[1], results[0], "window")


def test_steps_that_make_new_state_do_not_overlap():
    """They would all begin with the first one's."""
    random = np.random.default_rng(5)
    step = TrainingStep(SMALL, (4, 12), (2, 12), OptimizerConfig(), barrier="none", in_place=False)
    state = step.initial(random_parameters(SMALL, random))
    with (
        open_scheduler("sync") as scheduler,
        pytest.raises(
            RuntimeError, match=r"TrainingStep.window: steps that overlap must write over their state; got in"
        ),
    ):
        step.window(scheduler, state, [random_batch(SMALL, random)] * 2, 2)


def test_a_reader_waits_for_the_update_of_the_step_before_and_for_nothing_else_of_it():
    step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(), grain="kernel", barrier="none", in_place=True)
    graph = step.runnable.window(2)
    earlier = {}
    for key, node in graph.items():
        if key[0].endswith("-1") and not is_leaf(node):
            names = {d[0].split("-")[0] for d in node.dependencies if d[0].endswith("-0")}
            earlier[calls_of(node)[0].key] = names
    assert set().union(*earlier.values()) == {"adamw"}
    assert all(names for key, names in earlier.items() if key[0].startswith("linear.forward"))
    assert not any(names for key, names in earlier.items() if key[0].startswith(("attention", "gelu", "add")))


def test_stages_in_a_circle_are_refused():
    graph = {}
    for key, needs in ((("a", 0), []), (("b", 0), [("a", 0)]), (("a", 1), [("b", 0)])):
        graph[key] = task(key, print, needs)
    with pytest.raises(RuntimeError, match=r"with_barriers: stages must follow one another; got a circle of"):
        with_barriers(graph, lambda key: key[0], name="barrier", tokens=False)
