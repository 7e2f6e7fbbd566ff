"""Curves of runs as a picture: PNG, or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from daskgpt.instruments.picture_style import STYLE
from daskgpt.instruments.plotting.curves_of_runs import Curves, thinned
from daskgpt.instruments.plotting.panels import COLOURS, LOSSES, MOST_POINTS, Panel, axis, other_panels, title_of

SIZE = (13.0, 7.5)  # inches
COLUMNS = 6  # of the grid: three panels above, and one to three below


def picture(runs: Sequence[Curves], kind: str) -> bytes:
    """The file.

    kind   "png" or "svg"
    """
    below, buffer = other_panels(runs), BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        rows = [_row([panel.x for panel in LOSSES]), _row([panel.y for panel in below])]
        axes: Any = figure.subplot_mosaic([row for row in rows if row])
        for panel in LOSSES:
            _draw(axes[panel.x], panel, runs)
        for panel in below:
            _draw(axes[panel.y], panel, runs)
        for panel in LOSSES[1:]:
            axes[panel.x].sharey(axes[LOSSES[0].x])
        _legend(figure, axes[LOSSES[0].x], runs)
        # No date inside: the same metrics give the same file.
        figure.savefig(buffer, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def _row(names: Sequence[str]) -> list[str]:
    """Names in the cells of a row of the grid, each in as many."""
    return [name for name in names for _ in range(COLUMNS // len(names))]


def _draw(axes: Any, panel: Panel, runs: Sequence[Curves]) -> None:
    label, unit = axis(panel.x, runs)
    for run, colour in zip(runs, cycle(COLOURS)):
        x = (run.steps if panel.x == "steps" else run.values[panel.x]) / unit
        raw, smooth = run.values[panel.y], run.smoothed.get(panel.y)
        if smooth is None:
            axes.plot(*thinned(x, raw, MOST_POINTS), color=colour)
        else:
            axes.plot(*thinned(x, raw, MOST_POINTS), color=colour, alpha=0.25, linewidth=0.8, zorder=1)
            axes.plot(*thinned(x, smooth, MOST_POINTS), color=colour, linewidth=1.6)
        if panel.points:
            points = thinned(x, run.values[panel.points], MOST_POINTS)
            axes.plot(*points, color=colour, linestyle="--", linewidth=1, marker="o", markersize=4, markeredgecolor="w")
    axes.set(title=panel.title, xlabel=label, yscale="log" if panel.log else "linear")
    if panel.x != "seconds":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.y in ("tokens_per_s", "learning_rate"):
        axes.set_ylim(bottom=0)
    if panel.y == "tokens_per_s":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.has_data() or not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "these metrics do not tell", ha="center", va="center", transform=axes.transAxes)


def _legend(figure: Figure, axes: Any, runs: Sequence[Curves]) -> None:
    """Colours of the runs, and what the lines of each mean, once."""
    grey = "#555555"
    lines = [Line2D([], [], color=colour, linewidth=3) for _, colour in zip(runs, cycle(COLOURS))]
    names = [run.name for run in runs]
    if len(runs) == 1:
        figure.suptitle(title_of(runs), fontsize=12)
        lines, names, grey = [], [], COLOURS[0]
    kinds: dict[str, dict[str, Any]] = {
        "each step": {"alpha": 0.4, "linewidth": 0.8},
        "mean over the latest steps": {"linewidth": 1.6},
        "validation": {"linestyle": "--", "linewidth": 1, "marker": "o", "markersize": 4},
    }
    lines += [Line2D([], [], color=grey, **look) for look in kinds.values()]
    figure.legend(
        lines, [*names, *kinds], loc="outside lower center", ncols=min(len(lines), 6), frameon=False, fontsize=9
    )
