"""The report of a study, as Markdown: for each question a figure (PNG and SVG), tables, and conclusions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from daskgpt.profiling.plots import Figure, save, style
from daskgpt.profiling.records import Spread, rounded
from daskgpt.profiling.study import BARRIERS, ORDER, Row, Rows, count, median, model_name, speedups, spread, spreads
from daskgpt.schedulers import machine

RECORDING = 0.03  # of a step, above which a report says what recording costs
BARRIER_COLORS = {"layer": "#d1495b", "phase": "#edae49", "step": "#00798c", "none": "#5e3c99"}
PHASES = {  # column -> name and color
    "forward_ms": ("forward", "#4269d0"),
    "backward_ms": ("backward", "#ff725c"),
    "update_ms": ("update", "#3ca951"),
    "step_ms": ("total", "#303030"),
}
SHARES = {  # column -> name in a table, name in a figure, color
    "kernel_share": ("kernels", "kernels", "#00798c"),
    "inside_share": ("between kernels", "between a task's kernels", "#a463f2"),
    "scheduling_share": ("scheduling", "scheduling: a task was ready", "#edae49"),
    "waiting_share": ("waiting", "waiting: no task was ready", "#d9d9d9"),
}
MARKERS = "o^sD"
METHOD = """
## Runs

[results.csv](results.csv) has a row for each run ({runs}), which was a process of its own on as many cores as it had
threads. After {warmup} steps of warmup, a run recorded every kernel call of the steps whose time it reports. Figures
show medians over runs, quartiles and every run; bold are differences of which the quartiles do not overlap. Phases have
times of their own only where a barrier stands between them. docs/metrics.md of daskgpt defines all numbers.
"""
Times = Mapping[Any, Spread]


class Curve(NamedTuple):
    """Times by a number (of threads, chunks), predicted ones as well, each with its base of the speedup."""

    times: Times
    color: str
    base: Spread | None = None
    predicted: Times = MappingProxyType({})
    predicted_base: Spread | None = None


Series = dict[str, Curve]


class Section(NamedTuple):
    """The answer to one question of a study: conclusions, lines of tables, and a function that draws the figure."""

    conclusions: Sequence[str] = ()
    lines: Sequence[str] = ("Nothing was run for this question.",)
    draw: Callable[[], Figure] | None = None


def write_report(folder: Path, rows: Sequence[Row], quick: bool = False) -> None:
    """Draw the figures and write report.md beside them.

    quick   whether this is a study of --quick, which the report states at the top
    """
    view = Rows(rows)
    found = {name: answer(view) for name, (_, answer) in SECTIONS.items()}
    # The times of a quick study mean nothing.
    shown = found["results"].conclusions if quick else [each for own in found.values() for each in own.conclusions]
    parts = [*_heading(view, quick), "## Conclusions\n", *(f"- {conclusion}" for conclusion in shown)]
    for name, section in found.items():
        title, _ = SECTIONS[name]
        parts.append(f"\n## {title}\n")
        if section.draw:
            _save(section.draw, f"{title}\n{_described(view)}", folder / name)
            parts.append(f"![{title}]({name}.png)\n")
        parts += section.lines
    parts.append(METHOD.format(runs=len(view.all), warmup=view.all[0]["warmup"]))
    (folder / "report.md").write_text("\n".join(parts), encoding="utf-8")


def _save(draw: Callable[[], Figure], title: str, path: Path) -> None:
    """Draw a figure with a title that names the model, since a figure may be shown without its report."""
    with style():
        figure = draw()
        figure.suptitle(title, fontsize=11)
        for kind in ("png", "svg"):
            save(figure, path.with_suffix(f".{kind}"), kind)


def _described(view: Rows) -> str:
    row, least, most = view.all[0], min(view.runs.values()), max(view.runs.values())
    runs = count(most, "run") if least == most else f"{least} to {most} runs"
    return f"{model_name(row)}, {row['batch_size']} x {row['sequence_length']} tokens a step; {runs} a point"


def threads_section(view: Rows) -> Section:
    """Report runtime, speedup and efficiency of forward, backward, update and total."""
    conclusions, panels = [], dict[str, Series]()
    for barrier in ("layer", "phase"):
        found, name = view.along("threads", barrier=barrier), f"barrier {BARRIERS[barrier]}"
        series: Series = {
            phase: Curve(spreads(found, column), color, view.sequential(column))
            for column, (phase, color) in PHASES.items()
        }
        if not all(curve.times for curve in series.values()):  # phases were not apart
            continue
        panels[name], total = series, series["total"].times
        least, most = min(total), max(total)
        if most > least:
            text = sentence(count(most, "thread"), total[most], count(least, "thread"), total[least])
            conclusions.append(f"With {name}, {text}")
    return _numbered(panels, "thread", conclusions, view.base) if panels else Section()


def barriers_section(view: Rows) -> Section:
    """Compare fork-join, tasks and barrier-free steps, for each number of threads."""
    found = {barrier: spreads(view.along("threads", barrier=barrier)) for barrier in BARRIERS}
    found = {barrier: times for barrier, times in found.items() if times}
    counts = sorted({threads for times in found.values() for threads in times})
    if len(found) < 2 and len(counts) < 2:
        return Section()
    most, base = counts[-1], view.sequential()
    names = {f"barrier {label}": view.at(barrier=barrier, threads=most) for barrier, label in BARRIERS.items()}
    layer, phase, step, none = names
    names["tasks of one kernel (barrier step, grain kernel)"] = view.at(barrier="step", grain="kernel", threads=most)
    pairs = [(step, layer), (none, step), (none, layer), (step, phase), ([*names][-1], layer)]
    conclusions = compare(names, pairs, f"On {count(most, 'thread')}, ")
    guesses = {barrier: spreads(view.along("threads", barrier=barrier), "predicted_ms") for barrier in found}
    guess = view.sequential("predicted_ms")
    series: Series = {
        BARRIERS[name]: Curve(times, BARRIER_COLORS[name], base, guesses[name], guess) for name, times in found.items()
    }
    section = _numbered({"a step": series}, "thread", conclusions, view.base)
    errors = [
        abs(guesses[name][threads].median / own.median - 1)
        for name, times in found.items()
        for threads, own in times.items()
        if threads in guesses[name]
    ]
    if not errors:
        return section
    note = f"Thin lines were predicted before the runs; half of the times to within {statistics.median(errors):.0%}, "
    return section._replace(lines=[*section.lines, f"{note}all to within {max(errors):.0%}.", ""])


def slicing_section(view: Rows) -> Section:
    """Compare slicing by tokens only with slicing by tokens and sequences, for each number of chunks."""
    size, length = view.all[0]["batch_size"], view.all[0]["sequence_length"]
    times_of = dict[int, dict[int, Spread]]()  # sequences in a chunk -> number of chunks -> times of a step
    for sequences in filter(None, reversed(view.values("batch_chunk"))):  # 0 is auto
        times = spreads(view.along("sequence_chunk", batch_chunk=sequences))
        counted = {size // sequences * (length // tokens): times[tokens] for tokens in reversed(times) if tokens}
        times_of |= {sequences: counted} if counted else {}
    if sum(map(len, times_of.values())) < 2:
        return Section()
    conclusions, by_tokens = [], f"slicing by tokens only ({size} sequences a chunk)"
    for n, alone in sorted(times_of.get(size, {}).items()):
        if others := [(times[n].median, b) for b, times in times_of.items() if b != size and n in times]:
            _, best = min(others)
            text = sentence(by_tokens, alone, f"slicing by sequences too ({best} a chunk)", times_of[best][n])
            conclusions.append(f"With {count(n, 'chunk')}, {text}")
    least, sequences, n = min((own.median, b, n) for b, times in times_of.items() for n, own in times.items())
    conclusions.append(
        f"Of all slicings, {count(n, 'chunk')} of {sequences} of the {size} sequences had the least median: "
        f"{rounded(least)} ms a step."
    )
    series: Series = {
        f"{b} of {size} sequences a chunk" + ": by tokens only" * (b == size): Curve(times, color)
        for (b, times), (_, color) in zip(times_of.items(), PHASES.values())
    }
    return _numbered({"a step": series}, "chunk", conclusions)


def _numbered(panels: Mapping[str, Series], what: str, conclusions: list[str], base: str = "") -> Section:
    """Show times by the number of threads or chunks; with a base, also speedup and efficiency of the largest number.

    panels   by title; each is a table and a row of the figure
    base     the barrier of the sequential run
    """
    lines = []
    for name, series in panels.items():
        numbers, rows = sorted({n for curve in series.values() for n in curve.times}), []
        for label, curve in series.items():
            rows.append([label, *(_cell(curve.times.get(n)) for n in numbers)])
            if curve.base:
                most, speedup = max(speedups(curve.times, curve.base).items())
                rows[-1] += [rounded(speedup, 2), f"{speedup / most:.0%}"]
        head = [
            f"{name} (ms)",
            *(count(n, what) for n in numbers),
            f"speedup on {count(numbers[-1], what)}",
            "efficiency",
        ]
        lines += [*_table([head[: max(map(len, rows))], *rows]), ""]
    if base:
        lines += [f"Speedups are over the sequential run: one thread, barrier {base}.", ""]
    return Section(conclusions, lines, partial(_against, panels, f"{what}s"))


def grain_section(view: Rows) -> Section:
    """Compare sizes of a task."""
    found = view.along("grain")
    if len(found) < 2:
        return Section()
    fast, *_, slow = sorted(found, key=lambda grain: median(found[grain], "step_ms"))
    names = {f"grain {grain}": found[grain] for grain in (fast, slow)}
    return _compared(found, compare(names, [tuple(names)], "Of the grains, fastest and slowest: "))


def overlap_section(view: Rows) -> Section:
    """Report the overlap of layers and steps, and the critical path, for each barrier."""
    found = {barrier: rows for barrier in BARRIERS if (rows := view.at(barrier=barrier))}
    if not found:
        return Section()
    shares = ", ".join(f"{_share(rows, 'overlap')} (barrier {barrier})" for barrier, rows in found.items())
    return _compared(found, [f"Two or more layers run at the same time {shares} of the time."])


def scheduler_section(view: Rows) -> Section:
    """Compare the synchronous scheduler, threads, and a cluster of processes with both engines."""
    found = dict[str, list[Row]]()
    for scheduler, engine in product(view.values("scheduler"), ORDER["engine"]):
        for threads, rows in view.along("threads", scheduler=scheduler, engine=engine).items():
            own = count(threads, "thread" if scheduler in ("sync", "threads") else "worker")
            found[f"{scheduler}{', engine tasks' * (engine == 'tasks')} ({own})"] = rows
    if len(found) < 2:
        return Section()
    best = min(found, key=lambda name: median(found[name], "step_ms"))
    pairs = [(best, name) for name in found if name.split(" (")[0] != best.split(" (")[0]]
    return _compared(found, compare(found, pairs, "Of the schedulers, "))


def _compared(found: Mapping[str, list[Row]], conclusions: list[str]) -> Section:
    """Compare settings by time, critical path, overlap, memory, and shares of the threads' time."""
    heads = {"overlap": "layers at once", "steps_overlap": "steps at once"}
    heads |= {column: head for column, (head, _, _) in SHARES.items()}
    table = [["", "tasks", "step (ms)", "critical path (ms)", *heads.values(), "most memory (GB)"]]
    for label, rows in found.items():
        cells = [f"{median(rows, 'tasks'):,.0f}", _cell(spread(rows)), _cell(spread(rows, "critical_path_ms"))]
        cells += [_share(rows, column) for column in heads]
        table.append([label, *cells, f"{median(rows, 'peak_gb'):,.2f}"])
    return Section(conclusions, _table(table), partial(_beside, found))


def results_section(view: Rows) -> Section:
    """Report whether runs with the same chunks gave the same loss, bit for bit."""
    losses: dict[str, list[str]] = {}
    for row in view.all:
        losses.setdefault(f"{row['batch_chunk_used']} x {row['sequence_chunk_used']}", []).append(str(row["loss"]))
    table = [["chunk", f"loss after at least {view.all[0]['warmup'] + 1} steps", "runs that share it"]]
    for chunk, own in losses.items():
        table.append([chunk, ", ".join(sorted(set(own))), str(len(own)) if len(set(own)) == 1 else "differ"])
    different = [chunk for chunk, own in losses.items() if len(set(own)) > 1]
    conclusion = (
        f"**Runs with the same chunks gave different losses: {', '.join(different)}.**"
        if different
        else f"Runs with the same chunks gave the same loss, bit for bit, whatever the other settings "
        f"({count(len(view.all), 'run')}, {count(len(losses), 'way')} to cut a batch)."
    )
    return Section([conclusion], _table(table))


# Name of a figure -> title of its section, and the function that answers the question.
SECTIONS: dict[str, tuple[str, Callable[[Rows], Section]]] = {
    "phases": ("Threads: forward, backward, update", threads_section),
    "barriers": ("Fork-join, tasks, barrier-free", barriers_section),
    "slicing": ("Slicing: tokens only, or tokens and sequences", slicing_section),
    "grains": ("Size of a task", grain_section),
    "overlap": ("Overlap and critical path", overlap_section),
    "schedulers": ("Schedulers", scheduler_section),
    "results": ("Same results", results_section),
}


def compare(named: Mapping[str, Sequence[Row]], pairs: Iterable[tuple[str, ...]], begin: str) -> list[str]:
    """Return a sentence on the times of a step for each pair of names that were both run."""
    times = spreads(named)
    return [begin + sentence(a, times[a], b, times[b]) for a, b in pairs if a in times and b in times]


def sentence(name: str, times: Spread, other: str, other_times: Spread) -> str:
    """Return a sentence on which of two takes longer, in bold if their quartiles do not overlap."""
    by_time = sorted([(name, times), (other, other_times)], key=lambda own: own[1].median)
    (faster, fast), (slower, slow) = by_time
    ratio, against = rounded(slow.median / fast.median, 2), f"{rounded(slow.median)} against {rounded(fast.median)} ms"
    text = f"a step takes {ratio} times as long with {slower} as with {faster}"
    if fast.below(slow):
        return f"**{text}** ({against})."
    if min(fast.n, slow.n) == 1:
        return f"in single runs {text} ({against})."
    return (
        f"the times of a step with {slower} and with {faster} differ by less than the runs of each do "
        f"({against}, a ratio of {ratio})."
    )


def _heading(view: Rows, quick: bool) -> list[str]:
    """Return title, warnings (quick study, busy machine, costly recording, single runs), and settings of the runs."""
    row, warnings, runs = view.all[0], [], count(len(view.all), "run")
    others, cost = (Spread.of(own[column] for own in view.all) for column in ("others_cores", "recording_cost"))
    if quick:
        warnings.append(
            "**A quick study:** a very small model and short runs. It shows what a report looks like and that "
            "everything works here, and says nothing of speed."
        )
    if max(others.values) > machine.BUSY:
        warnings.append(
            f"**The machine was busy:** before {sum(value > machine.BUSY for value in others.values)} of {runs} other "
            f"programs kept more than {machine.BUSY:g} cores busy, {rounded(max(others.values), 2)} at most. The times "
            "are of a share of the machine. Run the study again while nothing else runs."
        )
    if cost.median > RECORDING:
        warnings.append(
            f"**Recording slows the steps:** by {cost.median:.1%} in the median of the runs, {max(cost.values):.1%} at "
            "most (compared with steps that were not recorded)."
        )
    if min(view.runs.values()) == 1:
        which = "every point was" if max(view.runs.values()) == 1 else "some points were"
        warnings.append(f"**Single runs:** {which} run once. Differences between single runs show nothing.")
    cpus, dates = sorted({own["cpu"] for own in view.all}), sorted(own["date"] for own in view.all)
    versions = ", ".join(f"{package} {row[package]}" for package in ("daskgpt", "python", "numpy", "numba", "dask"))
    shared = ", ".join(f"{name.replace('_', ' ')} {value or 'auto'}" for name, value in view.reference.items())
    return [
        f"# Study of {model_name(row)}, {row['batch_size']} x {row['sequence_length']} tokens a step\n",
        *(["> " + "\n>\n> ".join(warnings) + "\n"] if warnings else []),
        f"{count(row['blocks'], 'block')}, {count(row['heads'], 'head')}, {row['channels']} channels, vocabulary "
        f"{row['vocabulary']}, precision {row['precision']}. {runs} from {dates[0]} to {dates[-1]} on "
        f"{', '.join(cpus)}, {row['cores']} cores, {row['machine']}; {versions}.\n",
        f"Unless a figure varies it, a run has: {shared}.\n",
    ]


# Cells of tables.


def _cell(found: Spread | None) -> str:
    return found.text("") if found else ""


def _share(rows: Sequence[Row], column: str) -> str:
    return f"{median(rows, column):.1%}"


def _table(lines: Iterable[Sequence[Any]]) -> list[str]:
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, "|" + " --- |" * (header.count(" | ") + 1), *rest]


# Parts of figures.


def _against(panels: Mapping[str, Series], what: str) -> Figure:
    """Draw a row for each panel: times against the number of threads or chunks; with a base, speedup and efficiency."""
    curves = [curve for series in panels.values() for curve in series.values()]
    numbers = sorted({n for curve in curves for n in curve.times})
    places = {n: place for place, n in enumerate(numbers)}  # equally far apart: 1, 2 and 64 threads are all legible
    based = len(numbers) > 1 and any(curve.base for curve in curves)
    figure = Figure(figsize=(11 if based else 8.5, 1.2 + 3.2 * len(panels)))
    for axes, (name, series) in zip(figure.subplots(len(panels), 3 if based else 1, squeeze=False), panels.items()):
        for number, (label, curve) in enumerate(series.items()):
            # Side by side, so that the quartiles of one series do not hide another's.
            shift = 0.012 * (len(places) - 1) * (number - (len(series) - 1) / 2)
            color, marker = curve.color, MARKERS[number]
            _line(axes[0], {places[n] + shift: own for n, own in curve.times.items()}, color, label, marker)
            thin = {"color": color, "lw": 0.7}
            guesses = {places[n]: own.median for n, own in curve.predicted.items()}
            axes[0].plot([*guesses], [*guesses.values()], **thin)
            _over_base(axes[1:], places, curve.times, curve.base, marker=marker, color=color)
            _over_base(axes[1:], places, curve.predicted, curve.predicted_base, **thin)
        axes[0].set(title=name, ylabel="time (ms)")
        if based:
            axes[1].plot([*places.values()], numbers, ":", color="#888888")
            axes[2].axhline(100, ls=":", color="#888888")
            axes[1].set(title="over the sequential run (1 thread)", ylabel="speedup (dotted: ideal)")
            axes[2].set_ylabel("efficiency (%)")
        for own in axes:
            own.margins(x=0.12, y=0.08)
            own.set(xlabel=what, ylim=(0, None))
            own.set_xticks([*places.values()], [*map(str, numbers)])
    if any(curve.predicted for curve in curves):
        figure.axes[0].plot([], [], color="#303030", lw=0.7, label="predicted")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _over_base(both: Sequence[Any], places: Mapping[int, int], times: Times, base: Spread | None, **line: Any) -> None:
    """Draw speedup and efficiency, where there are such figures and a base."""
    found = {places[n]: (value, 100 * value / n) for n, value in speedups(times, base).items()}
    for axes, values in zip(both, zip(*found.values())):
        axes.plot([*found], values, **line)


def _line(axes: Any, times: Times, color: str, label: str, marker: str) -> None:
    """Draw medians with quartiles, and a small dot for every run."""
    ends = [[abs(own.quartiles[end] - own.median) for own in times.values()] for end in (0, 2)]
    medians = [own.median for own in times.values()]
    axes.errorbar([*times], medians, ends, fmt=marker + "-", color=color, label=label, capsize=3, ms=6)
    for place, own in times.items():
        axes.plot([place] * own.n, own.values, ".", color=color, ms=4, alpha=0.6)


def _beside(found: Mapping[str, list[Row]]) -> Figure:
    """Draw bars of settings: the time of a step, the overlap of layers, and shares of the threads' time."""
    figure = Figure(figsize=(max(13, 2.2 * len(found)), 4.4))
    left, middle, right = figure.subplots(1, 3)
    below_axes = {"frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "fontsize": 8}
    _bars(left, found)
    paths = [median(rows, "critical_path_ms") for rows in found.values()]
    left.plot(range(len(found)), paths, "_", color="#d1495b", ms=22, mew=2.5, label="critical path")
    left.legend(**below_axes)
    left.set(title="A step", ylabel="ms a step", ylim=(0, None))
    highest = _bars(middle, found, "overlap", 100)
    middle.set(title="Two or more layers at once", ylabel="share of the time (%)", ylim=(0, 1.1 * highest or 10))
    below = [0.0] * len(found)
    for column, (_, label, color) in SHARES.items():
        heights = [100 * median(own, column) for own in found.values()]
        right.bar(range(len(found)), heights, 0.6, bottom=below, color=color, label=label)
        below = [low + height for low, height in zip(below, heights)]
    right.set(title="Threads' time", ylabel="share (%)", ylim=(0, 100))
    right.legend(ncols=2, **below_axes)
    labels = [label.replace(" (", "\n(").replace(", ", "\n") for label in found]
    for axes in (left, middle, right):
        axes.set_xticks(range(len(found)), labels, fontsize=8)
    return figure


def _bars(axes: Any, found: Mapping[str, list[Row]], column: str = "step_ms", scale: float = 1) -> float:
    """Draw a bar of each median with quartiles, and a dot for every run; return the largest value."""
    times = [Spread.of(scale * row[column] for row in rows) for rows in found.values()]
    colors = [BARRIER_COLORS.get(name, "#30638e") for name in found]
    low, middle, high = np.array([own.quartiles for own in times]).T
    axes.bar(range(len(times)), middle, 0.6, yerr=(middle - low, high - middle), color=colors, alpha=0.45, capsize=5)
    for place, (own, color) in enumerate(zip(times, colors)):
        shift = [place + 0.12 * (number - (own.n - 1) / 2) for number in range(own.n)]
        axes.plot(shift, own.values, "o", color=color, mec="black", mew=0.4, ms=5)
    return max(max(own.values) for own in times)
