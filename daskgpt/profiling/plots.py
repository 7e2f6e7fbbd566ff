"""Curves of runs, read from their metrics and drawn by matplotlib, and the style of all figures.

Errors   RuntimeError if matplotlib, which an extra brings, is not installed
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.std import EMA

from daskgpt.config.errors import require
from daskgpt.config.files import printable
from daskgpt.profiling.timeline import COLORS as LAYER_COLORS
from daskgpt.training.logs import METRICS, metrics_lines

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Figure  # also for other modules, which so have one error without it
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    rule = "matplotlib must be installed; got no such package"
    raise RuntimeError(f"plots: {rule}. Install it with pip install 'daskgpt[plot]'.") from error

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "svg.hashsalt": "daskgpt",
    "figure.constrained_layout.use": True,
}
COLORS = tuple(LAYER_COLORS.values())[:10]
AXES = {"step": "steps", "tokens": "tokens", "seconds": "minutes of training"}  # of the three panels of the loss
TITLES = {
    "loss": "loss (nats a token)",
    "learning_rate": "learning rate",
    "tokens_per_s": "tokens a second",
    "norm": "norm of all gradients",
}
VALUES = (*AXES, *TITLES, "validation_loss")
# The looks of lines: of single steps, of their means, of validations.
SINGLE: dict[str, Any] = {"alpha": 0.25, "linewidth": 0.8, "zorder": 1}
MEAN: dict[str, Any] = {"linewidth": 1.6}
VALIDATION: dict[str, Any] = {"linestyle": "--", "linewidth": 1, "marker": "o", "markersize": 4, "markeredgecolor": "w"}

Curves = dict[str, np.ndarray]  # of a run: (N,) float64, a value per step, by the names in VALUES; nan without one


def read_runs(paths: Sequence[str]) -> dict[str, Curves]:
    """Return the curves of run folders, or of files of metrics, by short names.

    Lines that are no records are skipped, as when a run is resumed.

    Errors   FileNotFoundError if there are no metrics; ValueError if there is no step
    """
    folders = [(path.parent if path.name == METRICS else path) for path in (Path(path).absolute() for path in paths)]
    common = os.path.commonpath([folder.parent for folder in folders])
    names = [printable(os.path.relpath(folder, common)) for folder in folders]
    return {name: _read(Path(path)) for name, path in zip(names, paths)}


def _read(path: Path) -> Curves:
    file = path / METRICS if path.is_dir() else path
    rule, advice = f"a run must have its {METRICS}", "Name a run's folder."
    require(file.is_file(), "plot", rule, {"run": path}, advice, FileNotFoundError)
    records = [record for record, _ in metrics_lines(file, sys.maxsize)]
    require(bool(records), "plot", "the metrics must have a step", {"metrics": file}, "Wait for the run's first one.")
    values = {name: np.array([record.get(name) for record in records], float) for name in VALUES}  # None is nan
    return values | {"step": values["step"] + 1}


def running_mean(values: np.ndarray, length: int) -> np.ndarray:
    """Return the mean of each value and those before it, weighted by 1 - 1/length a step back; nan has no weight.

    Shapes   (N,) -> (N,)
    """
    finite, mean = np.isfinite(values), EMA(1 / max(length, 1))
    means = np.array([mean(value if there else None) for value, there in zip(values.tolist(), finite)], float)
    means[~np.logical_or.accumulate(finite)] = np.nan  # before the first value
    return means


def picture(runs: Mapping[str, Curves], kind: str) -> bytes:
    """Return a PNG or SVG file: loss against steps, tokens and time; below it, the other values that the runs have.

    kind   "png" or "svg"
    """
    below = [name for name in TITLES if name != "loss" and any(np.isfinite(run[name]).any() for run in runs.values())]
    buffer = BytesIO()
    with style():
        figure = Figure(figsize=(13.0, 7.5))
        rows = [[name for name in row for _ in range(6 // len(row))] for row in ([*AXES], below) if row]
        axes: Any = figure.subplot_mosaic(rows)
        for x in AXES:
            _draw(axes[x], x, "loss", runs)
            axes[x].sharey(axes["step"])
        for y in below:
            _draw(axes[y], "step", y, runs)
        if len(runs) == 1:
            figure.suptitle(*runs, fontsize=12)
        handles, labels = axes["step"].get_legend_handles_labels()
        look = {"loc": "outside lower center", "ncols": min(len(handles), 6), "frameon": False, "fontsize": 9}
        figure.legend(handles, labels, **look)
        save(figure, buffer, kind)
    return buffer.getvalue()


def style() -> Any:
    """Return a context in which figures are made and saved in the style of all."""
    return mpl.rc_context(STYLE)


def save(figure: Figure, file: Any, kind: str) -> None:
    """Write a figure as "png" or "svg", without a date, so that the same numbers give the same file."""
    figure.savefig(file, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {})


def _draw(axes: Any, x: str, y: str, runs: Mapping[str, Curves]) -> None:
    """Draw the values of single steps and their means over a hundredth of the longest run, of the loss also those of
    validations.
    """
    length = max(10, *(len(run["step"]) // 100 for run in runs.values()))
    for number, ((name, run), color) in enumerate(zip(runs.items(), cycle(COLORS))):
        lines = {"mean over the latest steps": (MEAN, run[y])}
        if y != "learning_rate":
            lines = {"mean over the latest steps": (MEAN, running_mean(run[y], length)), "each step": (SINGLE, run[y])}
        if y == "loss":
            lines["validation"] = VALIDATION, run["validation_loss"]
        for label, (look, values) in lines.items():
            shown = np.isfinite(run[x]) & np.isfinite(values)
            # With several runs, thick lines have the names of their runs; lines of the first run explain the others.
            words = name if look is MEAN and len(runs) > 1 else label if number == 0 else None
            unit = 60 if x == "seconds" else 1
            axes.plot(run[x][shown] / unit, values[shown], color=color, label=words, **look)
    axes.set(title=TITLES[y], xlabel=AXES[x], yscale="log" if y == "norm" else "linear")
    if x != "seconds":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if y in ("tokens_per_s", "learning_rate"):
        axes.set_ylim(bottom=0)
    if y == "tokens_per_s":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "not in these metrics", ha="center", va="center", transform=axes.transAxes)
