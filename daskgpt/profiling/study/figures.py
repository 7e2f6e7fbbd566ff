"""The figures of a study, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daskgpt.profiling.plots import Figure, save, style
from daskgpt.profiling.statistics import Spread
from daskgpt.profiling.study.grid import BARRIERS
from daskgpt.profiling.study.table import Row, Rows, count, median, model_name, speedups, spread, spreads

BARRIER_COLORS = {"layer": "#d1495b", "phase": "#edae49", "step": "#00798c", "none": "#5e3c99"}
PHASES = {  # column -> name and color
    "forward_ms": ("forward", "#4269d0"),
    "backward_ms": ("backward", "#ff725c"),
    "update_ms": ("update", "#3ca951"),
    "step_ms": ("total", "#303030"),
}
SHARES = {
    "kernel_share": ("kernels", "#00798c"),
    "inside_share": ("between a task's kernels", "#a463f2"),
    "scheduling_share": ("scheduling: a task was ready", "#edae49"),
    "waiting_share": ("waiting: no task was ready", "#d9d9d9"),
}
MARKERS = "o^sD"
Times = Mapping[Any, Spread]
Series = dict[str, tuple[Times, str, Spread | None]]  # name -> times by threads, color, base of the speedup


def draw_all(folder: Path, rows: Rows) -> dict[str, str]:
    """Draw what the rows have something for; return name -> file of the PNG."""
    with style():
        for name, figure in (drawn := figures(rows)).items():
            for suffix in ("png", "svg"):
                save(figure, folder / f"{name}.{suffix}", suffix)
    return {name: f"{name}.png" for name in drawn}


def figures(rows: Rows) -> dict[str, Figure]:
    """Return name -> figure, of those that the rows have something for."""
    with style():
        drawn = {draw.__name__: draw(rows) for draw in (phases, barriers, slicing, grains, overlap, schedulers)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def phases(rows: Rows) -> Figure | None:
    """Draw runtime, speedup and efficiency against threads, of each phase and of the whole step."""
    kinds = {barrier: times for barrier in ("layer", "phase") if (times := rows.phase_times(barrier))}
    kinds = {barrier: times for barrier, times in kinds.items() if len(times["step_ms"]) > 1} or kinds
    lines: dict[str, Series] = {
        f"barrier {BARRIERS[barrier]}": {
            PHASES[column][0]: (own, PHASES[column][1], rows.sequential(column)) for column, own in times.items()
        }
        for barrier, times in kinds.items()
    }
    return _against_threads(lines, "Phases of a step against threads", rows) if lines else None


def barriers(rows: Rows) -> Figure | None:
    """Draw runtime, speedup and efficiency of a step against threads, for each barrier."""
    found = {barrier: spreads(rows.along("threads", barrier=barrier)) for barrier in BARRIERS}
    base = rows.sequential()
    series: Series = {BARRIERS[name]: (own, BARRIER_COLORS[name], base) for name, own in found.items() if own}
    return _against_threads({"a step": series}, "Where all threads wait", rows) if len(series) > 1 else None


def slicing(rows: Rows) -> Figure | None:
    """Draw the time of a step against the number of chunks, for chunks of all sequences, of some, of one."""
    series = rows.slicings()
    counts = sorted({number for times in series.values() for number in times})
    if sum(map(len, series.values())) < 2:
        return None
    figure = Figure(figsize=(8.5, 4.8))
    axes = figure.subplots()
    size = rows.all[0]["batch_size"]
    for (sequences, times), (_, color), marker in zip(series.items(), PHASES.values(), MARKERS):
        label = f"{sequences} of {size} sequences a chunk" + (": by tokens only" if sequences == size else "")
        _line(axes, times, color, label, marker)
    axes.margins(y=0.08)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(number) for number in counts])
    axes.set(xlabel="chunks of a batch", ylabel="step (ms)", ylim=(0, None))
    figure.legend(frameon=False, loc="outside lower center")
    return _titled(figure, "Slicing a batch", rows)


def grains(rows: Rows) -> Figure | None:
    """Draw the time of a step, and where the threads' time goes, against the size of a task."""
    found = rows.along("grain")
    if len(found) < 2:
        return None
    figure = Figure(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2)
    _bars(left, {f"{grain}\n{median(own, 'tasks'):,.0f} tasks": own for grain, own in found.items()})
    left.set(title="A step")
    _shares(right, found)
    return _titled(figure, "Size of a task", rows)


def overlap(rows: Rows) -> Figure | None:
    """Draw the overlap of layers, critical path beside the step, and the threads' time, for each barrier."""
    found = {barrier: own for barrier in BARRIERS if (own := rows.at(barrier=barrier))}
    if not found:
        return None
    figure = Figure(figsize=(13, 4.4))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.6, 1.3))
    highest = _bars(left, found, [BARRIER_COLORS[barrier] for barrier in found], "overlap", 100)
    left.set(title="Two or more layers at once", ylabel="share of the time (%)", ylim=(0, 1.1 * highest or 10))
    for column, offset, color, label in (
        ("step_ms", -0.2, "#9fb3c8", "step"),
        ("critical_path_ms", 0.2, "#30638e", "critical path"),
    ):
        medians = [median(own, column) for own in found.values()]
        bars = middle.bar([place + offset for place in range(len(found))], medians, 0.38, color=color, label=label)
        middle.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.2g}", fontsize=7)
    middle.set_xticks(range(len(found)), list(found))
    middle.set(title="Critical path", ylabel="ms a step")
    middle.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8)
    _shares(right, found)
    return _titled(figure, f"Overlap, {count(rows.reference['threads'], 'thread')}", rows)


def schedulers(rows: Rows) -> Figure | None:
    """Draw the time of a step under each scheduler."""
    found = {name.replace(" (", "\n("): own for name, own in rows.schedulers().items()}
    if len(found) < 2:
        return None
    figure = Figure(figsize=(max(8.5, 1.1 * len(found)), 4.2))
    _bars(figure.subplots(), found, ["#30638e"] * len(found))
    return _titled(figure, "Schedulers", rows)


def _against_threads(lines: Mapping[str, Series], title: str, rows: Rows) -> Figure:
    """Draw a row of panels for each of some series: runtime, and, where they have a base, speedup and efficiency."""
    threads = sorted({n for series in lines.values() for times, _, _ in series.values() for n in times})
    places = {n: place for place, n in enumerate(threads)}  # equally far apart: 1, 2 and 64 threads are all legible
    based = len(threads) > 1 and any(base for series in lines.values() for _, _, base in series.values())
    figure = Figure(figsize=(11 if based else 8.5, 1.2 + 3.2 * len(lines)))
    for axes, (name, series) in zip(figure.subplots(len(lines), 3 if based else 1, squeeze=False), lines.items()):
        for number, (label, (times, color, base)) in enumerate(series.items()):
            # Side by side, so that the quartiles of one series do not hide another's.
            shift = 0.012 * (len(places) - 1) * (number - (len(series) - 1) / 2)
            _line(axes[0], {places[n] + shift: own for n, own in times.items()}, color, label, MARKERS[number])
            found = {places[n]: (value, 100 * value / n) for n, value in speedups(times, base).items()}
            for own, values in zip(axes[1:], zip(*found.values())):
                own.plot([*found], values, MARKERS[number] + "-", color=color)
        axes[0].set(title=name, ylabel="time (ms)")
        if based:
            (ideal,) = axes[1].plot([*places.values()], [*places], ":", color="#888888")
            axes[2].axhline(100, ls=":", color="#888888")
            axes[1].set_ylabel("speedup")
            axes[2].set_ylabel("efficiency (%)")
        for own in axes:
            own.margins(x=0.12, y=0.08)
            own.set(xlabel="threads", ylim=(0, None))
            own.set_xticks([*places.values()], [*map(str, places)])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if based:
        handles, labels = [*handles, ideal], [*labels, "ideal"]
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=5, fontsize=9)
    return _titled(figure, title, rows, "speedup over the sequential run: 1 thread, no barrier that costs" * based)


def _line(axes: Any, times: Times, color: str, label: str, marker: str) -> None:
    """Draw medians with quartiles, and a small dot for every run."""
    ends = [[abs(own.quartiles[end] - own.median) for own in times.values()] for end in (0, 2)]
    medians = [own.median for own in times.values()]
    axes.errorbar([*times], medians, ends, fmt=marker + "-", color=color, label=label, capsize=3, ms=6)
    for place, own in times.items():
        axes.plot([place] * own.n, own.values, ".", color=color, ms=4, alpha=0.6)


def _bars(
    axes: Any,
    found: Mapping[str, list[Row]],
    colors: Sequence[str] = ("#00798c",) * 9,
    column: str = "step_ms",
    scale: float = 1,
) -> float:
    """Draw a bar to the median with its quartiles, and a dot for every run; return the largest value."""
    highest = 0.0
    for place, (own, color) in enumerate(zip(found.values(), colors)):
        times = spread([{column: scale * row[column]} for row in own], column)
        assert times is not None, "every run has a time and shares"
        low, middle, high = times.quartiles
        axes.bar(place, middle, 0.6, color=color, alpha=0.45)
        axes.errorbar(place, middle, ([middle - low], [high - middle]), color="black", capsize=5, lw=1)
        shift = [place + 0.12 * (number - (times.n - 1) / 2) for number in range(times.n)]
        axes.plot(shift, times.values, "o", color=color, mec="black", mew=0.4, ms=5)
        highest = max(highest, times.largest)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="step (ms)", ylim=(0, None))
    return highest


def _shares(axes: Any, found: Mapping[str, list[Row]]) -> None:
    """Draw stacked shares of the threads' time."""
    below = [0.0] * len(found)
    for column, (label, color) in SHARES.items():
        heights = [100 * median(own, column) for own in found.values()]
        axes.bar(range(len(found)), heights, 0.6, bottom=below, color=color, label=label)
        below = [low + height for low, height in zip(below, heights)]
    axes.set_xticks(range(len(found)), list(found))
    axes.set(title="Threads' time", ylabel="share (%)", ylim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=8)


def _titled(figure: Figure, title: str, rows: Rows, note: str = "") -> Figure:
    """Write above a figure what it shows, and of which model: it may stand without its report."""
    row, least, most = rows.all[0], min(rows.runs.values()), max(rows.runs.values())
    runs = count(most, "run") if least == most else f"{least} to {most} runs"
    model = f"{model_name(row)}, {row['batch_size']} x {row['sequence_length']} tokens a step; {runs} a point"
    figure.suptitle("\n".join(filter(None, (title, model, note))), fontsize=11)
    return figure
