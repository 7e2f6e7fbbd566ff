"""Curves of runs as a page that needs nothing but a browser: Bokeh's scripts are written into it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    Div,
    HoverTool,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    TabPanel,
    Tabs,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE

from daskgpt.instruments.plotting.curves_of_runs import Curves, thinned
from daskgpt.instruments.plotting.panels import COLOURS, LOSSES, MOST_POINTS, Panel, axis, other_panels, title_of

HEIGHT, LOWER = 420, 220  # pixels
HELP = (
    "Faint: each step. Line: mean over the latest steps. Points: validation. Wheel: zoom. Drag: move. A click in the "
    "legend hides a run everywhere."
)
TOOLTIPS = [("run", "@name"), ("step", "@step{0,0}"), ("value", "@y{0.0000}")]


def page_of_runs(runs: Sequence[Curves]) -> str:
    """The HTML: the loss against steps, tokens and time, in tabs, and what else is told below."""
    plots = [_plot(panel, runs, HEIGHT) for panel in LOSSES]
    below = [_plot(panel, runs, LOWER) for panel in other_panels(runs)]
    for plot in [*plots[1:], *below]:
        _follow(plots[0], plot)
    for plot in plots:
        _legend(plot, runs)
    tabs = Tabs(
        tabs=[TabPanel(child=plot, title=f"against {panel.x}") for plot, panel in zip(plots, LOSSES)],
        sizing_mode="stretch_width",
    )
    heading = Div(
        text=f"<h2 style='margin: 4px 0'>{escape(title_of(runs))}</h2><p style='margin: 0 0 6px 0'>{HELP}</p>",
        sizing_mode="stretch_width",
    )
    return str(file_html(column(heading, tabs, *below, sizing_mode="stretch_width"), INLINE, title_of(runs)))


def _plot(panel: Panel, runs: Sequence[Curves], height: int) -> Any:
    label, unit = axis(panel.x, runs)
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        title=panel.title,
        x_axis_label=label,
        y_axis_type="log" if panel.log else "linear",
        tools=[],
        min_border_left=70,
    )
    wheel, pan = WheelZoomTool(dimensions="width"), PanTool()
    plot.add_tools(wheel, pan, ResetTool(), SaveTool())
    plot.toolbar.active_scroll, plot.toolbar.active_drag, plot.toolbar.logo = wheel, pan, None
    if panel.x != "seconds":
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[0]a")
    if panel.y == "tokens_per_s":
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[0]a")
    if panel.y in ("tokens_per_s", "learning_rate"):
        highest = max(np.nanmax(run.values[panel.y]) for run in runs if run.has(panel.y))
        plot.y_range = Range1d(0, 1.05 * highest)
    named = []
    for run, colour in zip(runs, cycle(COLOURS)):
        named.append(_curves(plot, panel, run, colour, unit))
    plot.add_tools(HoverTool(renderers=named, tooltips=TOOLTIPS))
    return plot


def _curves(plot: Any, panel: Panel, run: Curves, colour: str, unit: float) -> Any:
    """A run's lines, all by its name, and the one that a pointer asks: what is smoothed where something is."""
    x = (run.steps if panel.x == "steps" else run.values[panel.x]) / unit
    raw, smooth = run.values[panel.y], run.smoothed.get(panel.y)

    def line(values: np.ndarray, **look: Any) -> Any:
        return plot.line("x", "y", source=_source(run, x, values), color=colour, name=run.name, **look)

    if smooth is None:
        shown = line(raw, width=1.6)
    else:
        line(raw, width=0.8, alpha=0.3)
        shown = line(smooth, width=1.8)
    if panel.points:
        validated = run.values[panel.points]
        line(validated, line_dash="dashed")
        source = _source(run, x, validated)
        points = plot.scatter("x", "y", source=source, color=colour, line_color="white", size=7, name=run.name)
        plot.add_tools(HoverTool(renderers=[points], tooltips=[*TOOLTIPS[:2], ("validation", "@y{0.0000}")]))
    return shown


def _source(run: Curves, x: np.ndarray, y: np.ndarray) -> ColumnDataSource:
    shown, values = thinned(x, y, MOST_POINTS)
    at = np.searchsorted(x[np.isfinite(x)], shown)
    steps = run.steps[np.isfinite(x)][np.minimum(at, np.isfinite(x).sum() - 1)] if len(shown) else shown
    return ColumnDataSource({"x": shown, "y": values, "step": steps, "name": [run.name] * len(shown)})


def _legend(plot: Any, runs: Sequence[Curves]) -> None:
    if len(runs) < 2:
        return
    items = [
        LegendItem(label=run.name, renderers=[own for own in plot.renderers if own.name == run.name]) for run in runs
    ]
    legend = Legend(items=items, orientation="horizontal", click_policy="hide", ncols=3, border_line_color=None)
    legend.location = "top_left"
    plot.add_layout(legend, "above")


def _follow(first: Any, other: Any) -> None:
    """What the legend of one plot hides is hidden in the other as well, and the other way round."""
    for name in {renderer.name for renderer in first.renderers}:
        own, theirs = ([each for each in plot.renderers if each.name == name] for plot in (first, other))
        if own and theirs:
            for renderer in theirs:
                own[0].js_link("visible", renderer, "visible")
            for renderer in own:
                theirs[0].js_link("visible", renderer, "visible")
