"""Objects as people look at them: one screen in a terminal, and HTML in a notebook that says the same."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from chromium import PATH, visit
from conftest import GOLDEN
from small_runs import MODEL

import daskgpt
from daskgpt.config.rich import html_table, svg_curve
from daskgpt.formats.models import open_model_file, read_model_file
from daskgpt.instruments.timeline import StepRecorder
from daskgpt.instruments.timeline.strips import COLUMNS
from daskgpt.model.parameters import initial_parameters
from daskgpt.training.result import Result

SCREEN = (40, 120)  # lines and columns
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


def recorded_timeline():
    from daskgpt.instruments.random_tokens import random_batch
    from daskgpt.schedulers.addresses import open_scheduler
    from daskgpt.training.job import Job
    from daskgpt.training.job_steps import JobSteps

    data = daskgpt.DataConfig(batch_size=4, sequence_length=16)
    dataflow = daskgpt.DataflowConfig(grain="block", batch_chunk=2, sequence_chunk=16, threads=2)
    job = Job(MODEL, data, daskgpt.OptimizerConfig(), dataflow, daskgpt.RunConfig())
    with open_scheduler("threads", 2) as scheduler:
        steps = JobSteps(job, scheduler)
        state = steps.initial(initial_parameters(MODEL, 0))
        recorder = StepRecorder(steps.step, scheduler)
        with recorder.window([0]):
            steps.run(state, [random_batch(job, 0, 0)])
        return recorder.finish()


MADE = {
    "model configuration": lambda: MODEL,
    "run configuration": lambda: daskgpt.RunConfig(steps=5, out="<b>here</b>"),
    "dataflow": lambda: daskgpt.DataflowConfig(grain="block"),
    "plan": lambda: daskgpt.plan(MODEL, {"batch_size": 4, "sequence_length": 16}),
    "result": lambda: Result(MODEL, lambda: initial_parameters(MODEL, 0), [5.5, float("nan"), 4.5, 3.5], 3.25, 1.5),
    "timeline": recorded_timeline,
    "model": lambda: read_model_file(GOLDEN / "gpt2_small.bin"),
    "opened model": lambda: open_model_file(GOLDEN / "gpt2_small.bin"),
}
SAYS = {
    "model configuration": ("GPT2Config", "blocks", "1 *", "transformer blocks", "padded_vocabulary"),
    "run configuration": ("RunConfig", "steps", "5 *", "<b>here</b> *", "save_minutes"),
    "dataflow": ("DataflowConfig", "grain", "block *", "batch_chunk auto"),
    "plan": ("A step of", "parameters", "at the peak", "nothing was run"),
    "result": ("Result of 4 steps", "loss 5.500 -> 3.500 nats a token", "validation 3.250"),
    "timeline": ("attention", "linear", "critical path"),
    "model": ("StoredModel of", "parameters", "wte.weight", "h.0 .. 2.attn.c_attn.weight"),
    "opened model": ("OpenedModel of", "parameters", "3 blocks"),
}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
def test_a_repr_fits_on_a_screen_and_has_no_array(name, made):
    lines = repr(made[name]).splitlines()
    assert len(lines) <= SCREEN[0]
    assert "array(" not in repr(made[name])
    assert len(repr(made[name])) < SCREEN[0] * SCREEN[1] / 2
    if len(lines) > 1:
        assert max(map(len, lines)) <= SCREEN[1]


@pytest.mark.parametrize("name", MADE)
def test_a_notebook_is_told_in_html(name, made):
    html = made[name]._repr_html_()
    text = text_of(html)
    for part in SAYS[name]:
        assert part in text, text
    assert len(html) < 200_000


def test_what_is_not_the_default_stands_first():
    text = text_of(daskgpt.OptimizerConfig(weight_decay=0.25)._repr_html_())
    assert text.index("weight_decay 0.25 *") < text.index("learning_rate")
    assert text.count("*") == 1


def test_a_plan_is_what_the_command_line_prints(made):
    found = daskgpt.plan(MODEL, {"batch_size": 4, "sequence_length": 16}, dataflow={"batch_chunk": 2}, workers=2)
    assert len(found.found.loads) == 2
    assert str(found).splitlines()[0].startswith("model")
    with pytest.raises(ValueError, match="plan: workers must come without local_steps; got local_steps=5"):
        daskgpt.plan(MODEL, {"batch_size": 4, "sequence_length": 16}, local={"local_steps": 5}, workers=2)


def test_a_timeline_is_drawn_with_a_bounded_number_of_strips(made):
    timeline = made["timeline"]
    assert timeline._repr_html_().count("<rect") <= COLUMNS * len(timeline.lanes)
    assert timeline._repr_html_().count("<rect") > 10
    empty = replace(timeline, events=())
    assert repr(empty).endswith("no events")
    assert "no events" in text_of(empty._repr_html_())


def test_a_curve_has_what_is_finite_and_its_end():
    points = svg_curve([*np.linspace(5, 1, 9999), float("inf"), 0.0], "loss").split('points="')[1].split('"')[0]
    assert len(points.split()) <= 402
    assert points.split()[0] == "0.0,4.0"
    assert points.split()[-1] == "420.0,86.0"
    assert svg_curve([1.0], "loss") == svg_curve([], "loss") == svg_curve([float("nan")] * 3, "loss") == ""


def test_what_stands_in_a_cell_is_text():
    assert text_of(html_table("<i>", [["a & b", "<script>"]])) == "<i> a & b <script>"


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_a_browser_shows_them_on_a_narrow_page(made, tmp_path):
    page = tmp_path / "objects.html"
    parts = "\n<hr>\n".join(each._repr_html_() for each in made.values())
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>objects</title><body>{parts}</body>")
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    found = visit(page, tmp_path / "profile", "document.readyState === 'complete'", (width,), size=(600, 1400))
    assert found.requests == [page.as_uri()]
    assert found.messages == []
    assert found.values == [0]


def test_a_watcher_without_a_file_keeps_the_timeline_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    watcher = daskgpt.TimelineWatcher(daskgpt.TimelineConfig(timeline_steps=2))
    assert watcher.timeline is None
    data, run = {"data": __file__, "batch_size": 4, "sequence_length": 16}, {"steps": 5, "validation_batches": 1}
    daskgpt.fit(MODEL, data, dataflow={"scheduler": "threads"}, run=run, watchers=[watcher], quiet=True)
    assert watcher.timeline.steps == [3, 4]
    assert "<svg" in watcher.timeline._repr_html_()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
