"""report.md and report.html: the figures of a study, their numbers, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from daskgpt.instruments import machine
from daskgpt.instruments.statistics import Comparison, Spread, rounded
from daskgpt.instruments.study.dials import BARRIERS, DIALS, PHASES
from daskgpt.instruments.study.figures import draw_all, phase_times, scheduler_rows, slicing_times
from daskgpt.instruments.study.html import html_of
from daskgpt.instruments.study.numbers import (
    Rows,
    compare,
    count,
    efficiencies,
    median,
    model_name,
    model_of,
    runs_a_point,
    sentence,
    speedups,
    spread,
    spreads,
)
from daskgpt.instruments.study.table import Row

RECORDING = 0.03  # of a step, above which a report says what recording costs
NONE = "Nothing was run for this question."
Section = tuple[str, list[str], list[str]]  # title, conclusions, details


def write_report(folder: Path, rows: Sequence[Row], quick: bool = False) -> Path:
    """Draw the figures and write report.md beside them, and report.html, which holds them; return the latter.

    quick   whether it is a study of --quick, which says so on top
    """
    view = Rows(rows)
    drawn = draw_all(folder, view)
    sections: list[tuple[str | None, Section]] = [
        ("phases", threads_section(view)),
        ("barriers", barriers_section(view)),
        ("slicing", slicing_section(view)),
        ("grains", grain_section(view)),
        ("overlap", overlap_section(view)),
        ("schedulers", scheduler_section(view)),
        (None, results_section(view)),
    ]
    parts = [f"# {_title(view)}\n", *_banner(view, quick), _heading(view), "## What came of it\n"]
    told = sections[-1:] if quick else sections  # a quick study says nothing of speed
    parts += [f"- {conclusion}" for _, (_, conclusions, _) in told for conclusion in conclusions]
    for key, (title, _, details) in sections:
        parts.append(f"\n## {title}\n")
        if key in drawn:
            parts.append(f"![{title}]({drawn[key]})\n")
        parts += details or [NONE]
    parts.append(f"\n## Runs\n\n{_method(view)}\n")
    text, page = "\n".join(parts), folder / "report.html"
    (folder / "report.md").write_text(text)
    page.write_text(html_of(text, _title(view), folder))
    return page


def threads_section(view: Rows) -> Section:
    """Runtime, speedup and efficiency of forward, backward, update and total."""
    conclusions, details = [], []
    for barrier in ("layer", "phase"):
        times = phase_times(view, barrier)
        if not times:
            continue
        details += [
            f"Under {BARRIERS[barrier].words}, in ms (medians and quartiles of the runs):",
            "",
            *_phase_table(times, view),
            "",
        ]
        if len(times["total"]) > 1:
            conclusions.append(_gain(times, barrier, view))
    return "Threads: forward, backward, update", conclusions, details


def barriers_section(view: Rows) -> Section:
    """Fork-join against tasks against barrier-free."""
    conclusions, details = [], []
    by_threads = {barrier: view.along("threads", barrier=barrier) for barrier in BARRIERS}
    present = {barrier: found for barrier, found in by_threads.items() if found}
    if len(present) < 2:
        return "Fork-join, tasks, barrier-free", [], []
    counts = sorted({threads for found in present.values() for threads in found})
    lines = [["step (ms)", *(count(n, "thread") for n in counts), "speedup", "efficiency", "over its own 1 thread"]]
    for barrier, found in present.items():
        times = spreads(found)
        lines.append([barrier, *(_cell(times.get(n)) for n in counts), *_ratios(times, max(times), view)])
    details += _table(lines)
    most = max(counts)
    for one, other in (("step", "layer"), ("none", "step"), ("none", "layer"), ("step", "phase")):
        rows, other_rows = (view.at(barrier=barrier, threads=most) for barrier in (one, other))
        conclusions += _on_threads(compare(BARRIERS[one].words, rows, BARRIERS[other].words, other_rows), most)
    same_grain = compare(
        "tasks of one kernel (barrier step, grain kernel)",
        view.at(barrier="step", grain="kernel", threads=most),
        "fork-join of the same tasks",
        view.at(barrier="layer", threads=most),
    )
    conclusions += _on_threads(same_grain, most)
    return "Fork-join, tasks, barrier-free", conclusions, details


def slicing_section(view: Rows) -> Section:
    """Slicing by tokens only against slicing by sequences too."""
    series = slicing_times(view)
    if sum(map(len, series.values())) < 2:
        return "Slicing: tokens only, or tokens and sequences", [], []
    size = view.all[0]["batch_size"]
    counts = sorted({count for times in series.values() for count in times})
    lines = [["sequences in a chunk: step (ms)", *(count(n, "chunk") for n in counts)]]
    lines += [[f"{b} of {size}", *(_cell(times.get(n)) for n in counts)] for b, times in series.items()]
    conclusions = []
    tokens_only = series.get(size, {})
    for n in counts:
        others = {b: times[n] for b, times in series.items() if b != size and n in times}
        if n in tokens_only and others:
            best = min(others, key=lambda b: others[b].median)
            found = Comparison.of(
                f"slicing by tokens only ({size} sequences a chunk)",
                tokens_only[n],
                f"slicing by sequences too ({best} a chunk)",
                others[best],
            )
            conclusions.append(f"With {count(n, 'chunk')}, {sentence(found)}")
    least, sequences, n = min((own.median, b, n) for b, times in series.items() for n, own in times.items())
    conclusions.append(
        f"Of all slicings, {count(n, 'chunk')} of {sequences} of the {size} sequences had the least median: "
        f"{rounded(least)} ms a step."
    )
    return "Slicing: tokens only, or tokens and sequences", conclusions, _table(lines)


def grain_section(view: Rows) -> Section:
    """Time against the size of a task."""
    found = view.along("grain")
    if len(found) < 2:
        return "Size of a task", [], []
    lines = [["grain", "tasks a step", "step (ms)", "kernels", "between kernels", "scheduling", "waiting"]]
    for grain, rows in found.items():
        shares = [_share(rows, f"{name}_share") for name in ("kernel", "inside", "scheduling", "waiting")]
        lines.append([grain, _number(rows, "tasks", 0), _cell(spread(rows, "step_ms")), *shares])
    ordered = sorted(found, key=lambda grain: median(found[grain], "step_ms"))
    first, last = ordered[0], ordered[-1]
    pair = compare(f"grain {first}", found[first], f"grain {last}", found[last])
    conclusions = (
        [f"Of the grains, {first} has the least median and {last} the largest: {sentence(pair)}"] if pair else []
    )
    return "Size of a task", conclusions, _table(lines)


def overlap_section(view: Rows) -> Section:
    """Overlap of layers and steps, and the critical path."""
    found = {barrier: view.at(barrier=barrier) for barrier in BARRIERS if view.at(barrier=barrier)}
    header = ["barrier", "layers at once", "steps at once", "step (ms)", "critical path (ms)", "share of it"]
    lines = [[*header, "kernels", "scheduling", "waiting"]]
    conclusions = []
    for barrier, rows in found.items():
        recorded, path = median(rows, "step_ms"), median(rows, "critical_path_ms")
        lines.append(
            [
                barrier,
                _share(rows, "overlap"),
                _share(rows, "steps_overlap"),
                _cell(spread(rows, "step_ms")),
                _cell(spread(rows, "critical_path_ms")),
                f"{path / recorded:.0%}",
                *(_share(rows, f"{name}_share") for name in ("kernel", "scheduling", "waiting")),
            ]
        )
    if len(found) > 1:
        shares = {barrier: median(rows, "overlap") for barrier, rows in found.items()}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        conclusions.append(
            f"Two or more layers run at once {shares[most]:.1%} of the time with {BARRIERS[most].words}, the most, and "
            f"{shares[least]:.1%} with {BARRIERS[least].words}, the least."
            if shares[most] > shares[least]
            else f"Two or more layers run at once {shares[most]:.1%} of the time with every barrier."
        )
        paths = {barrier: median(rows, "critical_path_ms") for barrier, rows in found.items()}
        longest, shortest = max(paths, key=paths.__getitem__), min(paths, key=paths.__getitem__)
        if paths[longest] > paths[shortest]:
            conclusions.append(
                f"The critical path is longest with {BARRIERS[longest].words} ({rounded(paths[longest])} ms a step) "
                f"and shortest with {BARRIERS[shortest].words} ({rounded(paths[shortest])} ms)."
            )
    if "none" in found:
        conclusions.append(
            f"With barrier none, two or more steps run at once {_share(found['none'], 'steps_overlap')} of the time."
        )
    return "Overlap and critical path", conclusions, _table(lines) if found else []


def scheduler_section(view: Rows) -> Section:
    """The synchronous scheduler, threads, and a cluster of processes."""
    found = scheduler_rows(view)
    if len(found) < 2:
        return "Schedulers", [], []
    lines = [["scheduler", "step (ms)", "most memory (GB)"]]
    lines += [[name, _cell(spread(r, "step_ms")), _number(r, "peak_gb", 2)] for name, r in found.items()]
    best = min(found, key=lambda name: median(found[name], "step_ms"))
    others = [name for name in found if name.split(" (")[0] != best.split(" (")[0]]
    pairs = [compare(best, found[best], name, found[name]) for name in others]
    conclusions = [f"Of the schedulers, {sentence(pair)}" for pair in pairs if pair]
    return "Schedulers", conclusions, _table(lines)


def results_section(view: Rows) -> Section:
    """Whether runs with the same chunks gave the same loss, to the last bit."""
    losses: dict[tuple[Any, ...], set[str]] = {}
    for row in view.all:
        losses.setdefault((row["batch_chunk"], row["sequence_chunk"]), set()).add(str(row["loss"]))
    step = view.all[0]["warmup"] + 1
    lines = [["chunk", f"loss after at least {step} steps", "runs that share it"]]
    for (b, t), own in sorted(losses.items()):
        sharing = sum((row["batch_chunk"], row["sequence_chunk"]) == (b, t) for row in view.all)
        lines.append([f"{b} x {t}", ", ".join(sorted(own)), str(sharing) if len(own) == 1 else "differ"])
    different = [f"{b} x {t}" for (b, t), own in sorted(losses.items()) if len(own) > 1]
    conclusion = (
        f"**Runs with the same chunks gave different losses: {', '.join(different)}.**"
        if different
        else f"Runs with the same chunks gave the same loss, bit for bit, whatever the other dials "
        f"({count(len(view.all), 'run')}, {count(len(losses), 'way')} to cut a batch)."
    )
    return "Same results", [conclusion], _table(lines)


def _gain(times: dict[str, dict[int, Spread]], barrier: str, view: Rows) -> str:
    """What the most threads bring, to the step and to its phases."""
    total = times["total"]
    least, most = min(total), max(total)
    ends = Comparison.of(count(most, "thread"), total[most], count(least, "thread"), total[least])
    said = f"Under {BARRIERS[barrier].words}, {sentence(ends)}"
    gains = {phase: speedups(times[phase], view.sequential(f"{phase}_ms")) for phase in PHASES}
    found = {phase: own[most] for phase, own in gains.items() if most in own}
    if not found:
        return said
    best, worst = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return (
        f"{said} The efficiency is {efficiencies(total, view.sequential())[most]:.0%}; of the phases, {best} gains "
        f"most ({rounded(found[best], 2)} times as fast) and {worst} least ({rounded(found[worst], 2)})."
    )


def _on_threads(found: Comparison | None, threads: int) -> list[str]:
    return [f"On {count(threads, 'thread')}, {sentence(found)}"] if found else []


def _phase_table(times: dict[str, dict[int, Spread]], view: Rows) -> list[str]:
    lines = [["threads", *times, "speedup (total)", "efficiency (total)", "over its own 1 thread"]]
    for n in times["total"]:
        lines.append([str(n), *(_cell(own.get(n)) for own in times.values()), *_ratios(times["total"], n, view)])
    return _table(lines)


def _ratios(times: dict[int, Spread], threads: int, view: Rows) -> list[str]:
    """Speedup and efficiency over the sequential run, and speedup over its own run on one thread; "" without them."""
    base, own = view.sequential(), times.get(1)
    found = (
        [rounded(speedups(times, base)[threads], 2), f"{efficiencies(times, base)[threads]:.0%}"] if base else ["", ""]
    )
    return [*found, rounded(speedups(times, own)[threads], 2) if own and len(times) > 1 else ""]


def _title(view: Rows) -> str:
    row = view.all[0]
    return f"Study of {model_name(model_of(row))}, {row['batch_size']} x {row['sequence_length']} tokens a step"


def _heading(view: Rows) -> str:
    row = view.all[0]
    cpus = sorted({str(own["cpu"]) for own in view.all})
    dates = sorted(str(own["date"]) for own in view.all)
    versions = ", ".join(f"{package} {row[package]}" for package in ("daskgpt", "python", "numpy", "numba", "dask"))
    reference = ", ".join(f"{DIALS[name].words} {value}" for name, value in view.reference.items())
    return (
        f"{count(row['blocks'], 'block')}, {count(row['heads'], 'head')}, {row['channels']} channels, vocabulary "
        f"{row['vocabulary']}, precision {row['precision']}. {count(len(view.all), 'run')} from {dates[0]} to "
        f"{dates[-1]} on {', '.join(cpus)}, {row['cores']} cores, {row['machine']}; {versions}.\n\n"
        f"Unless a figure varies it, a run has: {reference}.\n"
    )


def _banner(view: Rows, quick: bool) -> list[str]:
    """What a reader must know before any number: a quick study, a busy machine, single runs."""
    said, runs = [], len(view.all)
    if quick:
        said.append(
            "**A quick study:** a very small model and short runs. It shows what a report looks like and that "
            "everything works here, and says nothing of speed."
        )
    others = spread(view.all, "others_cores")
    busy = sum(value > machine.BUSY for value in others.values) if others else 0
    if others and busy:
        said.append(
            f"**The machine was busy:** before {busy} of {count(runs, 'run')} other programs kept more than "
            f"{machine.BUSY:g} cores busy, {rounded(others.largest, 2)} at most. The times are of a share of the "
            "machine. Run the study again while nothing else runs."
        )
    cost = spread(view.all, "recording_cost")
    if cost and cost.median > RECORDING:
        said.append(
            f"**Recording slows the steps:** by {cost.median:.1%} in the median of the runs, {cost.largest:.1%} at "
            "most (steps beside those that were not recorded)."
        )
    least, most = runs_a_point(view.all)
    if least == 1:
        which = "every point was" if most == 1 else "some points were"
        said.append(f"**Single runs:** {which} run once. Differences between single runs are told; they show nothing.")
    return ["> " + "\n>\n> ".join(said) + "\n"] if said else []


METHOD = """\
[results.csv](results.csv) has a row for each run ({runs}). Every run is a process of its own on as many cores as
it has threads, with one BLAS thread a task. The repetitions take turns, each in an order of its own, so that a noisy
minute hits all settings alike. A run warms up for {warmup} steps and then records every kernel call of at least as many
steps as asked for: the time of a step, its phases, overlap, critical path and shares come from the same steps. As many
others, half of them before and half after, are not recorded and tell what recording costs (`recording_cost`). The time
of a run is the median of its steps. Figures show medians over runs, quartiles and every run. Two settings are called
different (in bold) where the quartiles of their runs do not overlap; of single runs nothing is concluded.

Speedup is the time of the sequential run (one thread, a barrier between phases, which costs nothing there) divided by
the time in question: one base for all. Efficiency is speedup divided by threads. Beside them stands the speedup over
the same barrier on one thread.

Forward, backward and update have times of their own only where a barrier stands between them: the share of the recorded
steps that each takes, of the median step, so that they sum up to it. Where the state is updated in place, the sums that
make a weight gradient are part of the update.

Layers at once: the share of the time in which kernels of two or more layers of the network run, forward and backward
counted apart, all updates as one. Critical path: the longest chain of tasks that had to wait for one another, by their
measured times. Scheduling: the share of the threads' time in which a task was ready and a thread had none; waiting: in
which a thread had none because none was ready.
"""


def _method(view: Rows) -> str:
    return METHOD.format(runs=len(view.all), warmup=view.all[0]["warmup"])


def _cell(found: Spread | None) -> str:
    return found.text("") if found else ""


def _share(rows: Sequence[Row], column: str) -> str:
    return f"{median(rows, column):.1%}"


def _number(rows: Sequence[Row], column: str, digits: int) -> str:
    return rounded(median(rows, column), digits)


def _table(lines: Iterable[Sequence[str]]) -> list[str]:
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, "|" + " --- |" * header.count(" |"), *rest]
