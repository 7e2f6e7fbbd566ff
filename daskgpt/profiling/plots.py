"""Curves of runs, read from their metrics and drawn by matplotlib, and the style of all figures.

Errors   RuntimeError if matplotlib, which an extra brings, is not installed
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.std import EMA

from daskgpt.config.errors import require, require_package
from daskgpt.config.files import printable
from daskgpt.profiling.timeline import PALETTE
from daskgpt.training.logs import METRICS, metrics_lines

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Figure  # also for other modules, which so have one error without it
except ImportError:
    require_package("matplotlib", "plot", "plots")
    raise

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
COLORS = tuple(PALETTE)[:10]
TITLES = {
    "loss": "loss (nats a token); pale: of a step, bold: mean, dots: held-out text",
    "learning_rate": "learning rate",
    "tokens_per_s": "tokens a second",
    "norm": "norm of all gradients",
}

Curves = dict[str, np.ndarray]  # of a run: (N,) float64, a value per step, by names of metrics; nan without one


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
    names = ("step", *TITLES, "validation_loss")
    values = {name: np.array([_number(record.get(name)) for record in records]) for name in names}
    return values | {"step": values["step"] + 1}


def _number(value: Any) -> float:
    """Return a metric as a number; nan for null and for what another program may have written."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan


def picture(runs: Mapping[str, Curves], kind: str) -> bytes:
    """Return a PNG or SVG file: loss, learning rate, throughput and norm by steps, as far as runs have them.

    kind   "png" or "svg"
    """
    names = [name for name in TITLES if any(np.isfinite(run[name]).any() for run in runs.values())]
    rule, advice = "the metrics must have a number to draw", "Wait for the run's first step."
    require(bool(names), "plot", rule, {"runs": ", ".join(runs)}, advice)
    with style():
        figure = Figure(figsize=(13.0, 3.8 * ((len(names) + 1) // 2)))
        for place, name in enumerate(names, 1):
            axes = figure.add_subplot((len(names) + 1) // 2, 2, place)
            for (label, run), color in zip(runs.items(), cycle(COLORS)):
                _draw(axes, run, name, label, color)
            axes.set(title=TITLES[name], xlabel="steps", yscale="log" if name == "norm" else "linear")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        return content(figure, kind)


def _draw(axes: Any, run: Curves, name: str, label: str, color: str) -> None:
    """Draw the values of single steps, their mean, which forgets a hundredth of the run or ten steps, and the losses of
    validations.
    """
    there, validated = np.isfinite(run[name]), np.isfinite(run["validation_loss"])
    steps, values = run["step"][there], run[name][there].tolist()
    if name != "learning_rate":
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        values = list(map(EMA(1 / max(10, len(values) // 100)), values))
    label = label.replace("$", r"\$")  # matplotlib sets text between dollars as a formula
    label = f" {label}" if label.startswith("_") else label  # it leaves out _names
    axes.plot(steps, values, "." if len(values) == 1 else "-", color=color, label=label)  # no line has one point
    if name == "loss":
        axes.plot(run["step"][validated], run["validation_loss"][validated], "o--", color=color, markersize=4)


def style() -> Any:
    """Return a context in which figures are made and saved in the style of all."""
    return mpl.rc_context(STYLE)


def content(figure: Figure, kind: str) -> bytes:
    """Return a figure as "png" or "svg", without a date, so that the same numbers give the same file."""
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()
