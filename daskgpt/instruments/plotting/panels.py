"""What a plot of runs consists of: its panels, as a table, and how axes and colours are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daskgpt.instruments.plotting.curves_of_runs import Curves

COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#17becf", "#9c6b4e", "#ff8ab7", "#7f8c99", "#303030")
MOST_POINTS = 2000  # of a curve: more than there are columns on a screen
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}  # the first that the longest run has twice of


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    x, y     names of values of `Curves`; "steps" are the steps
    title    of the values
    points   the name of values that are drawn as points joined by a line, as they are
    log      whether y is logarithmic
    """

    x: str
    y: str
    title: str
    points: str = ""
    log: bool = False


LOSSES = tuple(Panel(x, "loss", "loss (nats a token)", "validation_loss") for x in ("steps", "tokens", "seconds"))
OTHERS = (
    Panel("steps", "learning_rate", "learning rate"),
    Panel("steps", "tokens_per_s", "tokens a second"),
    Panel("steps", "norm", "norm of all gradients", log=True),
)


def other_panels(runs: Sequence[Curves]) -> list[Panel]:
    """Those that any run tells something for."""
    return [panel for panel in OTHERS if any(run.has(panel.y) for run in runs)]


def axis(name: str, runs: Sequence[Curves]) -> tuple[str, float]:
    """The label of an x axis, and what its values are divided by."""
    if name != "seconds":
        return name, 1.0
    longest = max((run.values["seconds"][-1] for run in runs if run.has("seconds")), default=0.0)
    label, unit = next(((n, s) for n, s in TIMES.items() if longest >= 2 * s), ("seconds", 1.0))
    return f"{label} of training", unit


def title_of(runs: Sequence[Curves]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
