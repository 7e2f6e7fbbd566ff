"""The report of a study, as Markdown: its figures, their numbers, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daskgpt.profiling import machine
from daskgpt.profiling.statistics import Comparison, Spread, rounded
from daskgpt.profiling.study.figures import PHASES, draw_all
from daskgpt.profiling.study.grid import BARRIERS
from daskgpt.profiling.study.table import Row, Rows, count, median, model_name, speedups, spread, spreads

RECORDING = 0.03  # of a step, above which a report says what recording costs
NONE = "Nothing was run for this question."
Section = tuple[str, list[str], list[str]]  # name of its figure, conclusions, lines of its tables


def write_report(folder: Path, rows: Sequence[Row], quick: bool = False) -> Path:
    """Draw the figures and write report.md beside them; return its path.

    quick   whether it is a study of --quick, which the report says on top
    """
    view = Rows(rows)
    drawn = draw_all(folder, view)
    sections = {
        "Threads: forward, backward, update": threads_section(view),
        "Fork-join, tasks, barrier-free": barriers_section(view),
        "Slicing: tokens only, or tokens and sequences": slicing_section(view),
        "Size of a task": grain_section(view),
        "Overlap and critical path": overlap_section(view),
        "Schedulers": scheduler_section(view),
        "Same results": results_section(view),
    }
    shown = list(sections.values())[-1 if quick else 0 :]  # a quick study says nothing of speed
    parts = [*_heading(view, quick), "## Conclusions\n"]
    parts += [f"- {conclusion}" for _, conclusions, _ in shown for conclusion in conclusions]
    for title, (figure, _, lines) in sections.items():
        image = [f"![{title}]({drawn[figure]})\n"] if figure in drawn else []
        parts += [f"\n## {title}\n", *image, *(lines or [NONE])]
    parts.append(f"\n## Runs\n\n{METHOD.format(runs=len(view.all), warmup=view.all[0]['warmup'])}")
    path = folder / "report.md"
    path.write_text("\n".join(parts))
    return path


def threads_section(view: Rows) -> Section:
    """Report runtime, speedup and efficiency of forward, backward, update and total."""
    conclusions, lines = [], []
    base = view.sequential()
    for barrier in ("layer", "phase"):
        if not (times := view.phase_times(barrier)):
            continue
        total = times["step_ms"]
        table = [["threads", *(PHASES[column][0] for column in times), "speedup (total)", "efficiency (total)"]]
        table += [[str(n), *(_cell(own.get(n)) for own in times.values()), *_ratios(total, n, base)] for n in total]
        lines += [f"Barrier {BARRIERS[barrier]}, in ms (medians and quartiles of the runs):", "", *_table(table), ""]
        least, most = min(total), max(total)
        if most > least:
            found = Comparison.of(count(most, "thread"), total[most], count(least, "thread"), total[least])
            conclusions.append(f"With barrier {BARRIERS[barrier]}, {sentence(found)}")
    return "phases", conclusions, lines


def barriers_section(view: Rows) -> Section:
    """Compare fork-join, tasks and barrier-free steps."""
    found = {barrier: spreads(view.along("threads", barrier=barrier)) for barrier in BARRIERS}
    found = {barrier: times for barrier, times in found.items() if times}
    counts = sorted({threads for times in found.values() for threads in times})
    if len(found) < 2:
        return "barriers", [], []
    table, base, most = (
        [["step (ms)", *(count(n, "thread") for n in counts), "speedup", "efficiency"]],
        view.sequential(),
        counts[-1],
    )
    for barrier, times in found.items():
        table.append([barrier, *(_cell(times.get(n)) for n in counts), *_ratios(times, max(times), base)])
    names = {f"barrier {label}": view.at(barrier=barrier, threads=most) for barrier, label in BARRIERS.items()}
    layer, phase, step, none = names
    names["tasks of one kernel (barrier step, grain kernel)"] = view.at(barrier="step", grain="kernel", threads=most)
    pairs = [(step, layer), (none, step), (none, layer), (step, phase), ([*names][-1], layer)]
    conclusions = compare(names, pairs, f"On {count(most, 'thread')}, ")
    return "barriers", conclusions, _table(table)


def slicing_section(view: Rows) -> Section:
    """Compare slicing by tokens only with slicing by sequences too."""
    series, size = view.slicings(), view.all[0]["batch_size"]
    if sum(map(len, series.values())) < 2:
        return "slicing", [], []
    counts = sorted({n for times in series.values() for n in times})
    table = [["sequences in a chunk: step (ms)", *(count(n, "chunk") for n in counts)]]
    table += [[f"{b} of {size}", *(_cell(times.get(n)) for n in counts)] for b, times in series.items()]
    conclusions = []
    for n in counts:
        others = {times[n].median: (b, times[n]) for b, times in series.items() if b != size and n in times}
        if others and n in series.get(size, {}):
            best, times = others[min(others)]
            name, other = (
                f"slicing by tokens only ({size} sequences a chunk)",
                f"slicing by sequences too ({best} a chunk)",
            )
            conclusions.append(
                f"With {count(n, 'chunk')}, {sentence(Comparison.of(name, series[size][n], other, times))}"
            )
    least, sequences, n = min((own.median, b, n) for b, times in series.items() for n, own in times.items())
    conclusions.append(
        f"Of all slicings, {count(n, 'chunk')} of {sequences} of the {size} sequences had the least median: "
        f"{rounded(least)} ms a step."
    )
    return "slicing", conclusions, _table(table)


def grain_section(view: Rows) -> Section:
    """Compare sizes of a task."""
    found = {f"grain {grain}": rows for grain, rows in view.along("grain").items()}
    if len(found) < 2:
        return "grains", [], []
    shares = ("kernel_share", "inside_share", "scheduling_share", "waiting_share")
    table = [["grain", "tasks a step", "step (ms)", "kernels", "between kernels", "scheduling", "waiting"]]
    for name, rows in found.items():
        tasks = f"{median(rows, 'tasks'):,.0f}"
        table.append([name.split()[1], tasks, _cell(spread(rows)), *(_share(rows, share) for share in shares)])
    fast, *_, slow = sorted(found, key=lambda name: median(found[name], "step_ms"))
    return "grains", compare(found, [(fast, slow)], "Of the grains, fastest and slowest: "), _table(table)


def overlap_section(view: Rows) -> Section:
    """Report the overlap of layers and steps, and the critical path."""
    found = {barrier: rows for barrier in BARRIERS if (rows := view.at(barrier=barrier))}
    if not found:
        return "overlap", [], []
    header = ["barrier", "layers at once", "steps at once", "step (ms)", "critical path (ms)", "share of it"]
    table = [[*header, "kernels", "scheduling", "waiting"]]
    for barrier, rows in found.items():
        step, path = spread(rows), spread(rows, "critical_path_ms")
        part = median(rows, "critical_path_ms") / median(rows, "step_ms")
        shares = [_share(rows, f"{name}_share") for name in ("kernel", "scheduling", "waiting")]
        at_once = [_share(rows, "overlap"), _share(rows, "steps_overlap")]
        table.append([barrier, *at_once, _cell(step), _cell(path), f"{part:.0%}", *shares])
    told = ", ".join(f"{_share(rows, 'overlap')} (barrier {barrier})" for barrier, rows in found.items())
    return "overlap", [f"Two or more layers run at the same time {told} of the time."], _table(table)


def scheduler_section(view: Rows) -> Section:
    """Compare the synchronous scheduler, threads, and a cluster of processes."""
    found = view.schedulers()
    if len(found) < 2:
        return "schedulers", [], []
    table = [["scheduler", "step (ms)", "most memory (GB)"]]
    table += [[name, _cell(spread(rows)), f"{median(rows, 'peak_gb'):,.2f}"] for name, rows in found.items()]
    best = min(found, key=lambda name: median(found[name], "step_ms"))
    pairs = [(best, name) for name in found if name.split(" (")[0] != best.split(" (")[0]]
    return "schedulers", compare(found, pairs, "Of the schedulers, "), _table(table)


def results_section(view: Rows) -> Section:
    """Report whether runs with the same chunks gave the same loss, to the last bit."""
    losses: dict[str, list[str]] = {}
    for row in view.all:
        losses.setdefault(f"{row['batch_chunk']} x {row['sequence_chunk']}", []).append(str(row["loss"]))
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
    return "", [conclusion], _table(table)


def compare(named: Mapping[str, Sequence[Row]], pairs: Iterable[tuple[str, str]], begin: str) -> list[str]:
    """Return a sentence on the times of a step for each pair of names of which both were run."""
    times = {name: spread(rows) for name, rows in named.items()}
    found = [(one, times[one], other, times[other]) for one, other in pairs]
    return [begin + sentence(Comparison.of(a, x, b, y)) for a, x, b, y in found if x and y]


def sentence(found: Comparison) -> str:
    """Say which takes longer, by how much, or that it cannot be told; bold only what several runs of both show."""
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
    return [
        f"# Study of {model_name(row)}, {row['batch_size']} x {row['sequence_length']} tokens a step\n",
        *(["> " + "\n>\n> ".join(warnings) + "\n"] if warnings else []),
        f"{count(row['blocks'], 'block')}, {count(row['heads'], 'head')}, {row['channels']} channels, vocabulary "
        f"{row['vocabulary']}, precision {row['precision']}. {runs} from {dates[0]} to {dates[-1]} on "
        f"{', '.join(cpus)}, {row['cores']} cores, {row['machine']}; {versions}.\n",
        "Unless a figure varies it, a run has: "
        + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in view.reference.items())
        + ".\n",
    ]


METHOD = """\
[results.csv](results.csv) has a row for each run ({runs}). Every run is a process of its own on as many cores as
it has threads, with one BLAS thread a task. The repetitions take turns, each in an order of its own, so that a noisy
minute hits all settings alike. A run warms up for {warmup} steps and then records every kernel call of at least as many
steps as asked for: the time of a step, its phases, overlap, critical path and shares come from the same steps. As many
others, half of them before and half after, are not recorded and show what recording costs (`recording_cost`). The time
of a run is the median of its steps. Figures show medians over runs, quartiles and every run. Two settings are called
different (in bold) where the quartiles of their runs do not overlap; of single runs nothing is concluded.

Speedup is the time of the sequential run (one thread, a barrier between phases, which costs nothing there) divided by
the time in question: one base for all. Efficiency is speedup divided by threads.

Forward, backward and update have times of their own only where a barrier stands between them: the share of the recorded
steps that each takes, of the median step, so that they sum up to it. Where the state is updated in place, the sums that
make a weight gradient are part of the update.

Layers at once: the share of the time in which kernels of two or more layers of the network run, forward and backward
counted apart, all updates as one. Critical path: the longest chain of tasks that had to wait for one another, by their
measured times. Scheduling: the share of the threads' time in which a task was ready and a thread had none; waiting: in
which a thread had none because none was ready.
"""


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
