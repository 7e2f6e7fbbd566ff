"""Tests of the text that objects show in a terminal and in a notebook."""

from dataclasses import replace

import pytest
from small_runs import MODEL

import daskgpt
from daskgpt.model.parameters import initial_parameters
from daskgpt.training.trainer import Result

DATA = {"batch_size": 4, "sequence_length": 16}


@pytest.fixture(scope="module")
def timeline():
    watcher = daskgpt.TimelineCallback(daskgpt.TimelineConfig(timeline_steps=2))
    assert watcher.timeline is None
    data, run = DATA | {"data": __file__}, {"steps": 5, "validation_batches": 1}
    daskgpt.fit(MODEL, data, dataflow={"scheduler": "threads"}, run=run, callbacks=[watcher], quiet=True)
    assert watcher.timeline.steps == [3, 4]
    return watcher.timeline


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda _: daskgpt.plan(MODEL, DATA),
            ("model", "parameters", "at the peak", "critical path", "no step was run"),
        ),
        (lambda timeline: timeline, ("attention", "linear", "critical path")),
    ],
)
def test_text_fits_on_a_screen(make, parts, timeline):
    shown = repr(make(timeline))
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 120
    assert all(part in shown for part in parts), shown
    assert repr(replace(timeline, events=())).endswith("no events")


def test_result_says_what_it_has_without_arrays():
    result = Result(MODEL, initial_parameters(MODEL, 0), [5.5, float("nan"), 4.5, 3.5], 3.25, 1.5)
    shown = "loss 5.500 nats a token in the first step, 3.500 in the last, 3.250 on held-out text\n4 steps in 1.5 s"
    assert repr(result) == shown


def test_plan_for_workers():
    assert len(daskgpt.plan(MODEL, DATA | {"groups": 2}, dataflow={"batch_chunk": 2}, workers=2).loads) == 2
