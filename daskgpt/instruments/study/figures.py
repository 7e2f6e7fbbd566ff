"""The figures of a study, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from daskgpt.instruments.study.grid import BARRIERS
from daskgpt.instruments.study.numbers import Rows, Spread, efficiencies, speedups, spread
from daskgpt.instruments.study.table import Row

NAMES = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
COLOURS = {"layer": "#d1495b", "phase": "#edae49", "step": "#00798c", "none": "#5e3c99"}
PHASE_COLOURS = {"forward": "#4269d0", "backward": "#ff725c", "update": "#3ca951", "total": "#303030"}
SHARES = {
    "kernel_share": ("kernels", "#00798c"),
    "inside_share": ("between a task's kernels", "#a463f2"),
    "scheduling_share": ("scheduling: a task was ready", "#edae49"),
    "waiting_share": ("waiting: no task was ready", "#d9d9d9"),
}
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
GRAINS = ("kernel", "segment", "block", "chunk", "auto")
Times = dict[Any, Spread]


def draw_all(folder: Path, rows: Rows) -> dict[str, str]:
    """Draw what the rows have something for; return name -> file of the PNG."""
    drawn: dict[str, str] = {}
    with mpl.rc_context(STYLE):
        for draw in (phases, barriers, slicing, grains, overlap, schedulers):
            found = draw(rows)
            if found is not None:
                for suffix in ("png", "svg"):
                    found.savefig(folder / f"{draw.__name__}.{suffix}", dpi=130, metadata=_metadata(suffix))
                drawn[draw.__name__] = f"{draw.__name__}.png"
    return drawn


def phases(rows: Rows) -> Figure | None:
    """Runtime, speedup and efficiency against threads, of each phase and of the whole step."""
    kinds = {barrier: phase_times(rows, barrier) for barrier in ("layer", "phase")}
    kinds = {barrier: times for barrier, times in kinds.items() if times}
    kinds = {barrier: times for barrier, times in kinds.items() if len(times["total"]) > 1} or kinds
    if not kinds:
        return None
    figure = Figure(figsize=(11, 0.4 + 3.2 * len(kinds)))
    grid = figure.subplots(len(kinds), 3, squeeze=False)
    for line, (barrier, times) in zip(grid, kinds.items()):
        series = {name: (own, PHASE_COLOURS[name]) for name, own in times.items()}
        _against_threads(line, series, f"barrier {NAMES[barrier]}")
    figure.suptitle(f"Phases of a step against threads{_n(rows.all)}")
    return figure


def barriers(rows: Rows) -> Figure | None:
    """Runtime, speedup and efficiency of a step against threads, for each barrier."""
    series = {NAMES[b]: (_times(rows.along("threads", barrier=b)), COLOURS[b]) for b in BARRIERS}
    series = {name: own for name, own in series.items() if own[0]}
    if len(series) < 2:
        return None
    figure = Figure(figsize=(11, 3.8))
    _against_threads(figure.subplots(1, 3), series, "a step")
    figure.suptitle(f"Where everybody waits{_n(rows.all)}")
    return figure


def slicing(rows: Rows) -> Figure | None:
    """Time of a step against the number of chunks, for chunks of all sequences, of some, of one."""
    series = slicing_times(rows)
    if sum(map(len, series.values())) < 2:
        return None
    figure = Figure(figsize=(7.5, 4.2))
    axes = figure.subplots()
    size = rows.all[0]["batch_size"]
    for (sequences, times), colour, marker in zip(series.items(), PHASE_COLOURS.values(), "os^D"):
        label = f"{sequences} of {size} sequences a chunk" + (": by tokens only" if sequences == size else "")
        _line(axes, times, colour, label, marker)
    counts = sorted({count for times in series.values() for count in times})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="chunks of a batch", ylabel="step (ms)", ylim=(0, None), title="Slicing a batch" + _n(rows.all))
    axes.legend(frameon=False, loc="lower left")
    return figure


def grains(rows: Rows) -> Figure | None:
    """Time of a step, and where the threads' time goes, against the size of a task."""
    found = rows.along("grain")
    if len(found) < 2:
        return None
    found = {grain: found[grain] for grain in GRAINS if grain in found}
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    names = [f"{grain}\n{_tasks(own):,.0f} tasks" for grain, own in found.items()]
    _dots(left, dict(zip(names, found.values())), ["#00798c"] * len(names))
    left.set(title="A step")
    _shares(right, dict(zip(found, found.values())))
    figure.suptitle(f"Size of a task{_n(rows.all)}")
    return figure


def overlap(rows: Rows) -> Figure | None:
    """Overlap of layers, critical path beside the step, and the threads' time, for each barrier."""
    found = {barrier: rows.at(barrier=barrier) for barrier in BARRIERS if rows.at(barrier=barrier)}
    if not found:
        return None
    figure = Figure(figsize=(12, 4))
    left, middle, right = figure.subplots(1, 3)
    _dots(left, found, [COLOURS[barrier] for barrier in found], "overlap", 100)
    left.set(title="Two or more layers at once", ylabel="share of the time (%)")
    for column, offset, colour, label in (
        ("recorded_ms", -0.2, "#9fb3c8", "recorded step"),
        ("critical_path_ms", 0.2, "#30638e", "critical path"),
    ):
        medians = [_median(own, column) for own in found.values()]
        bars = middle.bar([place + offset for place in range(len(found))], medians, 0.38, color=colour, label=label)
        middle.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.2g}", fontsize=8)
    middle.set_xticks(range(len(found)), list(found))
    middle.set(title="Critical path", ylabel="ms a step")
    middle.margins(y=0.22)
    middle.legend(frameon=False, loc="upper right", ncols=2, fontsize=9)
    _shares(right, found)
    threads = rows.reference["threads"]
    figure.suptitle(f"Overlap, {threads} thread{'s' if threads > 1 else ''}{_n(rows.all)}")
    return figure


def schedulers(rows: Rows) -> Figure | None:
    """Time of a step under each scheduler."""
    found = scheduler_rows(rows)
    if len(found) < 2:
        return None
    figure = Figure(figsize=(6.5, 4))
    axes = figure.subplots()
    _dots(axes, found, ["#30638e"] * len(found))
    axes.set(title=f"Schedulers{_n(rows.all)}")
    return figure


def phase_times(rows: Rows, barrier: str) -> dict[str, dict[int, Spread]]:
    """Phase -> threads -> its times, and those of the whole step; empty where phases were not apart."""
    found = rows.along("threads", barrier=barrier)
    times = {phase: _times(found, f"{phase}_ms") for phase in ("forward", "backward", "update")}
    times["total"] = _times(found)
    return times if all(times.values()) else {}


def slicing_times(rows: Rows) -> dict[int, dict[int, Spread]]:
    """Sequences in a chunk -> number of chunks -> times, most sequences first."""
    size, length = rows.all[0]["batch_size"], rows.all[0]["sequence_length"]
    series: dict[int, dict[int, Spread]] = {}
    for sequences in sorted({row["batch_chunk"] for row in rows.all}, reverse=True):
        times = _times(rows.along("sequence_chunk", batch_chunk=sequences))
        own = {size // sequences * (length // tokens): found for tokens, found in times.items()}
        if own:
            series[sequences] = dict(sorted(own.items()))
    return series


def scheduler_rows(rows: Rows) -> dict[str, list[Row]]:
    """`2 x threads` -> its rows."""
    found = {}
    for scheduler in dict.fromkeys(row["scheduler"] for row in rows.all):
        for threads, own in rows.along("threads", scheduler=scheduler).items():
            found[f"{scheduler}, {threads}"] = own
    return dict(sorted(found.items()))


def _against_threads(line: Sequence[Any], series: dict[str, tuple[Times, str]], name: str) -> None:
    """Three panels: runtime, speedup, efficiency."""
    kinds: tuple[tuple[str, Callable[[Times], dict[Any, float]] | None], ...] = (
        ("time (ms)", None),
        ("speedup", speedups),
        ("efficiency (%)", lambda times: {n: 100 * value for n, value in efficiencies(times).items()}),
    )
    threads = sorted({n for times, _ in series.values() for n in times})
    apart = 0.012 * (max(threads) - min(threads))
    for axes, (label, derived) in zip(line, kinds):
        for number, (title, (times, colour)) in enumerate(series.items()):
            if derived is None:
                # Side by side, so that the quartiles of one series do not hide another's.
                shift = apart * (number - (len(series) - 1) / 2)
                _line(axes, times, colour, title, "o^sD"[number % 4], shift)
            else:
                values = derived(times)
                axes.plot(list(values), list(values.values()), "o^sD"[number % 4] + "-", color=colour, label=title)
        axes.set(xlabel="threads", ylabel=label, title=name if derived is None else "")
        axes.set_xticks(threads)
        axes.margins(x=0.12)
    line[0].set_ylim(0, None)
    line[1].plot(threads, [n / min(threads) for n in threads], ":", color="#888888", label="ideal")
    line[2].axhline(100, ls=":", color="#888888")
    line[1].set_ylim(0, None)
    line[2].set_ylim(0, None)
    line[1].legend(frameon=False, fontsize=9)


def _line(axes: Any, times: Times, colour: str, label: str, marker: str, shift: float = 0) -> None:
    """Medians with quartiles, and a small dot for every run."""
    places = list(times)
    middle = [times[place].median for place in places]
    low, high = ([abs(times[place].quartiles[end] - times[place].median) for place in places] for end in (0, 2))
    shifted = [place + shift for place in places]
    axes.errorbar(shifted, middle, (low, high), fmt=marker + "-", color=colour, label=label, capsize=3, ms=6)
    for place in places:
        axes.plot([place + shift] * times[place].n, times[place].values, ".", color=colour, ms=4, alpha=0.6)


def _dots(
    axes: Any, found: dict[str, list[Row]], colours: Sequence[str], column: str = "step_ms", scale: float = 1
) -> None:
    """A bar to the median with its quartiles, and a dot for every run."""
    for place, (own, colour) in enumerate(zip(found.values(), colours)):
        times = spread(own, column)
        if times is None:
            continue
        low, middle, high = (value * scale for value in times.quartiles)
        axes.bar(place, middle, 0.6, color=colour, alpha=0.45)
        axes.errorbar(place, middle, ([middle - low], [high - middle]), color="black", capsize=5, lw=1)
        shift = [place + 0.12 * (number - (times.n - 1) / 2) for number in range(times.n)]
        axes.plot(shift, [value * scale for value in times.values], "o", color=colour, mec="black", mew=0.4, ms=5)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="step (ms)", ylim=(0, None))


def _shares(axes: Any, found: dict[str, list[Row]]) -> None:
    """Stacked shares of the threads' time."""
    below = [0.0] * len(found)
    for column, (label, colour) in SHARES.items():
        heights = [100 * _median(own, column) for own in found.values()]
        axes.bar(range(len(found)), heights, 0.6, bottom=below, color=colour, label=label)
        below = [low + height for low, height in zip(below, heights)]
    axes.set_xticks(range(len(found)), list(found))
    axes.set(title="Threads' time", ylabel="share (%)", ylim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=8)


def _times(found: dict[Any, list[Row]], column: str = "step_ms") -> Times:
    times = {value: spread(own, column) for value, own in found.items()}
    return {value: own for value, own in times.items() if own is not None}


def _tasks(own: Sequence[Row]) -> float:
    return _median(own, "tasks")


def _median(own: Sequence[Row], column: str) -> float:
    found = spread(own, column)
    return found.median if found else 0.0


def _n(rows: Sequence[Row]) -> str:
    """How many runs a point stands for."""
    counts: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = tuple(row[name] for name in ("threads", "scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain"))
        counts[key] = counts.get(key, 0) + 1
    least, most = min(counts.values()), max(counts.values())
    return f" (n = {least}{f' to {most}' if most > least else ''} run{'s' if most > 1 else ''} a point)"


def _metadata(suffix: str) -> dict[str, Any]:
    """No date inside an SVG: the same numbers give the same file."""
    return {"Date": None} if suffix == "svg" else {}
