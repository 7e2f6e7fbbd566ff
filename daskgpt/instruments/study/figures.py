"""The figures of a study, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from daskgpt.instruments.plots import STYLE
from daskgpt.instruments.statistics import Spread
from daskgpt.instruments.study.dials import BARRIERS, DIALS, MARKERS, PHASES, SLICINGS, TOTAL
from daskgpt.instruments.study.numbers import (
    Rows,
    count,
    efficiencies,
    median,
    model_name,
    model_of,
    runs_a_point,
    speedups,
    spread,
    spreads,
)
from daskgpt.instruments.study.table import Row

SHARES = {
    "kernel_share": ("kernels", "#00798c"),
    "inside_share": ("between a task's kernels", "#a463f2"),
    "scheduling_share": ("scheduling: a task was ready", "#edae49"),
    "waiting_share": ("waiting: no task was ready", "#d9d9d9"),
}
Times = dict[Any, Spread]
Series = dict[str, tuple[Times, str]]  # name -> times and colour


def draw_all(folder: Path, rows: Rows) -> dict[str, str]:
    """Draw what the rows have something for; return name -> file of the PNG."""
    drawn: dict[str, str] = {}
    with mpl.rc_context(STYLE):
        for name, found in figures(rows).items():
            for suffix in ("png", "svg"):
                found.savefig(folder / f"{name}.{suffix}", dpi=130, metadata=_metadata(suffix))
            drawn[name] = f"{name}.png"
    return drawn


def figures(rows: Rows) -> dict[str, Figure]:
    """Name -> figure, of those that the rows have something for."""
    with mpl.rc_context(STYLE):
        drawn = {draw.__name__: draw(rows) for draw in (phases, barriers, slicing, grains, overlap, schedulers)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def phases(rows: Rows) -> Figure | None:
    """Runtime, speedup and efficiency against threads, of each phase and of the whole step."""
    kinds = {barrier: phase_times(rows, barrier) for barrier in ("layer", "phase")}
    kinds = {barrier: times for barrier, times in kinds.items() if times}
    kinds = {barrier: times for barrier, times in kinds.items() if len(times["total"]) > 1} or kinds
    if not kinds:
        return None
    lines: dict[str, Series] = {
        f"barrier {BARRIERS[barrier].label}": {name: (own, (PHASES | TOTAL)[name]) for name, own in times.items()}
        for barrier, times in kinds.items()
    }
    bases = {phase: rows.sequential(f"{phase}_ms") for phase in PHASES} | {"total": rows.sequential()}
    return _against_threads(lines, bases, "Phases of a step against threads", rows)


def barriers(rows: Rows) -> Figure | None:
    """Runtime, speedup and efficiency of a step against threads, for each barrier."""
    series = {look.label: (spreads(rows.along("threads", barrier=b)), look.colour) for b, look in BARRIERS.items()}
    series = {name: own for name, own in series.items() if own[0]}
    bases = dict.fromkeys(series, rows.sequential())
    return _against_threads({"a step": series}, bases, "Where everybody waits", rows) if len(series) > 1 else None


def slicing(rows: Rows) -> Figure | None:
    """Time of a step against the number of chunks, for chunks of all sequences, of some, of one."""
    series = slicing_times(rows)
    if sum(map(len, series.values())) < 2:
        return None
    figure = Figure(figsize=(8.5, 4.8))
    axes = figure.subplots()
    size = rows.all[0]["batch_size"]
    for (sequences, times), colour, marker in zip(series.items(), SLICINGS, MARKERS):
        label = f"{sequences} of {size} sequences a chunk" + (": by tokens only" if sequences == size else "")
        _line(axes, times, colour, label, marker)
    axes.margins(y=0.08)
    counts = sorted({number for times in series.values() for number in times})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(number) for number in counts])
    axes.set(xlabel="chunks of a batch", ylabel="step (ms)", ylim=(0, None))
    figure.legend(frameon=False, loc="outside lower center")
    _title(figure, "Slicing a batch", rows)
    return figure


def grains(rows: Rows) -> Figure | None:
    """Time of a step, and where the threads' time goes, against the size of a task."""
    found = rows.along("grain")
    if len(found) < 2:
        return None
    figure = Figure(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2)
    names = [f"{grain}\n{median(own, 'tasks'):,.0f} tasks" for grain, own in found.items()]
    _dots(left, dict(zip(names, found.values())), [DIALS["grain"].looks[grain].colour for grain in found])
    left.set(title="A step")
    _shares(right, dict(zip(found, found.values())))
    _title(figure, "Size of a task", rows)
    return figure


def overlap(rows: Rows) -> Figure | None:
    """Overlap of layers, critical path beside the step, and the threads' time, for each barrier."""
    found = {barrier: rows.at(barrier=barrier) for barrier in BARRIERS if rows.at(barrier=barrier)}
    if not found:
        return None
    figure = Figure(figsize=(13, 4.4))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.6, 1.3))
    _dots(left, found, [BARRIERS[barrier].colour for barrier in found], "overlap", 100)
    highest = max(value for own in found.values() for value in _values(own, "overlap"))
    left.set(title="Two or more layers at once", ylabel="share of the time (%)", ylim=(0, 110 * highest or 10))
    for column, offset, colour, label in (
        ("step_ms", -0.2, "#9fb3c8", "step"),
        ("critical_path_ms", 0.2, "#30638e", "critical path"),
    ):
        medians = [median(own, column) for own in found.values()]
        bars = middle.bar([place + offset for place in range(len(found))], medians, 0.38, color=colour, label=label)
        middle.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.2g}", fontsize=7)
    middle.set_xticks(range(len(found)), list(found))
    middle.set(title="Critical path", ylabel="ms a step")
    middle.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8)
    _shares(right, found)
    _title(figure, f"Overlap, {count(rows.reference['threads'], 'thread')}", rows)
    return figure


def schedulers(rows: Rows) -> Figure | None:
    """Time of a step under each scheduler."""
    found = scheduler_rows(rows)
    if len(found) < 2:
        return None
    figure = Figure(figsize=(max(8.5, 1.1 * len(found)), 4.2))
    axes = figure.subplots()
    names = {name.replace(" (", "\n("): own for name, own in found.items()}
    _dots(axes, names, [DIALS["scheduler"].colour] * len(found))
    _title(figure, "Schedulers", rows)
    return figure


def phase_times(rows: Rows, barrier: str) -> dict[str, dict[int, Spread]]:
    """Phase -> threads -> its times, and those of the whole step; empty where phases were not apart."""
    found = rows.along("threads", barrier=barrier)
    times = {phase: spreads(found, f"{phase}_ms") for phase in PHASES}
    times["total"] = spreads(found)
    return times if all(times.values()) else {}


def slicing_times(rows: Rows) -> dict[int, dict[int, Spread]]:
    """Sequences in a chunk -> number of chunks -> times, most sequences first."""
    size, length = rows.all[0]["batch_size"], rows.all[0]["sequence_length"]
    series: dict[int, dict[int, Spread]] = {}
    for sequences in sorted({row["batch_chunk"] for row in rows.all}, reverse=True):
        times = spreads(rows.along("sequence_chunk", batch_chunk=sequences))
        own = {size // sequences * (length // tokens): found for tokens, found in times.items()}
        if own:
            series[sequences] = dict(sorted(own.items()))
    return series


def scheduler_rows(rows: Rows) -> dict[str, list[Row]]:
    """`threads (2 threads)` -> its rows."""
    found = {}
    for scheduler in sorted({row["scheduler"] for row in rows.all}, key=DIALS["scheduler"].order):
        for threads, own in rows.along("threads", scheduler=scheduler).items():
            unit = "thread" if scheduler in ("sync", "threads") else "worker"
            found[f"{scheduler} ({count(threads, unit)})"] = own
    return found


def _against_threads(lines: Mapping[str, Series], bases: Mapping[str, Spread | None], title: str, rows: Rows) -> Figure:
    """A line of panels each: runtime, and, where the sequential run was made, speedup and efficiency.

    bases   times of the sequential run, by the names of the series
    """
    threads = sorted({n for series in lines.values() for times, _ in series.values() for n in times})
    places = {n: place for place, n in enumerate(threads)}  # equally far apart: 1, 2 and 64 threads are all legible
    panels = 3 if len(threads) > 1 and any(bases.values()) else 1
    figure = Figure(figsize=(11 if panels == 3 else 8.5, 1.2 + 3.2 * len(lines)))
    for axes, (name, series) in zip(figure.subplots(len(lines), panels, squeeze=False), lines.items()):
        _runtime(axes[0], series, places)
        axes[0].set_title(name)
        if panels == 3:
            _derived(axes[1], series, places, bases, speedups, "speedup")
            _derived(axes[2], series, places, bases, _percent, "efficiency (%)")
            (ideal,) = axes[1].plot([*places.values()], [*places], ":", color="#888888")
            axes[2].axhline(100, ls=":", color="#888888")
        for own in axes:
            own.margins(x=0.12, y=0.08)
            own.set(xlabel="threads", ylim=(0, None))
            own.set_xticks([*places.values()], [*map(str, places)])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if panels == 3:
        handles, labels = [*handles, ideal], [*labels, "ideal"]
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=5, fontsize=9)
    note = "speedup over the sequential run: 1 thread, no barrier that costs" if panels == 3 else ""
    _title(figure, title, rows, note)
    return figure


def _runtime(axes: Any, series: Series, places: Mapping[int, int]) -> None:
    """Times side by side, so that the quartiles of one series do not hide another's."""
    apart = 0.012 * max(len(places) - 1, 1)
    for number, (name, (times, colour)) in enumerate(series.items()):
        own = {places[n] + apart * (number - (len(series) - 1) / 2): found for n, found in times.items()}
        _line(axes, own, colour, name, MARKERS[number % len(MARKERS)])
    axes.set_ylabel("time (ms)")


def _derived(
    axes: Any,
    series: Series,
    places: Mapping[int, int],
    bases: Mapping[str, Spread | None],
    derive: Callable[[Times, Spread | None], dict[Any, float]],
    name: str,
) -> None:
    """What follows from the times, of those series that have a base."""
    for number, (own, (times, colour)) in enumerate(series.items()):
        found = derive(times, bases[own])
        axes.plot([places[n] for n in found], [*found.values()], MARKERS[number % len(MARKERS)] + "-", color=colour)
    axes.set_ylabel(name)


def _percent(times: Times, base: Spread | None) -> dict[Any, float]:
    return {n: 100 * value for n, value in efficiencies(times, base).items()}


def _line(axes: Any, times: Times, colour: str, label: str, marker: str) -> None:
    """Medians with quartiles, and a small dot for every run."""
    places = list(times)
    middle = [times[place].median for place in places]
    low, high = ([abs(times[place].quartiles[end] - times[place].median) for place in places] for end in (0, 2))
    axes.errorbar(places, middle, (low, high), fmt=marker + "-", color=colour, label=label, capsize=3, ms=6)
    for place in places:
        axes.plot([place] * times[place].n, times[place].values, ".", color=colour, ms=4, alpha=0.6)


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
        heights = [100 * median(own, column) for own in found.values()]
        axes.bar(range(len(found)), heights, 0.6, bottom=below, color=colour, label=label)
        below = [low + height for low, height in zip(below, heights)]
    axes.set_xticks(range(len(found)), list(found))
    axes.set(title="Threads' time", ylabel="share (%)", ylim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=8)


def _values(own: Sequence[Row], column: str) -> tuple[float, ...]:
    found = spread(own, column)
    return found.values if found else (0.0,)


def _title(figure: Figure, title: str, rows: Rows, note: str = "") -> None:
    """What is shown, and of what: a figure may stand without its report."""
    row, (least, most) = rows.all[0], runs_a_point(rows.all)
    runs = count(most, "run") if least == most else f"{least} to {most} runs"
    model = f"{model_name(model_of(row))}, {row['batch_size']} x {row['sequence_length']} tokens a step; {runs} a point"
    figure.suptitle("\n".join(filter(None, (title, model, note))), fontsize=11)


def _metadata(suffix: str) -> dict[str, Any]:
    """No date inside an SVG: the same numbers give the same file."""
    return {"Date": None} if suffix == "svg" else {}
