"""A timeline as a page that needs nothing but a browser: Bokeh's scripts are written into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    Div,
    FixedTicker,
    HoverTool,
    Legend,
    LegendItem,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE

from daskgpt.instruments.timeline.colours import colour_of
from daskgpt.instruments.timeline.curves import Curve, layers_at_once, live_bytes
from daskgpt.instruments.timeline.events import Event, Timeline
from daskgpt.instruments.timeline.summary import describe_summary, summarise
from daskgpt.model.layers import LAYERS

STEP_COLOURS = ("#c3ccd5", "#4f5a65")
MEMORY_COLOUR, LAYERS_COLOUR, MEAN_COLOUR = "#4269d0", "#3ca951", "#14451d"
MEANS = 150
LANE_HEIGHT, MARGIN, LEGEND_HEIGHT, CURVE_HEIGHT, LEFT = 84, 155, 80, 180, 100  # pixels
LEGEND_COLUMNS = 5  # narrow enough for half a screen
HELP = (
    "<p style='margin: 0 0 6px 0'>Colour is the layer: bright forward, dark backward. The number over the lanes is the "
    "step; the strip under a lane changes with it. Wheel: zoom. Drag: move. A click in the legend hides a layer.</p>"
)
TOOLTIPS = """
<div style="font: 12px sans-serif; max-width: 460px">
<b>@kind</b> &nbsp; @where<br>
step @step, chunk @chunk<br>
@ms ms, from @from to @to ms<br>
returned @bytes, in task @task, @lane
</div>
"""


def page_of(timeline: Timeline) -> str:
    """The HTML: lanes of kernel calls, memory, and layers at once, on one time axis; below them the summary."""
    lanes, at_once = lanes_of(timeline, time_axis([timeline])), layers_at_once(timeline)
    memory = _curve(lanes, [(time, size / 1e6) for time, size in live_bytes(timeline)], MEMORY_COLOUR)
    memory.title.text, memory.yaxis.axis_label = "Memory: activations and gradients that are still to be read", "MB"
    layers = _curve(lanes, at_once, LAYERS_COLOUR)
    layers.title.text = f"Different layers running at once (dark: mean over 1/{MEANS} of the time)"
    layers.yaxis.axis_label, layers.xaxis.axis_label = "layers", "time (ms)"
    layers.yaxis.ticker = FixedTicker(ticks=list(range(1 + max((count for _, count in at_once), default=1))))
    layers.line(*_means(at_once), line_color=MEAN_COLOUR, line_width=2)
    heading = Div(text=f"<h2 style='margin: 4px 0'>{escape(timeline.title)}</h2>{HELP}")
    numbers = Div(text=f"<pre style='font-size: 13px'>{escape(describe_summary(summarise(timeline)))}</pre>")
    parts = column(heading, lanes, memory, layers, numbers, sizing_mode="stretch_width")
    return str(file_html(parts, INLINE, timeline.title))


def time_axis(timelines: Sequence[Timeline]) -> Range1d:
    """Milliseconds from the start to the end of the longest of them."""
    end = max(window.end for timeline in timelines for window in timeline.windows) * 1e3
    return Range1d(0, end, bounds=(-0.02 * end, 1.02 * end), min_interval=1e-3)


def lanes_of(timeline: Timeline, x_range: Range1d, title: str = "Kernel calls", legend: bool = True) -> Any:
    """One lane a thread, the first on top, with a strip of steps under each. Bars are named by their layer."""
    count = len(timeline.lanes)
    plot = figure(
        height=(MARGIN if legend else MARGIN - LEGEND_HEIGHT) + LANE_HEIGHT * count,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=Range1d(-0.5, count - 0.25),
        min_border_left=LEFT,
        tools=[],
        title=title,
    )
    wheel, pan = WheelZoomTool(dimensions="width"), PanTool(dimensions="width")
    plot.add_tools(wheel, pan, BoxZoomTool(dimensions="width"), ResetTool(), SaveTool())
    plot.toolbar.active_scroll, plot.toolbar.active_drag, plot.toolbar.logo = wheel, pan, None
    plot.yaxis.ticker = FixedTicker(ticks=list(range(count)))
    plot.yaxis.major_label_overrides = {count - 1 - lane: name for lane, name in enumerate(timeline.lanes)}
    plot.ygrid.grid_line_color = None
    items, renderers = [], []
    for layer in _in_legend_order(timeline.events):
        own = []
        for backward in (True, False):
            events = [e for e in timeline.events if e.layer == layer and (e.phase == "backward") == backward]
            if events:
                own.append(_bars(plot, timeline, events, colour_of(layer, backward)))
        items.append(LegendItem(label=layer, renderers=own))
        renderers += own
    _steps(plot, timeline)
    plot.add_tools(HoverTool(renderers=renderers, tooltips=TOOLTIPS, point_policy="follow_mouse"))
    if legend:
        names = Legend(items=items, orientation="horizontal", click_policy="hide", spacing=14, ncols=LEGEND_COLUMNS)
        names.border_line_color, names.location, names.padding = None, "top_left", 2
        plot.add_layout(names, "above")
    return plot


def _bars(plot: Any, timeline: Timeline, events: Sequence[Event], colour: str) -> Any:
    own = {
        "kind": [event.kind for event in events],
        "where": [event.where for event in events],
        "step": [event.step for event in events],
        "chunk": [_chunk(event) for event in events],
        "from": [f"{event.start * 1e3:,.3f}" for event in events],
        "to": [f"{event.end * 1e3:,.3f}" for event in events],
        "task": [event.task_name for event in events],
    }
    # The line keeps a call visible that is narrower than a pixel.
    look = {"fill_color": colour, "line_color": colour, "line_width": 0.4, "hover_line_color": "black"}
    return _quads(plot, timeline, events, (-0.26, 0.42), own, name=events[0].layer, **look)


def _quads(
    plot: Any,
    timeline: Timeline,
    bars: Sequence[Event],
    height: tuple[float, float],
    own: Mapping[str, object],
    **look: Any,
) -> Any:
    """A bar for each from its start to its end, in its lane; its tooltip finds these columns and those of its own."""
    top, (low, high) = len(timeline.lanes) - 1, height
    sides = {
        "left": [bar.start * 1e3 for bar in bars],
        "right": [bar.end * 1e3 for bar in bars],
        "bottom": [top - bar.lane + low for bar in bars],
        "top": [top - bar.lane + high for bar in bars],
    }
    told = {
        "lane": [timeline.lanes[bar.lane] for bar in bars],
        "bytes": [_bytes(bar.bytes) for bar in bars],
        "ms": [f"{(bar.end - bar.start) * 1e3:,.3f}" for bar in bars],
    }
    return plot.quad(**{side: side for side in sides}, source=ColumnDataSource({**sides, **told, **own}), **look)


def _steps(plot: Any, timeline: Timeline) -> None:
    """Under each lane which step it works on: one bar for events of a step that follow one another."""
    top = len(timeline.lanes) - 1
    for lane in range(len(timeline.lanes)):
        events = [event for event in timeline.events if event.lane == lane]
        for step, group in groupby(events, key=lambda event: event.step):
            own = list(group)
            left, right = own[0].start * 1e3, own[-1].end * 1e3
            colour = STEP_COLOURS[timeline.steps.index(step) % 2]
            plot.quad(left=left, right=right, bottom=top - lane - 0.4, top=top - lane - 0.29, color=colour)
    for step in timeline.steps:
        first = min((event.start for event in timeline.events if event.step == step), default=0.0) * 1e3
        plot.text(x=[first], y=[top + 0.48], text=[str(step)], text_font_size="12px", text_baseline="bottom")


def _curve(lanes: Any, curve: Sequence[tuple[float, float]], colour: str) -> Any:
    """A stepped line, filled, over the time axis of the lanes."""
    plot = figure(
        height=CURVE_HEIGHT,
        sizing_mode="stretch_width",
        x_range=lanes.x_range,
        min_border_left=LEFT,
        tools=[],
        title=" ",
    )
    wheel, pan = WheelZoomTool(dimensions="width"), PanTool(dimensions="width")
    plot.add_tools(wheel, pan, ResetTool())
    plot.toolbar.active_scroll, plot.toolbar.active_drag = wheel, pan
    plot.toolbar_location, plot.y_range.start, plot.yaxis.minor_tick_line_color = None, 0, None
    times, values = [time * 1e3 for time, _ in curve], [value for _, value in curve]
    plot.varea_step(times, 0, values, step_mode="after", fill_color=colour, fill_alpha=0.3)
    plot.step(times, values, mode="after", line_color=colour, line_width=0.8, line_alpha=0.7)
    return plot


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """Middles of equal parts of the time, in ms, and the mean of a stepped curve in each."""
    times, values = np.array([time for time, _ in curve]), np.array([value for _, value in curve], float)
    integral = np.concatenate([[0.0], np.cumsum(np.diff(times) * values[:-1])])
    edges = np.linspace(times[0], times[-1], MEANS + 1)
    means = np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return list((edges[:-1] + edges[1:]) / 2 * 1e3), list(means)


def _in_legend_order(events: Sequence[Event]) -> list[str]:
    """Layers as they come in the model, the update last."""
    known = [layer.name for layer in LAYERS]
    return sorted({event.layer for event in events}, key=lambda layer: known.index(layer) if layer in known else 99)


def _chunk(event: Event) -> str:
    if event.chunk is None:
        return "all"
    return " ".join(f"{axis}={'all' if index is None else index}" for axis, index in zip("bt", event.chunk))


def _bytes(size: int) -> str:
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
