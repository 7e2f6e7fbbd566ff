"""The report of a study, as Markdown: for each question a figure (PNG and SVG), its numbers, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daskgpt.profiling.plots import Figure, save, style
from daskgpt.profiling.records import Comparison, Spread, rounded
from daskgpt.profiling.study import BARRIERS, Row, Rows, count, median, model_name, speedups, spread, spreads
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
threads. After {warmup} steps of warmup, a run recorded every kernel call of the steps whose time it reports; other
steps, which were not recorded, show what recording costs. Figures show medians over runs, quartiles and every run. Two
settings are called different (in bold) where the quartiles of their runs do not overlap.

Speedup is the time of the sequential run (one thread, a barrier between phases) divided by the time in question, and
efficiency is speedup divided by threads. Phases have times of their own only where a barrier stands between them; the
update contains the sums of a weight gradient where it is in place. docs/metrics.md of daskgpt defines the rest.
"""
Times = Mapping[Any, Spread]
Series = dict[str, tuple[Times, str, Spread | None]]  # name -> times by threads, color, base of the speedup


@dataclass(frozen=True)
class Section:
    """One question of a study: its figure's name, conclusions, lines of tables, and what draws the figure."""

    title: str
    name: str = ""
    conclusions: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=lambda: ["Nothing was run for this question."])
    draw: Callable[[], Figure] | None = None


def write_report(folder: Path, rows: Sequence[Row], quick: bool = False) -> Path:
    """Draw the figures and write report.md beside them; return its path.

    quick   whether it is a study of --quick, which the report says on top
    """
    view = Rows(rows)
    found = sections(view)
    parts = [*_heading(view, quick), "## Conclusions\n"]
    # A quick study says nothing of speed.
    parts += [f"- {conclusion}" for section in found[-1 if quick else 0 :] for conclusion in section.conclusions]
    for section in found:
        parts.append(f"\n## {section.title}\n")
        if section.draw:
            _save(section.draw, folder / section.name)
            parts.append(f"![{section.title}]({section.name}.png)\n")
        parts += section.lines
    parts.append(METHOD.format(runs=len(view.all), warmup=view.all[0]["warmup"]))
    path = folder / "report.md"
    path.write_text("\n".join(parts))
    return path


def sections(view: Rows) -> list[Section]:
    """Return the sections of a report, in their order."""
    answered = (threads_section, barriers_section, slicing_section, grain_section, overlap_section, scheduler_section)
    return [section(view) for section in (*answered, results_section)]


def _save(draw: Callable[[], Figure], path: Path) -> None:
    with style():
        figure = draw()
        for kind in ("png", "svg"):
            save(figure, path.with_suffix(f".{kind}"), kind)


def threads_section(view: Rows) -> Section:
    """Report runtime, speedup and efficiency of forward, backward, update and total."""
    title, conclusions, lines = "Threads: forward, backward, update", [], []
    kinds = {barrier: times for barrier in ("layer", "phase") if (times := view.phase_times(barrier))}
    for barrier, times in kinds.items():
        total, base = times["step_ms"], view.sequential()
        table = [["threads", *(PHASES[column][0] for column in times), "speedup (total)", "efficiency (total)"]]
        table += [[str(n), *(_cell(own.get(n)) for own in times.values()), *_ratios(total, n, base)] for n in total]
        lines += [f"Barrier {BARRIERS[barrier]}, in ms (medians and quartiles of the runs):", "", *_table(table), ""]
        least, most = min(total), max(total)
        if most > least:
            found = Comparison.of(count(most, "thread"), total[most], count(least, "thread"), total[least])
            conclusions.append(f"With barrier {BARRIERS[barrier]}, {sentence(found)}")
    kinds = {barrier: times for barrier, times in kinds.items() if len(times["step_ms"]) > 1} or kinds
    panels: dict[str, Series] = {
        f"barrier {BARRIERS[barrier]}": {
            PHASES[column][0]: (own, PHASES[column][1], view.sequential(column)) for column, own in times.items()
        }
        for barrier, times in kinds.items()
    }

    def draw() -> Figure:
        return _against_threads(panels, "Phases of a step against threads", view)

    return Section(title, "phases", conclusions, lines, draw) if kinds else Section(title)


def barriers_section(view: Rows) -> Section:
    """Compare fork-join, tasks and barrier-free steps, each with all numbers of threads."""
    title = "Fork-join, tasks, barrier-free"
    found = {barrier: spreads(view.along("threads", barrier=barrier)) for barrier in BARRIERS}
    found = {barrier: times for barrier, times in found.items() if times}
    counts = sorted({threads for times in found.values() for threads in times})
    if len(found) < 2 and len(counts) < 2:
        return Section(title)
    base, most = view.sequential(), counts[-1]
    table = [["step (ms)", *(count(n, "thread") for n in counts), "speedup", "efficiency"]]
    for barrier, times in found.items():
        table.append([barrier, *(_cell(times.get(n)) for n in counts), *_ratios(times, max(times), base)])
    names = {f"barrier {label}": view.at(barrier=barrier, threads=most) for barrier, label in BARRIERS.items()}
    layer, phase, step, none = names
    names["tasks of one kernel (barrier step, grain kernel)"] = view.at(barrier="step", grain="kernel", threads=most)
    pairs = [(step, layer), (none, step), (none, layer), (step, phase), ([*names][-1], layer)]
    series: Series = {BARRIERS[name]: (own, BARRIER_COLORS[name], base) for name, own in found.items()}

    def draw() -> Figure:
        return _against_threads({"a step": series}, "Where all threads wait", view)

    return Section(title, "barriers", compare(names, pairs, f"On {count(most, 'thread')}, "), _table(table), draw)


def slicing_section(view: Rows) -> Section:
    """Compare slicing by tokens only with slicing by sequences too, by the number of chunks."""
    title, series, size = "Slicing: tokens only, or tokens and sequences", view.slicings(), view.all[0]["batch_size"]
    if sum(map(len, series.values())) < 2:
        return Section(title)
    counts = sorted({n for times in series.values() for n in times})
    table = [["sequences in a chunk: step (ms)", *(count(n, "chunk") for n in counts)]]
    table += [[f"{b} of {size}", *(_cell(times.get(n)) for n in counts)] for b, times in series.items()]
    conclusions = []
    for n in counts:
        others = {times[n].median: (b, times[n]) for b, times in series.items() if b != size and n in times}
        if others and n in series.get(size, {}):
            best, times = others[min(others)]
            by_tokens, by_both = (
                f"slicing by tokens only ({size} sequences a chunk)",
                f"slicing by sequences too ({best} a chunk)",
            )
            found = Comparison.of(by_tokens, series[size][n], by_both, times)
            conclusions.append(f"With {count(n, 'chunk')}, {sentence(found)}")
    least, sequences, n = min((own.median, b, n) for b, times in series.items() for n, own in times.items())
    conclusions.append(
        f"Of all slicings, {count(n, 'chunk')} of {sequences} of the {size} sequences had the least median: "
        f"{rounded(least)} ms a step."
    )

    def draw() -> Figure:
        figure = Figure(figsize=(8.5, 4.8))
        axes = figure.subplots()
        for (b, times), (_, color), marker in zip(series.items(), PHASES.values(), MARKERS):
            label = f"{b} of {size} sequences a chunk" + (": by tokens only" if b == size else "")
            _line(axes, times, color, label, marker)
        axes.margins(y=0.08)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(number) for number in counts])
        axes.set(xlabel="chunks of a batch", ylabel="step (ms)", ylim=(0, None))
        figure.legend(frameon=False, loc="outside lower center")
        return _titled(figure, "Slicing a batch", view)

    return Section(title, "slicing", conclusions, _table(table), draw)


def overlap_section(view: Rows) -> Section:
    """Report the overlap of layers and steps, and the critical path, for each barrier."""
    title, found = "Overlap and critical path", {b: rows for b in BARRIERS if (rows := view.at(barrier=b))}
    if not found:
        return Section(title)
    shares = ", ".join(f"{_share(rows, 'overlap')} (barrier {barrier})" for barrier, rows in found.items())
    conclusion = f"Two or more layers run at the same time {shares} of the time."
    return _compared(view, title, "overlap", found, [conclusion])


def grain_section(view: Rows) -> Section:
    """Compare sizes of a task."""
    title, found = "Size of a task", view.along("grain")
    if len(found) < 2:
        return Section(title)
    fast, *_, slow = sorted(found, key=lambda grain: median(found[grain], "step_ms"))
    names = {f"grain {grain}": found[grain] for grain in (fast, slow)}
    conclusions = compare(names, [tuple(names)], "Of the grains, fastest and slowest: ")
    return _compared(view, title, "grains", found, conclusions)


def scheduler_section(view: Rows) -> Section:
    """Compare the synchronous scheduler, threads, and a cluster of processes with both engines."""
    title, found = "Schedulers", view.schedulers()
    if len(found) < 2:
        return Section(title)
    best = min(found, key=lambda name: median(found[name], "step_ms"))
    pairs = [(best, name) for name in found if name.split(" (")[0] != best.split(" (")[0]]
    return _compared(view, title, "schedulers", found, compare(found, pairs, "Of the schedulers, "))


def _compared(view: Rows, title: str, name: str, found: Mapping[str, list[Row]], conclusions: list[str]) -> Section:
    """Compare settings by time, critical path, overlap, memory, and where the threads' time goes."""
    at_once = {"overlap": "layers at once", "steps_overlap": "steps at once"}
    times = ["tasks", "step (ms)", "critical path (ms)"]
    shares = [head for head, _, _ in SHARES.values()]
    table = [["", *times, *at_once.values(), *shares, "most memory (GB)"]]
    for label, rows in found.items():
        cells = [f"{median(rows, 'tasks'):,.0f}", _cell(spread(rows)), _cell(spread(rows, "critical_path_ms"))]
        cells += [_share(rows, column) for column in (*at_once, *SHARES)]
        table.append([label, *cells, f"{median(rows, 'peak_gb'):,.2f}"])

    def draw() -> Figure:
        figure = Figure(figsize=(max(13, 2.2 * len(found)), 4.4))
        left, middle, right = figure.subplots(1, 3)
        labels = [label.replace(" (", "\n(").replace(", ", "\n") for label in found]
        _bars(left, found)
        paths = [median(rows, "critical_path_ms") for rows in found.values()]
        left.plot(range(len(found)), paths, "_", color="#d1495b", ms=22, mew=2.5, label="critical path")
        left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=8)
        left.set(title="A step", ylabel="ms a step")
        highest = _bars(middle, found, "overlap", 100)
        middle.set(title="Two or more layers at once", ylabel="share of the time (%)", ylim=(0, 1.1 * highest or 10))
        _stacked_shares(right, found)
        for axes in (left, middle, right):
            axes.set_xticks(range(len(found)), labels, fontsize=8)
        return _titled(figure, title, view)

    return Section(title, name, conclusions, _table(table), draw)


def results_section(view: Rows) -> Section:
    """Report whether runs with the same chunks gave the same loss, to the last bit."""
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
    return Section("Same results", "", [conclusion], _table(table))


def compare(named: Mapping[str, Sequence[Row]], pairs: Iterable[tuple[str, ...]], begin: str) -> list[str]:
    """Return a sentence on the times of a step for each pair of names of which both were run."""
    times = {name: spread(rows) for name, rows in named.items()}
    found = [(one, times[one], other, times[other]) for one, other in pairs]
    return [begin + sentence(Comparison.of(a, x, b, y)) for a, x, b, y in found if x and y]


def sentence(found: Comparison) -> str:
    """Say which takes longer and by how much, or that no runs show it; bold only what several runs of both show."""
    fast, slow = (rounded(times.median) for times in found.times)
    ratio, against = rounded(found.ratio, 2), f"{slow} against {fast} ms"
    text = f"a step takes {ratio} times as long with {found.slower} as with {found.faster}"
    if found.clear:
        return f"**{text}** ({against})."
    if found.single:
        return f"in single runs {text} ({against})."
    return (
        f"the times of a step with {found.slower} and with {found.faster} differ by less than the runs of each do "
        f"({against}, a ratio of {ratio})."
    )


def _heading(view: Rows, quick: bool) -> list[str]:
    """Return title, warnings (a quick study, a busy machine, costly recording, single runs), and what was run."""
    row, warnings, runs = view.all[0], [], count(len(view.all), "run")
    if quick:
        warnings.append(
            "**A quick study:** a very small model and short runs. It shows what a report looks like and that "
            "everything works here, and says nothing of speed."
        )
    others = spread(view.all, "others_cores")
    if others and others.largest > machine.BUSY:
        warnings.append(
            f"**The machine was busy:** before {sum(value > machine.BUSY for value in others.values)} of {runs} other "
            f"programs kept more than {machine.BUSY:g} cores busy, {rounded(others.largest, 2)} at most. The times are "
            "of a share of the machine. Run the study again while nothing else runs."
        )
    cost = spread(view.all, "recording_cost")
    if cost and cost.median > RECORDING:
        warnings.append(
            f"**Recording slows the steps:** by {cost.median:.1%} in the median of the runs, {cost.largest:.1%} at "
            "most (compared with steps that were not recorded)."
        )
    if min(view.runs.values()) == 1:
        which = "every point was" if max(view.runs.values()) == 1 else "some points were"
        warnings.append(f"**Single runs:** {which} run once. Differences between single runs show nothing.")
    cpus, dates = sorted({str(own["cpu"]) for own in view.all}), sorted(str(own["date"]) for own in view.all)
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


def _ratios(times: Mapping[int, Spread], threads: int, base: Spread | None) -> list[str]:
    """Return speedup and efficiency over the sequential run; "" without it."""
    found = speedups(times, base).get(threads)
    return ["", ""] if found is None else [rounded(found, 2), f"{found / threads:.0%}"]


def _cell(found: Spread | None) -> str:
    return found.text("") if found else ""


def _share(rows: Sequence[Row], column: str) -> str:
    return f"{median(rows, column):.1%}"


def _table(lines: Iterable[Sequence[Any]]) -> list[str]:
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, "|" + " --- |" * (header.count(" | ") + 1), *rest]


# Parts of figures.


def _against_threads(panels: Mapping[str, Series], title: str, view: Rows) -> Figure:
    """Draw a row of panels for each of some series: runtime, and, where they have a base, speedup and efficiency."""
    threads = sorted({n for series in panels.values() for times, _, _ in series.values() for n in times})
    places = {n: place for place, n in enumerate(threads)}  # equally far apart: 1, 2 and 64 threads are all legible
    based = len(threads) > 1 and any(base for series in panels.values() for _, _, base in series.values())
    figure = Figure(figsize=(11 if based else 8.5, 1.2 + 3.2 * len(panels)))
    for axes, (name, series) in zip(figure.subplots(len(panels), 3 if based else 1, squeeze=False), panels.items()):
        for number, (label, (times, color, base)) in enumerate(series.items()):
            # Side by side, so that the quartiles of one series do not hide another's.
            shift = 0.012 * (len(places) - 1) * (number - (len(series) - 1) / 2)
            _line(axes[0], {places[n] + shift: own for n, own in times.items()}, color, label, MARKERS[number])
            found = {places[n]: (value, 100 * value / n) for n, value in speedups(times, base).items()}
            for own, values in zip(axes[1:], zip(*found.values())):
                own.plot([*found], values, MARKERS[number] + "-", color=color)
        axes[0].set(title=name, ylabel="time (ms)")
        if based:
            axes[1].plot([*places.values()], [*places], ":", color="#888888")
            axes[2].axhline(100, ls=":", color="#888888")
            axes[1].set_ylabel("speedup (dotted: ideal)")
            axes[2].set_ylabel("efficiency (%)")
        for own in axes:
            own.margins(x=0.12, y=0.08)
            own.set(xlabel="threads", ylim=(0, None))
            own.set_xticks([*places.values()], [*map(str, places)])
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside lower center", ncols=5, fontsize=9)
    return _titled(figure, title, view, "speedup over the sequential run: 1 thread, no barrier that costs" * based)


def _line(axes: Any, times: Times, color: str, label: str, marker: str) -> None:
    """Draw medians with quartiles, and a small dot for every run."""
    ends = [[abs(own.quartiles[end] - own.median) for own in times.values()] for end in (0, 2)]
    medians = [own.median for own in times.values()]
    axes.errorbar([*times], medians, ends, fmt=marker + "-", color=color, label=label, capsize=3, ms=6)
    for place, own in times.items():
        axes.plot([place] * own.n, own.values, ".", color=color, ms=4, alpha=0.6)


def _bars(axes: Any, found: Mapping[str, list[Row]], column: str = "step_ms", scale: float = 1) -> float:
    """Draw a bar to the median with its quartiles, and a dot for every run; return the largest value."""
    highest = 0.0
    for place, (name, own) in enumerate(found.items()):
        times, color = Spread.of(scale * row[column] for row in own), BARRIER_COLORS.get(name, "#30638e")
        low, middle, high = times.quartiles
        axes.bar(place, middle, 0.6, color=color, alpha=0.45)
        axes.errorbar(place, middle, ([middle - low], [high - middle]), color="black", capsize=5, lw=1)
        shift = [place + 0.12 * (number - (times.n - 1) / 2) for number in range(times.n)]
        axes.plot(shift, times.values, "o", color=color, mec="black", mew=0.4, ms=5)
        highest = max(highest, times.largest)
    axes.set_ylim(0, None)
    return highest


def _stacked_shares(axes: Any, found: Mapping[str, list[Row]]) -> None:
    """Draw stacked shares of the threads' time."""
    below = [0.0] * len(found)
    for column, (_, label, color) in SHARES.items():
        heights = [100 * median(own, column) for own in found.values()]
        axes.bar(range(len(found)), heights, 0.6, bottom=below, color=color, label=label)
        below = [low + height for low, height in zip(below, heights)]
    axes.set(title="Threads' time", ylabel="share (%)", ylim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False, fontsize=8)


def _titled(figure: Figure, title: str, view: Rows, note: str = "") -> Figure:
    """Write above a figure what it shows, and of which model: it may stand without its report."""
    row, least, most = view.all[0], min(view.runs.values()), max(view.runs.values())
    runs = count(most, "run") if least == most else f"{least} to {most} runs"
    model = f"{model_name(row)}, {row['batch_size']} x {row['sequence_length']} tokens a step; {runs} a point"
    figure.suptitle("\n".join(filter(None, (title, model, note))), fontsize=11)
    return figure
