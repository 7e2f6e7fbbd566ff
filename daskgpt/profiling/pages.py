"""The files of timelines: traces for Chrome and Perfetto, pages that need nothing but a browser, and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, FixedTicker, HoverTool, Legend, LegendItem, Range1d
from bokeh.plotting import figure
from bokeh.resources import INLINE
from tqdm import tqdm

from daskgpt.config.files import replacing
from daskgpt.model.layers import LAYERS
from daskgpt.profiling.recorder import timeline_paths
from daskgpt.profiling.timeline import (
    Curve,
    Event,
    Timeline,
    color_of,
    describe_summary,
    layers_at_once,
    layers_of,
    live_bytes,
    summarise,
)

STEP_COLORS = ("#c3ccd5", "#4f5a65")
MEMORY_COLOR, LAYERS_COLOR, MEAN_COLOR = "#4269d0", "#3ca951", "#14451d"
MEANS = 150
LANE_HEIGHT, MARGIN, LEGEND_HEIGHT, CURVE_HEIGHT, LEFT = 84, 155, 80, 180, 100  # pixels
LEGEND_COLUMNS = 5  # narrow enough for half a screen
HELP = (
    "<p style='margin: 0 0 6px 0'>Color is the layer: bright forward, dark backward. The number over the lanes is the "
    "step; the strip under a lane changes with it. Wheel: zoom. Drag: move. A click in the legend hides a layer.</p>"
)
TOOLTIPS = """
<div style="font: 12px sans-serif; max-width: 460px">
<b>@kind</b> &nbsp; @where<br>
step @step, chunk @chunk<br>
@ms{0,0.000} ms, from @left{0,0.000} to @right{0,0.000} ms<br>
returned @bytes, in task @task, @lane
</div>
"""


def write_timeline(timeline: Timeline, path: str | Path) -> tuple[Path, Path]:
    """Write FILE.json, for Chrome's about:tracing and Perfetto, and FILE.html, for any browser; return both paths."""
    trace, page = timeline_paths(path)
    trace.parent.mkdir(parents=True, exist_ok=True)
    return _write(trace, json.dumps(trace_of(timeline))), _write(page, page_of(timeline))


def write_side_by_side(timelines: Mapping[str, Timeline], page: Path, title: str) -> Path:
    """Write one page of several timelines, by name, on one time scale; return its path."""
    return _write(page, page_of_several(timelines, title))


def _write(path: Path, text: str) -> Path:
    with replacing(path, "timeline") as file:
        file.write(text.encode())
    return path


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Return complete events, a thread per lane, with counters of memory and of layers at once; times in microseconds.

    Source   the Trace Event Format: ph X is an event with a duration, C a counter, M a name
    """

    def microseconds(seconds: float) -> float:
        return round(seconds * 1e6, 3)

    names = [("process_name", 0, timeline.title), *(("thread_name", *lane) for lane in enumerate(timeline.lanes))]
    entries: list[dict[str, Any]] = [{"ph": "M", "tid": t, "name": kind, "args": {"name": n}} for kind, t, n in names]
    for event in timeline.events:
        shown = {name: getattr(event, name) for name in ("layer", "block", "chunk", "bytes")} | {"step": event.step + 1}
        entry = {"ph": "X", "tid": event.lane, "name": event.kind, "cat": f"{event.phase},step {event.step + 1}"}
        times = {"ts": microseconds(event.start), "dur": microseconds(event.seconds)}
        more = {"where": event.place, "pass": event.phase, "task": event.task_name}
        entries.append({**entry, **times, "args": {**shown, **more}})
    for name, unit, curve in (
        ("memory of activations and gradients", "bytes", live_bytes(timeline)),
        ("layers at once", "layers", layers_at_once(timeline)),
    ):
        entries += [{"ph": "C", "name": name, "ts": microseconds(at), "args": {unit: value}} for at, value in curve]
    return {"traceEvents": [{"pid": 0} | entry for entry in entries], "displayTimeUnit": "ms"}


def page_of(timeline: Timeline) -> str:
    """Return the HTML: lanes of kernel calls, memory, and layers at once, on one time axis; below them the summary."""
    lanes, at_once = lanes_of(timeline, time_axis([timeline])), layers_at_once(timeline)
    memory = _curve(lanes.x_range, live_bytes(timeline), 1e-6, MEMORY_COLOR)
    memory.title.text, memory.yaxis.axis_label = "Memory: activations and gradients that are still to be read", "MB"
    layers = _curve(lanes.x_range, at_once, 1, LAYERS_COLOR)
    layers.title.text = f"Different layers running at once (dark: mean over 1/{MEANS} of the time)"
    layers.yaxis.axis_label, layers.xaxis.axis_label = "layers", "time (ms)"
    layers.yaxis.ticker = FixedTicker(ticks=list(range(1 + max((count for _, count in at_once), default=1))))
    layers.line(*_means(at_once), line_color=MEAN_COLOR, line_width=2)
    numbers = Div(text=f"<pre style='font-size: 13px'>{escape(describe_summary(summarise(timeline)))}</pre>")
    return _page(timeline.title, [lanes, memory, layers, numbers])


def page_of_several(timelines: Mapping[str, Timeline], title: str) -> str:
    """Return the HTML of several timelines on one time scale: the lanes of each below its name and summary. Zooming,
    moving and hiding act on all of them.

    Errors   ValueError if one has no events
    """
    axis = time_axis(list(timelines.values()))
    plots = [lanes_of(timeline, axis, "", legend=number == 0) for number, timeline in enumerate(timelines.values())]
    first = {renderer.name: renderer for renderer in plots[0].renderers if renderer.name}
    for plot in plots[1:]:
        for renderer in plot.renderers:
            if renderer.name in first:
                first[renderer.name].js_link("visible", renderer, "visible")
    plots[-1].xaxis.axis_label = "time (ms), the same for all"
    parts: list[Any] = []
    for plot, (name, timeline) in zip(plots, timelines.items()):
        text = f"<div style='font-size: 14px'><b>{escape(name)}</b>: {escape(in_brief(timeline))}</div>"
        parts += [Div(text=text, sizing_mode="stretch_width"), plot]
    return _page(title, parts)


def in_brief(timeline: Timeline) -> str:
    """Return the summary of a timeline in one line."""
    found = summarise(timeline)
    return (
        f"{found.wall * 1e3 / found.steps:,.2f} ms a step; kernels run {found.kernel_share:.0%} of the threads' time; "
        f"two or more layers at once {found.overlap:.0%}, steps {found.steps_overlap:.0%}"
    )


def _page(title: str, parts: Sequence[Any]) -> str:
    heading = Div(text=f"<h2 style='margin: 4px 0'>{escape(title)}</h2>{HELP}", sizing_mode="stretch_width")
    return str(file_html(column(heading, *parts, sizing_mode="stretch_width"), INLINE, title))


def time_axis(timelines: Sequence[Timeline]) -> Range1d:
    """Return an axis of milliseconds, from 0 to the end of the longest timeline."""
    end = max(window.end for timeline in timelines for window in timeline.windows) * 1e3
    return Range1d(0, end, bounds=(-0.02 * end, 1.02 * end), min_interval=1e-3)


def _figure(x_range: Range1d, tools: str, **look: Any) -> Any:
    look |= {"sizing_mode": "stretch_width", "min_border_left": LEFT, "tools": f"xwheel_zoom,xpan,{tools}"}
    plot = figure(x_range=x_range, active_scroll="xwheel_zoom", active_drag="xpan", **look)
    plot.toolbar.logo = None
    return plot


def lanes_of(timeline: Timeline, x_range: Range1d, title: str = "Kernel calls", legend: bool = True) -> Any:
    """Return a plot with a lane per thread, the first at the top, and a strip of steps below each.

    Bars have the name of their layer.
    """
    count, known = len(timeline.lanes), [layer.name for layer in LAYERS]
    height = MARGIN - LEGEND_HEIGHT * (not legend) + LANE_HEIGHT * count
    plot = _figure(x_range, "xbox_zoom,reset,save", height=height, y_range=Range1d(-0.5, count - 0.25), title=title)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(count)))
    plot.yaxis.major_label_overrides = {count - 1 - lane: name for lane, name in enumerate(timeline.lanes)}
    plot.ygrid.grid_line_color = None
    # In the order of the model, the update last.
    layers = sorted(layers_of(timeline), key=lambda name: known.index(name) if name in known else len(known))
    sides = {side: side for side in ("left", "right", "bottom", "top")}
    for layer, backward in product(layers, (True, False)):
        events = [e for e in timeline.events if e.layer == layer and (e.phase == "backward") == backward]
        if events:
            # The line keeps a call visible that is narrower than a pixel.
            look = dict.fromkeys(("fill_color", "line_color"), color_of(layer, backward)) | {"line_width": 0.4}
            plot.quad(source=_bars(timeline, events), hover_line_color="black", name=layer, **sides, **look)
    plot.add_tools(HoverTool(renderers=list(plot.renderers), tooltips=TOOLTIPS, point_policy="follow_mouse"))
    _steps(plot, timeline)
    if legend:
        items = [
            LegendItem(label=name, renderers=[bar for bar in plot.renderers if bar.name == name]) for name in layers
        ]
        names = Legend(items=items, orientation="horizontal", click_policy="hide", spacing=14, ncols=LEGEND_COLUMNS)
        names.border_line_color, names.location, names.padding = None, "top_left", 2
        plot.add_layout(names, "above")
    return plot


def _bars(timeline: Timeline, events: Sequence[Event]) -> ColumnDataSource:
    """Return the columns of bars: their sides, and the values of their tooltips."""

    def row(event: Event) -> dict[str, Any]:
        middle = len(timeline.lanes) - 1 - event.lane
        chunk = zip("bt", event.chunk) if event.chunk is not None else ()
        return {
            **{"left": event.start * 1e3, "right": event.end * 1e3, "bottom": middle - 0.26, "top": middle + 0.42},
            **{"kind": event.kind, "where": event.place, "step": event.step + 1, "ms": event.seconds * 1e3},
            "chunk": " ".join(f"{axis}={'all' if index is None else index}" for axis, index in chunk) or "all",
            "bytes": tqdm.format_sizeof(event.bytes, "B"),
            "task": event.task_name,
            "lane": timeline.lanes[event.lane],
        }

    rows = [row(event) for event in events]
    return ColumnDataSource({name: [own[name] for own in rows] for name in rows[0]})


def _steps(plot: Any, timeline: Timeline) -> None:
    """Draw a strip of steps below each lane: a bar for consecutive events of one step."""
    top = len(timeline.lanes) - 1
    by_lane = sorted(timeline.events, key=lambda event: event.lane)
    for (lane, step), group in groupby(by_lane, key=lambda event: (event.lane, event.step)):
        own, color = list(group), STEP_COLORS[timeline.steps.index(step) % 2]
        left, right = own[0].start * 1e3, own[-1].end * 1e3
        plot.quad(left=left, right=right, bottom=top - lane - 0.4, top=top - lane - 0.29, color=color)
    for step in timeline.steps:
        first = min((event.start for event in timeline.events if event.step == step), default=0.0) * 1e3
        plot.text(x=[first], y=[top + 0.48], text=[f"{step + 1:,}"], text_font_size="12px", text_baseline="bottom")


def _curve(x_range: Range1d, curve: Curve, scale: float, color: str) -> Any:
    """Return a plot of a stepped line, filled, over a time axis."""
    plot = _figure(x_range, "reset", height=CURVE_HEIGHT, title=" ", toolbar_location=None)
    plot.y_range.start, plot.yaxis.minor_tick_line_color = 0, None
    times, values = [time * 1e3 for time, _ in curve], [value * scale for _, value in curve]
    plot.varea_step(times, 0, values, step_mode="after", fill_color=color, fill_alpha=0.3)
    plot.step(times, values, mode="after", line_color=color, line_width=0.8, line_alpha=0.7)
    return plot


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """Return the middles of equal parts of the time, in ms, and the mean of a stepped curve in each."""
    times, values = np.array([time for time, _ in curve]), np.array([value for _, value in curve], float)
    integral = np.concatenate([[0.0], np.cumsum(np.diff(times) * values[:-1])])
    edges = np.linspace(times[0], times[-1], MEANS + 1)
    means = np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return list((edges[:-1] + edges[1:]) / 2 * 1e3), list(means)
