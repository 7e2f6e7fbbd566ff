"""A page "daskgpt" on Dask's own dashboard: `dask scheduler --preload daskgpt.profiling.dashboard`.

It shows loss and speed by step, the tasks of each worker in the last seconds, kernels by layer, and some numbers. Dask
imports a preload before it opens the dashboard, and opens all pages of its table `applications`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.layouts import column as below
from bokeh.layouts import row
from bokeh.models import ColumnDataSource, Div, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from distributed import SchedulerPlugin
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.scheduler import applications, template_variables
from distributed.utils import key_split
from tqdm import tqdm

from daskgpt.profiling.timeline import OTHER_COLOR, color_of, different_at_once, seconds_of
from daskgpt.schedulers.dask_internals import KERNEL
from daskgpt.schedulers.worker_metrics import METRIC, TOPIC

PAGE = TOPIC  # the path of the page behind the dashboard's address
CALLS, STEPS = 4000, 5000  # the latest that are kept, of steps that were published
WINDOW = 5.0  # seconds of lanes
EVERY = 1000  # milliseconds between two updates
MEAN = 20  # steps of a mean
KERNELS = 12  # bars at most
# Tasks of several kernels, by what `graph.fuse.title` calls them.
TASKS = {"tokens.forward": "#4269d0", "tokens.backward": "#2a4380", "tokens.head": "#ff8ab7", "update": "#7f8c99"}
WAITING = "No run has sent a step yet: <code>python -m daskgpt.train --scheduler ...</code>"


def dask_setup(scheduler: Any) -> None:
    """Begin to collect, and add the page to the dashboard's menu; called by Dask when the scheduler starts."""
    scheduler.add_plugin(Collected(scheduler))
    pages = template_variables(scheduler)["pages"]
    if PAGE not in pages:
        pages.append(PAGE)


class Call(NamedTuple):
    """A task that has run: its worker, the common name of such tasks, start and end as seconds of the epoch."""

    worker: str
    name: str
    start: float
    end: float


class Collected(SchedulerPlugin):
    """The latest tasks and steps.

    calls     as they end
    steps     records of steps, see `schedulers.worker_metrics`, with `received_bytes` of all workers so far
    runs      number of runs that have sent steps; those of the latest run are kept
    recoveries  number of recoveries from a loss
    """

    name = "daskgpt-dashboard"

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self.runs = self.recoveries = 0

    def transition(
        self, key: Any, start: str, finish: str, *_: Any, startstops: Sequence[Any] = (), worker: str = "", **__: Any
    ) -> None:
        if start == "processing" and finish == "memory":
            ran = [own for own in startstops or () if own["action"] == "compute"]
            self.calls.extend(Call(worker, key_split(key), own["start"], own["stop"]) for own in ran)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic != TOPIC:
            return
        metrics = [worker.metrics.get(METRIC, {}) for worker in self.scheduler.workers.values()]
        received = sum(float(own.get("received", 0.0)) for own in metrics)
        if not self.steps or msg["step"] <= self.steps[-1]["step"]:
            self.steps.clear()
            self.runs += 1
        self.steps.append({**msg, "received_bytes": received})
        self.recoveries += "lost_steps" in msg

    @property
    def latest(self) -> list[Call]:
        """The calls of the last seconds before the end of the latest call."""
        end = max((call.end for call in self.calls), default=0.0)
        return [call for call in self.calls if call.end > end - WINDOW]

    def bytes_a_step(self) -> float:
        """Return the mean bytes per step that workers receive from each other, over the last steps."""
        if len(self.steps) < 2:
            return 0.0
        first, last = self.steps[-min(len(self.steps), MEAN)], self.steps[-1]
        return float((last["received_bytes"] - first["received_bytes"]) / (last["step"] - first["step"]))

    def kernel_seconds(self) -> Counter[str]:
        """Return all seconds of kernels so far, by layer and pass, from Dask's fine performance metrics."""
        found: Counter[str] = Counter()
        for key, value in self.scheduler.cumulative_worker_metrics.items():
            if isinstance(key, tuple) and key[0] == "execute" and str(key[-2]).startswith(KERNEL):
                found[key[-2].removeprefix(KERNEL)] += value
        return found


def idle_share(calls: Sequence[Call], threads: int) -> float:
    """Return the share of the threads' time, from the first start to the last end, in which no task ran."""
    length = max((call.end for call in calls), default=0.0) - min((call.start for call in calls), default=0.0)
    busy = sum(call.end - call.start for call in calls)
    return max(0.0, 1 - busy / (threads * length)) if threads * length else 0.0


def overlap_share(calls: Iterable[Call]) -> float:
    """Return the share of the time in which tasks run, in which tasks of different names do."""
    counts = different_at_once((call.start, call.end, call.name) for call in calls)
    some, several = (seconds_of(counts, least) for least in (1, 2))
    return several / some if some else 0.0


def column(steps: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the numbers of the steps that have a value of this name, from 1, and the values."""
    own = [(record["step"] + 1, record[name]) for record in steps if name in record]
    return [step for step, _ in own], [value for _, value in own]


def show(scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    """Fill a Bokeh document; called by Dask for each browser that opens the page."""
    page = Page(scheduler)
    page.update()
    doc.title = "daskgpt"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables["active_page"] = "daskgpt"
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    doc.add_periodic_callback(page.update, EVERY)


applications[f"/{PAGE}"] = show


class Page:
    """The page in one browser.

    shown  run and number of the latest step in the curves; only later steps are sent
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.shown = 0, -1
        self.numbers = Div(text=WAITING, sizing_mode="stretch_width")
        self.loss, self.validation, self.speed = (ColumnDataSource({"x": [], "y": []}) for _ in range(3))
        self.calls = ColumnDataSource({"left": [], "right": [], "worker": [], "name": [], "color": [], "ms": []})
        self.kernels = ColumnDataSource({"name": [], "seconds": [], "color": []})
        losses = _figure("Loss [nats a token] by step", tools="pan,wheel_zoom,reset", min_width=240)
        losses.line("x", "y", source=self.loss, color="#4269d0", legend_label="of the step")
        losses.scatter("x", "y", source=self.validation, color="#ff725c", size=7, legend_label="validation")
        losses.legend.background_fill_alpha = 0.6
        speeds = _figure("Tokens a second by step", tools="pan,wheel_zoom,reset", min_width=240)
        speeds.line("x", "y", source=self.speed, color="#3ca951")
        speeds.y_range.start, speeds.yaxis.formatter = 0, NumeralTickFormatter(format="0,0")
        self.workers, self.names = FactorRange(factors=[]), FactorRange(factors=[])
        title = "Tasks of each worker in the last seconds"
        lanes = _figure(title, tools="xpan,xwheel_zoom,reset", y_range=self.workers)
        lanes.hbar("worker", left="left", right="right", height=0.7, color="color", source=self.calls, line_width=0)
        lanes.add_tools(HoverTool(tooltips=[("", "@name, @ms{0.0} ms")]))
        lanes.xaxis.axis_label = "s"
        bars = _figure("Kernels by layer and pass, seconds of all workers", tools="", y_range=self.names)
        bars.hbar("name", right="seconds", height=0.7, color="color", source=self.kernels)
        curves = row(losses, speeds, sizing_mode="stretch_width")
        self.root = below(self.numbers, curves, lanes, bars, sizing_mode="stretch_width", name="daskgpt")

    def update(self) -> None:
        """Show the latest tasks and steps."""
        found = self.scheduler.plugins.get(Collected.name)
        if found is None:
            self.numbers.text = "The scheduler must be started with --preload daskgpt.profiling.dashboard."
            return
        calls = found.latest
        self._show_steps(found)
        self._show_calls(calls)
        most = dict(found.kernel_seconds().most_common(KERNELS))
        self.names.factors = [*reversed(most)]
        self.kernels.data = {"name": [*most], "seconds": [*most.values()], "color": [_color(name) for name in most]}
        if found.steps:
            self.numbers.text = self._described(found, calls)

    def _show_steps(self, found: Collected) -> None:
        """Send new steps only: sending all of them each time would be the largest cost of the page."""
        new_run = self.shown[0] != found.runs
        latest = -1 if new_run else self.shown[1]
        new = [record for record in found.steps if record["step"] > latest]
        for source, name in ((self.loss, "loss"), (self.validation, "validation_loss"), (self.speed, "tokens_per_s")):
            x, y = column(new, name)
            points = {"x": np.array(x, np.int32), "y": np.array(y, np.float32)}
            if new_run:
                source.data = points
            elif x:
                source.stream(points, rollover=STEPS)
        self.shown = found.runs, new[-1]["step"] if new else latest

    def _show_calls(self, calls: list[Call]) -> None:
        end = max((call.end for call in calls), default=0.0)
        names = {address: str(worker.name) for address, worker in self.scheduler.workers.items()}
        calls = [call for call in calls if call.worker in names]
        self.workers.factors = sorted(set(names.values()), reverse=True)
        self.calls.data = {
            "left": np.array([call.start - end for call in calls], np.float32),
            "right": np.array([call.end - end for call in calls], np.float32),
            "worker": [names[call.worker] for call in calls],
            "name": [call.name for call in calls],
            "color": [_color(call.name) for call in calls],
            "ms": np.array([(call.end - call.start) * 1e3 for call in calls], np.float32),
        }

    def _described(self, found: Collected, calls: list[Call]) -> str:
        latest, validation = found.steps[-1], self.validation.data["y"]
        parts = [
            f"step <b>{latest['step'] + 1:,}</b>",
            f"loss <b>{latest['loss']:.3f}</b>",
            *([f"validation <b>{validation[-1]:.3f}</b>"] if len(validation) else []),
            f"<b>{latest['tokens_per_s']:,.0f}</b> tokens/s",
            f"idle <b>{idle_share(calls, self.scheduler.total_nthreads):.0%}</b>",
            f"overlap of layers <b>{overlap_share(calls):.0%}</b>",
            f"between workers <b>{tqdm.format_sizeof(found.bytes_a_step(), 'B')}</b> a step",
            f"recoveries <b>{found.recoveries}</b>",
        ]
        return f"<div style='font-size: 15px'>{' &nbsp; '.join(parts)}</div>"


def _figure(title: str, **options: Any) -> Any:
    plot = figure(height=250, sizing_mode="stretch_width", title=title, **options)
    plot.toolbar.logo = None
    return plot


def _color(name: str) -> str:
    """Return the color of a kernel's layer, or of a task of several kernels."""
    layer, _, way = name.partition(".")
    found = color_of(layer, way.startswith("backward"))
    return TASKS.get(name, found) if color_of(layer, False) == OTHER_COLOR else found
