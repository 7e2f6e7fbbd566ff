"""The files of timelines: traces for Chrome and Perfetto, and pages that need only a browser."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, FactorRange, HoverTool, Range1d
from bokeh.plotting import figure
from bokeh.resources import INLINE
from tqdm import tqdm

from daskgpt.config.files import write_file
from daskgpt.profiling.timeline import Timeline, color_of, paths_of

LANE_HEIGHT, MARGIN, LEFT = 60, 90, 130  # pixels
HELP = (
    "Color is the layer, bright forward, dark backward; messages between workers are red, sent ones pale. "
    "An update (adamw) may include the product that makes its gradient. The number over the lanes is the step. "
    "Wheel: zoom. Drag: move."
)
BAR = '<div style="font: 12px sans-serif; max-width: 460px"><b>@name</b>, @ms{0,0.000} ms</div>'
TOOLTIPS = BAR.replace("</div>", "<br>@about{safe}</div>")


def write_timeline(timeline: Timeline, path: str | Path) -> tuple[Path, Path]:
    """Write FILE.json, for Chrome's about:tracing and Perfetto, and FILE.html, for any browser; return both paths."""
    trace, page = paths_of(path)
    trace.parent.mkdir(parents=True, exist_ok=True)
    for place, text in ((trace, json.dumps(timeline.trace())), (page, page_of(timeline))):
        write_file(place, text.encode(), "timeline")
    return trace, page


def page_of(timeline: Timeline) -> str:
    """Return the HTML of a timeline: its lanes above its summary."""
    head = f"<h2 style='margin: 4px 0'>{escape(timeline.title)}</h2>{HELP}<br>{html_legend(timeline)}"
    summary = f"<pre style='font-size: 13px'>{escape(str(timeline.summary))}</pre>"
    parts = [_text(head), _lanes_of(timeline), _text(summary)]
    return str(file_html(column(*parts, sizing_mode="stretch_width"), INLINE, timeline.title))


def html_legend(timeline: Timeline) -> str:
    """Return the colors of the layers of a timeline, as HTML."""
    square = '<span style="display: inline-block; width: 11px; height: 11px; background: {}"></span> {}'
    layers = sorted({event.layer for event in timeline.events})
    return " &nbsp; ".join(square.format(color_of(layer), escape(layer)) for layer in layers)


def _text(html: str) -> Div:
    return Div(text=html, sizing_mode="stretch_width")


def _lanes_of(timeline: Timeline) -> Any:
    """Return a plot with a lane per thread, and the number of each step above its first call."""
    names, bars = [lane.name for lane in timeline.lanes], bars_of(timeline)
    end = max(bar["right"] for bar in bars)
    axis = Range1d(0, end, bounds=(-0.02 * end, 1.02 * end), min_interval=1e-3)
    source = ColumnDataSource({name: [bar[name] for bar in bars] for name in bars[0]})
    look = {"height": MARGIN + LANE_HEIGHT * len(names), "min_border_left": LEFT, "x_range": axis}
    look |= {"tools": "xpan,xwheel_zoom,xbox_zoom,reset,save", "active_scroll": "xwheel_zoom", "active_drag": "xpan"}
    lanes = FactorRange(factors=names[::-1], range_padding=0.3, range_padding_units="absolute")
    plot = lanes_plot(source, lanes, tooltips=TOOLTIPS, **look)
    plot.xaxis.axis_label = "ms"
    starts = {bar["step"]: bar["left"] for bar in reversed(bars)}
    places = {"x": list(starts.values()), "y": [(names[0], 0.42)] * len(starts)}
    plot.text(text=[f"{step:,}" for step in starts], text_font_size="12px", text_baseline="bottom", **places)
    return plot


def lanes_plot(source: ColumnDataSource, lanes: FactorRange, title: str = "", tooltips: str = BAR, **look: Any) -> Any:
    """Return a plot of bars in lanes, which zooms and moves along the time.

    source  columns: lane, left, right, color, and those of the tooltips: name and ms
    """
    options = {"height": 250, "tools": "xpan,xwheel_zoom,reset"} | look
    plot = figure(title=title, y_range=lanes, sizing_mode="stretch_width", **options)
    plot.toolbar.logo = None
    # The line keeps a call visible that is narrower than a pixel.
    colors = {"fill_color": "color", "line_color": "color", "hover_line_color": "black"}
    bars = plot.hbar("lane", left="left", right="right", height=0.8, source=source, line_width=0.4, **colors)
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tooltips, point_policy="follow_mouse"))
    plot.ygrid.grid_line_color = None
    return plot


def bars_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the bars of the calls in a timeline, with times in milliseconds."""
    bars = list[dict[str, Any]]()
    for event in timeline.events:
        left, ms, lane = 1e3 * event.start, 1e3 * event.seconds, timeline.lanes[event.lane].name
        chunk = " ".join(f"{axis}={'all' if n is None else n}" for axis, n in zip("bth", event.chunk or ()))
        about = (
            f"{event.place}, step {event.step + 1}, chunk {chunk or 'all'}",
            f"from {left:,.3f} to {left + ms:,.3f} ms, returned {tqdm.format_sizeof(event.bytes, 'B')}",
            f"in task {event.task_name}, {lane}",
        )
        words = {"name": event.kind, "color": color_of(event.kind), "about": "<br>".join(map(escape, about))}
        bars.append({"lane": lane, "left": left, "right": left + ms, "ms": ms, "step": event.step + 1, **words})
    return bars
