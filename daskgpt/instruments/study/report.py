"""report.md: the figures of a study, their numbers, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from daskgpt.instruments.study.figures import draw_all, phase_times, scheduler_rows, slicing_times
from daskgpt.instruments.study.grid import BARRIERS
from daskgpt.instruments.study.numbers import (
    SINGLE_RUNS,
    Comparison,
    Rows,
    Spread,
    compare,
    efficiencies,
    figure,
    speedups,
    spread,
)
from daskgpt.instruments.study.table import Row

NONE = "Nothing was run for this question."
WORDS = {
    "layer": "fork-join (barrier layer)",
    "phase": "barrier phase",
    "step": "tasks (barrier step)",
    "none": "barrier-free (barrier none)",
}
Section = tuple[str, list[str], list[str]]  # title, conclusions, details


def write_report(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """Draw the figures and write report.md beside them.

    name   of the model's size
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
    parts = [_heading(name, view), "## What came of it\n"]
    parts += [f"- {sentence}" for _, (_, conclusions, _) in sections for sentence in conclusions]
    for key, (title, _, details) in sections:
        parts.append(f"\n## {title}\n")
        if key in drawn:
            parts.append(f"![{title}]({drawn[key]})\n")
        parts += details or [NONE]
    parts.append(f"\n## Runs\n\n{_method(view)}\n")
    path = folder / "report.md"
    path.write_text("\n".join(parts))
    return path


def threads_section(view: Rows) -> Section:
    """Runtime, speedup and efficiency of forward, backward, update and total."""
    conclusions, details = [], []
    for barrier in ("layer", "phase"):
        times = phase_times(view, barrier)
        if not times:
            continue
        details += [f"Under {WORDS[barrier]}, in ms (medians and quartiles of the runs):", "", *_phase_table(times), ""]
        if len(times["total"]) > 1:
            conclusions.append(_gain(times, barrier))
    return "Threads: forward, backward, update", conclusions, details


def barriers_section(view: Rows) -> Section:
    """Fork-join against tasks against barrier-free."""
    conclusions, details = [], []
    by_threads = {barrier: view.along("threads", barrier=barrier) for barrier in BARRIERS}
    present = {barrier: found for barrier, found in by_threads.items() if found}
    if len(present) < 2:
        return "Fork-join, tasks, barrier-free", [], []
    counts = sorted({threads for found in present.values() for threads in found})
    lines = [["step (ms)", *(f"{n} thread{'s' if n > 1 else ''}" for n in counts), "speedup", "efficiency"]]
    for barrier, found in present.items():
        times = _spreads(found)
        ratio = [figure(speedups(times)[max(times)], 2), f"{efficiencies(times)[max(times)]:.0%}"]
        lines.append([barrier, *(_cell(times.get(n)) for n in counts), *(ratio if len(times) > 1 else ["", ""])])
    details += _table(lines)
    most = max(counts)
    for one, other in (("step", "layer"), ("none", "step"), ("none", "layer"), ("step", "phase")):
        rows, other_rows = (view.at(barrier=barrier, threads=most) for barrier in (one, other))
        conclusions += _on_threads(compare(WORDS[one], rows, WORDS[other], other_rows), most)
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
    lines = [["sequences in a chunk: step (ms)", *(f"{count} chunk{'s' if count > 1 else ''}" for count in counts)]]
    lines += [[f"{b} of {size}", *(_cell(times.get(count)) for count in counts)] for b, times in series.items()]
    conclusions = []
    tokens_only = series.get(size, {})
    for count in counts:
        others = {b: times[count] for b, times in series.items() if b != size and count in times}
        if count in tokens_only and others:
            best = min(others, key=lambda b: others[b].median)
            one = (f"slicing by tokens only ({size} sequences a chunk)", tokens_only[count])
            other = (f"slicing by sequences too ({best} a chunk)", others[best])
            faster, slower = sorted((one, other), key=lambda pair: pair[1].median)
            found = Comparison(faster[0], slower[0], (faster[1], slower[1]))
            conclusions.append(f"With {count} chunks, {found.sentence()}")
    least, sequences, count = min((own.median, b, n) for b, times in series.items() for n, own in times.items())
    conclusions.append(
        f"Of all slicings, {count} chunk{'s' if count > 1 else ''} of {sequences} of the {size} sequences "
        f"take{'' if count > 1 else 's'} least: {figure(least)} ms a step."
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
    ordered = sorted(found, key=lambda grain: _median(found[grain], "step_ms"))
    first, last = ordered[0], ordered[-1]
    pair = compare(f"grain {first}", found[first], f"grain {last}", found[last])
    sentence = f"Of the grains, {first} is fastest and {last} slowest: {pair.sentence()}" if pair else ""
    return "Size of a task", [sentence], _table(lines)


def overlap_section(view: Rows) -> Section:
    """Overlap of layers and steps, and the critical path."""
    found = {barrier: view.at(barrier=barrier) for barrier in BARRIERS if view.at(barrier=barrier)}
    header = ["barrier", "layers at once", "steps at once", "recorded step (ms)", "critical path (ms)", "share of it"]
    lines = [[*header, "kernels", "scheduling", "waiting"]]
    conclusions = []
    for barrier, rows in found.items():
        recorded, path = _median(rows, "recorded_ms"), _median(rows, "critical_path_ms")
        lines.append(
            [
                barrier,
                _share(rows, "overlap"),
                _share(rows, "steps_overlap"),
                _cell(spread(rows, "recorded_ms")),
                _cell(spread(rows, "critical_path_ms")),
                f"{path / recorded:.0%}",
                *(_share(rows, f"{name}_share") for name in ("kernel", "scheduling", "waiting")),
            ]
        )
    if len(found) > 1:
        shares = {barrier: _median(rows, "overlap") for barrier, rows in found.items()}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        conclusions.append(
            f"Two or more layers run at once {shares[most]:.0%} of the time with {WORDS[most]}, the most, and "
            f"{shares[least]:.0%} with {WORDS[least]}, the least."
        )
        paths = {barrier: _median(rows, "critical_path_ms") for barrier, rows in found.items()}
        longest, shortest = max(paths, key=paths.__getitem__), min(paths, key=paths.__getitem__)
        conclusions.append(
            f"The critical path is longest with {WORDS[longest]} ({figure(paths[longest])} ms a step) and shortest "
            f"with {WORDS[shortest]} ({figure(paths[shortest])} ms)."
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
    lines = [["scheduler, threads or processes", "step (ms)", "most memory (GB)"]]
    lines += [[name, _cell(spread(r, "step_ms")), _number(r, "peak_gb", 2)] for name, r in found.items()]
    best = min(found, key=lambda name: _median(found[name], "step_ms"))
    others = [name for name in found if name.split(",")[0] != best.split(",")[0]]
    pairs = [compare(best, found[best], name, found[name]) for name in others]
    conclusions = [f"Of the schedulers, {pair.sentence()}" for pair in pairs if pair]
    return "Schedulers", conclusions, _table(lines)


def results_section(view: Rows) -> Section:
    """Whether runs with the same chunks gave the same loss, to the last bit."""
    losses: dict[tuple[Any, ...], set[str]] = {}
    for row in view.all:
        losses.setdefault((row["batch_chunk"], row["sequence_chunk"]), set()).add(str(row["loss"]))
    step = view.all[0]["warmup"] + 1
    lines = [["chunk", f"loss after at least {step} steps", "runs that share it"]]
    for (b, t), own in sorted(losses.items()):
        count = sum((row["batch_chunk"], row["sequence_chunk"]) == (b, t) for row in view.all)
        lines.append([f"{b} x {t}", ", ".join(sorted(own)), str(count) if len(own) == 1 else "differ"])
    different = [f"{b} x {t}" for (b, t), own in sorted(losses.items()) if len(own) > 1]
    sentence = (
        f"**Runs with the same chunks gave different losses: {', '.join(different)}.**"
        if different
        else f"Runs with the same chunks gave the same loss, bit for bit, whatever the other dials "
        f"({len(view.all)} runs, {len(losses)} ways to cut a batch)."
    )
    return "Same results", [sentence], _table(lines)


def _gain(times: dict[str, dict[int, Spread]], barrier: str) -> str:
    """What the most threads bring, to the step and to its phases."""
    total = times["total"]
    least, most = min(total), max(total)
    found = {phase: speedups(own)[most] for phase, own in times.items() if phase != "total"}
    best, worst = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    ends = [(f"{most} threads", total[most]), (f"{least} thread{'s' if least > 1 else ''}", total[least])]
    faster, slower = sorted(ends, key=lambda end: end[1].median)
    return (
        f"Under {WORDS[barrier]}, {Comparison(faster[0], slower[0], (faster[1], slower[1])).sentence()} "
        f"The efficiency is {efficiencies(total)[most]:.0%}; of the phases, {best} gains most "
        f"({figure(found[best], 2)} times as fast) and {worst} least ({figure(found[worst], 2)})."
    )


def _on_threads(found: Comparison | None, threads: int) -> list[str]:
    return [f"On {threads} thread{'s' if threads > 1 else ''}, {found.sentence()}"] if found else []


def _phase_table(times: dict[str, dict[int, Spread]]) -> list[str]:
    lines = [["threads", *times, "speedup (total)", "efficiency (total)"]]
    for n in times["total"]:
        ratios = [figure(speedups(times["total"])[n], 2), f"{efficiencies(times['total'])[n]:.0%}"]
        lines.append([str(n), *(_cell(own.get(n)) for own in times.values()), *ratios])
    return _table(lines)


def _heading(name: str, view: Rows) -> str:
    row = view.all[0]
    cpus = sorted({str(own["cpu"]) for own in view.all})
    dates = sorted(str(own["date"]) for own in view.all)
    versions = ", ".join(f"{package} {row[package]}" for package in ("daskgpt", "python", "numpy", "numba", "dask"))
    reference = ", ".join(f"{dial} {value}" for dial, value in view.reference.items())
    others = spread(view.all, "others_cores")
    return (
        f"# Study of {name}, {row['batch_size']} x {row['sequence_length']} tokens a step\n\n"
        f"{row['blocks']} blocks, {row['heads']} heads, {row['channels']} channels, vocabulary {row['vocabulary']}, "
        f"precision {row['precision']}. {len(view.all)} runs from {dates[0]} to {dates[-1]} on {', '.join(cpus)}, "
        f"{row['cores']} cores, {row['machine']}; {versions}."
        + (f" Before a run, other programs kept {others.text('cores', 2)} busy." if others else "")
        + f"\n\nUnless a figure varies it, a run has: {reference}.\n"
    )


METHOD = """\
[results.csv](results.csv) has a row for each of the {runs} runs. Every run is a process of its own on as many cores as
it has threads, with one BLAS thread a task. The repetitions take turns, each in an order of its own, so that a noisy
minute hits all settings alike. A run warms up for {warmup} steps, times at least as many as asked for, and then records
the kernel calls of some others, from which overlap, critical path, shares and the times of phases come. The time of a
run is the median of its steps. Figures show medians over runs, quartiles and every run. Two settings are called
different where the quartiles of their runs do not overlap or, with single runs, where they differ by {single:.0%} or
more.

Forward, backward and update have times of their own only where a barrier stands between them. Where there is none, and
the state is updated in place, the sums that make a weight gradient are part of the update.

Layers at once: the share of the time in which kernels of two or more layers of the network run, forward and backward
counted apart, all updates as one. Critical path: the longest chain of tasks that had to wait for one another, by their
measured times. Scheduling: the share of the threads' time in which a task was ready and a thread had none; waiting: in
which a thread had none because none was ready.
"""


def _method(view: Rows) -> str:
    return METHOD.format(runs=len(view.all), warmup=view.all[0]["warmup"], single=SINGLE_RUNS - 1)


def _spreads(found: dict[Any, list[Row]], column: str = "step_ms") -> dict[Any, Spread]:
    spreads = {value: spread(rows, column) for value, rows in found.items()}
    return {value: own for value, own in spreads.items() if own is not None}


def _cell(found: Spread | None) -> str:
    return found.text("").replace("  ", " ").rstrip() if found else ""


def _median(rows: Sequence[Row], column: str) -> float:
    found = spread(rows, column)
    return found.median if found else 0.0


def _share(rows: Sequence[Row], column: str) -> str:
    return f"{_median(rows, column):.1%}"


def _number(rows: Sequence[Row], column: str, digits: int) -> str:
    return figure(_median(rows, column), digits)


def _table(lines: Iterable[Sequence[str]]) -> list[str]:
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, "|" + " --- |" * header.count(" |"), *rest]
