"""The page: loss and speed by step, who ran what in the last seconds, kernels by layer, and some numbers."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
from bokeh.layouts import column as below
from bokeh.layouts import row
from bokeh.models import ColumnDataSource, Div, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from tqdm import tqdm

from daskgpt.instruments.dashboard.collected import STEPS, Call, Collected, column, idle_share, overlap_share
from daskgpt.instruments.timeline.events import OTHER_COLOR, color_of

EVERY = 1000  # milliseconds between two looks
KERNELS = 12  # bars at most
# Tasks of several kernels, by what `training.grouping.title` calls them.
TASKS = {"tokens.forward": "#4269d0", "tokens.backward": "#2a4380", "tokens.head": "#ff8ab7", "update": "#7f8c99"}
WAITING = "No run has told of a step yet: <code>python -m daskgpt.train --scheduler ...</code>"


def show(scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    """Dask calls it for each browser that opens the page."""
    page = _Page(scheduler)
    page.update()
    doc.title = "daskgpt"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables["active_page"] = "daskgpt"
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    doc.add_periodic_callback(page.update, EVERY)


class _Page:
    """What one browser sees.

    shown  the run whose steps its curves have, and the number of the latest one: only later ones are sent
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.shown = 0, -1
        self.numbers = Div(text=WAITING, sizing_mode="stretch_width")
        self.loss, self.validation, self.speed = (ColumnDataSource({"x": [], "y": []}) for _ in range(3))
        self.calls = ColumnDataSource({"left": [], "right": [], "worker": [], "name": [], "color": [], "ms": []})
        self.kernels = ColumnDataSource({"name": [], "seconds": [], "color": []})
        self.lanes, self.bars = self._lanes(), self._bars()
        curves = row(self._losses(), self._speeds(), sizing_mode="stretch_width")
        self.root = below(self.numbers, curves, self.lanes, self.bars, sizing_mode="stretch_width", name="daskgpt")

    def update(self) -> None:
        """Look at what has been collected."""
        found = self.scheduler.plugins.get(Collected.name)
        if found is None:
            self.numbers.text = "The scheduler must be started with --preload daskgpt.instruments.dashboard."
            return
        calls = found.latest
        self._show_steps(found)
        self._show_calls(calls)
        self._show_kernels(found)
        if found.steps:
            self.numbers.text = self._described(found, calls)

    def _show_steps(self, found: Collected) -> None:
        """Send the steps that are new: all of them, several times a second, would cost more than anything else here."""
        run, latest = self.shown
        if run != found.runs:
            latest = -1
        new = list(takewhile(lambda record: record["step"] > latest, reversed(found.steps)))[::-1]
        for source, name in ((self.loss, "loss"), (self.validation, "validation_loss"), (self.speed, "tokens_per_s")):
            x, y = column(new, name)
            points = {"x": np.array(x, np.int32), "y": np.array(y, np.float32)}
            if run != found.runs:
                source.data = points
            elif x:
                source.stream(points, rollover=STEPS)
        self.shown = found.runs, new[-1]["step"] if new else latest

    def _described(self, found: Collected, calls: list[Call]) -> str:
        latest, validation = found.steps[-1], self.validation.data["y"]
        size = tqdm.format_sizeof(found.bytes_a_step(), "B")
        parts = [
            f"step <b>{latest['step'] + 1:,}</b>",
            f"loss <b>{latest['loss']:.3f}</b>",
            *([f"validation <b>{validation[-1]:.3f}</b>"] if len(validation) else []),
            f"<b>{latest['tokens_per_s']:,.0f}</b> tokens/s",
            f"idle <b>{idle_share(calls, self.scheduler.total_nthreads):.0%}</b>",
            f"overlap of layers <b>{overlap_share(calls):.0%}</b>",
            f"between workers <b>{size}</b> a step",
            f"recoveries <b>{found.recoveries}</b>",
        ]
        return f"<div style='font-size: 15px'>{' &nbsp; '.join(parts)}</div>"

    def _show_calls(self, calls: list[Call]) -> None:
        end = max((call.end for call in calls), default=0.0)
        names = {address: str(worker.name) for address, worker in self.scheduler.workers.items()}
        calls = [call for call in calls if call.worker in names]
        self.lanes.y_range.factors = sorted(set(names.values()), reverse=True)
        self.calls.data = {
            "left": np.array([call.start - end for call in calls], np.float32),
            "right": np.array([call.end - end for call in calls], np.float32),
            "worker": [names[call.worker] for call in calls],
            "name": [call.name for call in calls],
            "color": [_colour(call.name) for call in calls],
            "ms": np.array([(call.end - call.start) * 1e3 for call in calls], np.float32),
        }

    def _show_kernels(self, found: Collected) -> None:
        most = sorted(found.kernel_seconds().items(), key=lambda item: -item[1])[:KERNELS]
        self.bars.y_range.factors = [name for name, _ in reversed(most)]
        self.kernels.data = {
            "name": [name for name, _ in most],
            "seconds": [seconds for _, seconds in most],
            "color": [_colour(name) for name, _ in most],
        }

    def _losses(self) -> Any:
        plot = _figure("Loss [nats a token] by step")
        plot.line("x", "y", source=self.loss, color="#4269d0", legend_label="of the step")
        plot.scatter("x", "y", source=self.validation, color="#ff725c", size=7, legend_label="validation")
        plot.legend.background_fill_alpha = 0.6
        return plot

    def _speeds(self) -> Any:
        plot = _figure("Tokens a second by step")
        plot.line("x", "y", source=self.speed, color="#3ca951")
        plot.y_range.start = 0
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
        return plot

    def _lanes(self) -> Any:
        plot = _rows("Tasks of each worker in the last seconds", 240, "xpan,xwheel_zoom,reset")
        plot.hbar("worker", left="left", right="right", height=0.7, color="color", source=self.calls, line_width=0)
        plot.add_tools(HoverTool(tooltips=[("", "@name, @ms{0.0} ms")]))
        plot.xaxis.axis_label = "s"
        return plot

    def _bars(self) -> Any:
        plot = _rows("Kernels by layer and pass, seconds of all workers", 260)
        plot.hbar("name", right="seconds", height=0.7, color="color", source=self.kernels)
        return plot


def _rows(title: str, height: int, tools: str = "") -> Any:
    """A figure with a row for each of some names."""
    names = FactorRange(factors=[])
    plot = figure(height=height, sizing_mode="stretch_width", title=title, y_range=names, tools=tools)
    plot.toolbar.logo = None
    return plot


def _figure(title: str) -> Any:
    plot = figure(height=240, sizing_mode="stretch_width", title=title, tools="pan,wheel_zoom,reset", min_width=240)
    plot.toolbar.logo = None
    return plot


def _colour(name: str) -> str:
    """Of a kernel by its layer, of a task of several by its part of the step."""
    layer, _, way = name.partition(".")
    found = color_of(layer, way.startswith("backward"))
    return TASKS.get(name, found) if color_of(layer, False) == OTHER_COLOR else found
