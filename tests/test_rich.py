"""Tests of the display of objects: text in a terminal, and HTML in a notebook."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from small_runs import MODEL

import daskgpt
from daskgpt.config.rich import html_table
from daskgpt.model.parameters import initial_parameters
from daskgpt.profiling.timeline import COLUMNS
from daskgpt.training.trainer import Result

DATA = {"batch_size": 4, "sequence_length": 16}
EMPTY = {"br", "rect", "polyline"}


class Text(HTMLParser):
    """The text of a page, and whether its tags close one another."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in EMPTY)

    def handle_endtag(self, tag):
        assert tag in EMPTY or self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(html):
    parser = Text()
    parser.feed(html)
    assert parser.open == []
    assert "<script" not in html
    assert "https://" not in html
    return " ".join(" ".join(parser.text).split())


# Makes an object, and what its HTML says; the timeline is that of a watcher without a file.
SHOWN = [
    (lambda _: daskgpt.plan(MODEL, DATA), ("model", "parameters", "at the peak", "critical path", "no step was run")),
    (lambda timeline: timeline, ("attention", "linear", "critical path")),
]


@pytest.fixture(scope="module")
def timeline():
    watcher = daskgpt.TimelineCallback(daskgpt.TimelineConfig(timeline_steps=2))
    assert watcher.timeline is None
    data, run = DATA | {"data": __file__}, {"steps": 5, "validation_batches": 1}
    daskgpt.fit(MODEL, data, dataflow={"scheduler": "threads"}, run=run, callbacks=[watcher], quiet=True)
    assert watcher.timeline.steps == [3, 4]
    return watcher.timeline


@pytest.mark.parametrize(("make", "parts"), SHOWN)
def test_repr_and_html_agree(make, parts, timeline):
    made = make(timeline)
    shown = repr(made)
    assert len(shown.splitlines()) <= 40
    assert "\n" not in shown or max(map(len, shown.splitlines())) <= 120
    assert len(shown) < 2400
    assert "array(" not in shown
    text = text_of(made._repr_html_())
    assert all(part in text for part in parts), text
    assert len(made._repr_html_()) < 200_000


def test_result_says_what_it_has_without_arrays():
    result = Result(MODEL, initial_parameters(MODEL, 0), [5.5, float("nan"), 4.5, 3.5], 3.25, 1.5)
    shown = "loss 5.500 nats a token in the first step, 3.500 in the last, 3.250 on held-out text\n4 steps in 1.5 s"
    assert repr(result) == shown


def test_plan_for_workers():
    assert len(daskgpt.plan(MODEL, DATA | {"groups": 2}, dataflow={"batch_chunk": 2}, workers=2).loads) == 2


def test_a_timeline_is_drawn_with_a_bounded_number_of_strips(timeline):
    assert timeline._repr_html_().count("<rect") <= COLUMNS * len(timeline.lanes)
    assert timeline._repr_html_().count("<rect") >= len(timeline.lanes)
    empty = replace(timeline, events=())
    assert repr(empty).endswith("no events")
    assert "no events" in text_of(empty._repr_html_())


def test_cells_are_escaped():
    assert text_of(html_table("<i>", [["a & b", "<script>"]])) == "<i> a & b <script>"
