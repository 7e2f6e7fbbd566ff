"""A study: a grid of settings, runs of each in fresh processes, a table of their times, and figures.

Repetitions take turns, so that noise affects all settings alike. The folder of a study holds `results.jsonl` (a line of
JSON per run; a study is continued from it), `table.md`, and figures as PNG and SVG. `python -m daskgpt.profiling.study
JSON` makes one run and prints its line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import require
from daskgpt.config.files import replacing
from daskgpt.config.groups import groups_of_batch
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import documented, setting
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling.measure import BatchConfig, Spread, TimedEngine, job_of, measure, origin, rounded, significant
from daskgpt.profiling.timeline import describe_summary
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.job import compile_kernels

BARRIERS = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
# Settings of the dataflow that a study varies, and the order of those values that are words.
DIALS = ("threads", "scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain", "engine")
ORDER: dict[str, tuple[str, ...]] = {
    "scheduler": ("sync", "threads", "local"),
    "barrier": tuple(BARRIERS),
    "grain": ("kernel", "segment", "block", "chunk", "auto"),
    "engine": ("ranks", "tasks"),
}
SHARED = ("batch_size", "sequence_length", "precision", "window", "warmup", "seed")
NUMBERS = {"critical_path_ms": "critical path (ms)", "peak_gb": "memory (GB)", "tasks": "tasks"}
SHARES = {  # of the threads' time
    "kernel_share": "kernels",
    "inside_share": "between a task's kernels",
    "scheduling_share": "scheduling: a task was ready",
    "waiting_share": "waiting: no task was ready",
}
OVERLAPS = {"overlap": "layers at once", "steps_overlap": "steps at once"}
POINT = tuple(field.name for field in fields(DataflowConfig))
MEASURED = ("repetition", "step_ms", "loss", "others_cores", "machine", "versions")

Row = dict[str, Any]
Points = Mapping[DataflowConfig, Sequence[Row]]


@documented
@dataclass(frozen=True)
class StudyConfig(BatchConfig):
    """Settings that all runs of a study share."""

    precision: str = setting("float32", "operands of matrix products", choices=("float32", "bfloat16", "auto"))
    window: int = setting(4, "steps in flight with barrier none", unit="steps", least=1, most=2**20)
    steps: int = setting(5, "least number of timed steps of a run", unit="steps", least=1, most=2**20)
    seconds: float = setting(1.0, "least time that a run's timed steps take together", unit="seconds", least=0)
    # Settings that are auto are chosen in the first two steps.
    warmup: int = setting(3, "untimed steps before them", unit="steps", least=3, most=2**20)
    repetitions: int = setting(3, "how often every point is run", least=1)
    out: str = setting("", "folder of the study, an earlier one to continue; without it, studies/DATE-TIME")


# The grid.


def runnable(point: DataflowConfig) -> DataflowConfig:
    """Return a point without contradictions: one thread with the synchronous scheduler, engine tasks on clusters
    only, and tasks of one kernel with fork-join, which waits after each layer.
    """
    threads = 1 if point.scheduler == "sync" else point.threads or usable_cores()
    engine = point.engine if point.scheduler == "local" else "ranks"
    return replace(point, threads=threads, engine=engine, grain="kernel" if point.barrier == "layer" else point.grain)


def base_point(study: StudyConfig, cores: int) -> DataflowConfig:
    """Return the point that the others differ from in one setting: all cores, barrier step, grain block."""
    sequences = study.batch_size // 2 if study.batch_size % 2 == 0 else study.batch_size
    base = DataflowConfig(batch_chunk=sequences, sequence_chunk=study.sequence_length, threads=cores, grain="block")
    return replace(base, scheduler="threads", window=study.window, precision=study.precision)


def default_grid(study: StudyConfig, cores: int) -> list[DataflowConfig]:
    """Return the points of a study's questions: threads and barriers, chunks, grain, and schedulers."""
    base, size, length = base_point(study, cores), study.batch_size, study.sequence_length
    threads = [2**power for power in range(10) if 2**power < cores] + [cores]
    points = [replace(base, threads=n, barrier=barrier) for n in threads for barrier in BARRIERS]
    cuts = product((size, max(size // 2, 1), 1), (length, max(length // 4, 1)))
    points += [replace(base, batch_chunk=b, sequence_chunk=t) for b, t in cuts if size % b == length % t == 0]
    points += [replace(base, grain=grain) for grain in ORDER["grain"][:-1]]
    points += [replace(base, scheduler=scheduler) for scheduler in ORDER["scheduler"]]
    return distinct([*points, replace(base, scheduler="local", engine="tasks")])


def chosen_grid(study: StudyConfig, cores: int, chosen: Mapping[str, Sequence[Any]]) -> list[DataflowConfig]:
    """Return every combination of the chosen values; other settings are those of the base point."""
    base = base_point(study, cores)
    return distinct(replace(base, **dict(zip(chosen, values))) for values in product(*chosen.values()))


def distinct(points: Iterable[DataflowConfig]) -> list[DataflowConfig]:
    """Return each runnable point once."""
    return list(dict.fromkeys(map(runnable, points)))


def described(point: DataflowConfig, among: Iterable[DataflowConfig] = ()) -> str:
    """Return a point in one line: its settings, or only those in which the points `among` differ."""
    dials = [dial for dial in DIALS if dial != "engine" or point.scheduler == "local"]
    varied = [dial for dial in dials if not among or len({getattr(other, dial) for other in among}) > 1]
    values = {dial: getattr(point, dial) or "auto" for dial in varied}
    return ", ".join(f"{dial.replace('_', ' ')} {BARRIERS.get(value, value)}" for dial, value in values.items())


def size_of(model: ModelConfig, study: StudyConfig) -> str:
    """Return the size of the model and of a step."""
    size = f"{model.blocks} x {model.channels} ({parameter_count(model):,} parameters)"
    return f"{size}, {study.batch_size} x {study.sequence_length} tokens a step, {study.precision}"


# The runs.


class Results:
    """The runs of a study, in memory and in a file.

    rows   a run each: the settings, the repetition, and what was measured

    Errors   ValueError if the file is of another study: another model, batch or version
    """

    def __init__(self, path: Path, model: ModelConfig, study: StudyConfig) -> None:
        self.path, self.model, self.study = path, model, study
        shared = asdict(model) | {name: getattr(study, name) for name in SHARED}
        shared["groups"] = groups_of_batch(study.batch_size, study.sequence_length, study.groups)
        self.shared: Row = json.loads(json.dumps(shared))
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # without a line that is not whole
        self.rows = [self._row(number, line) for number, line in enumerate(lines, 1)]

    def _row(self, number: int, line: bytes) -> Row:
        row: Row = {}
        with contextlib.suppress(ValueError, TypeError):
            row.update(json.loads(line))
        differing = [name for name, value in self.shared.items() if row.get(name) != value]
        got = [f"{name}={self.shared[name]}, and {name}={row.get(name)}" for name in differing]
        got += [f"no {name}" for name in (*POINT, *MEASURED) if name not in row]
        rule, advice = "a folder must hold runs of one study and version", "Give another --out."
        require(not got, "study", rule, f"{', '.join(got)} in line {number} of {self.path}", advice)
        return row

    def add(self, point: DataflowConfig, repetition: int, measured: Row) -> None:
        """Add a run, and write the file."""
        self.rows.append(self.shared | asdict(point) | {"repetition": repetition} | measured)
        with replacing(self.path, "study") as file:
            file.writelines(f"{json.dumps(row)}\n".encode() for row in self.rows)

    @property
    def points(self) -> dict[DataflowConfig, list[Row]]:
        """The runs of each point, in the order of the settings."""
        points: dict[DataflowConfig, list[Row]] = {}
        for row in self.rows:
            points.setdefault(point_of(row), []).append(row)
        return {point: points[point] for point in sorted(points, key=rank)}


def rank(point: DataflowConfig) -> tuple[Any, ...]:
    """Return what points are sorted by: words as ORDER has them, then numbers by size."""
    words = [(getattr(point, name), order) for name, order in ORDER.items()]
    ranks = (order.index(word) if word in order else len(order) for word, order in words)
    return *ranks, point.batch_chunk, point.sequence_chunk, point.threads


def point_of(row: Row) -> DataflowConfig:
    """Return the settings of a run."""
    return DataflowConfig(**{name: row[name] for name in POINT})


# Libraries below a run must not start threads beside those of the scheduler.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def run_all(study: StudyConfig, points: Sequence[DataflowConfig], results: Results) -> list[str]:
    """Run every point that the results lack, repetition by repetition; return a line for each failure.

    Table and figures are written after each repetition.
    """
    failures: list[str] = []
    # Each repetition has another order, so that no point always follows the same one.
    orders = [Random(f"{study.seed} {n}").sample(points, len(points)) for n in range(study.repetitions)]
    done = {(point_of(row), row["repetition"]) for row in results.rows}
    missing = [[point for point in order if (point, n) not in done] for n, order in enumerate(orders)]
    with tqdm(total=sum(map(len, missing)), unit="run", dynamic_ncols=True) as bar:
        for repetition, order in enumerate(missing):
            for point in order:
                bar.set_postfix_str(f"repetition {repetition + 1}: {described(point)}")
                try:
                    results.add(point, repetition, run_one(results.model, study, point))
                except RuntimeError as error:
                    failures.append(f"{described(point)}: {error}")
                    bar.write(failures[-1])
                bar.update()
            if results.rows and (order or not bar.total):
                write(results)
    return failures


def run_one(model: ModelConfig, study: StudyConfig, point: DataflowConfig) -> Row:
    """Make one run in a process of its own; return what it measured.

    Errors   RuntimeError with the last line that the process wrote, if it failed
    """
    settings = json.dumps([asdict(model), asdict(study), asdict(point)])
    command = [sys.executable, "-m", "daskgpt.profiling.study", settings]
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"the run must end; got exit code {result.returncode}, {last}")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def run(model: ModelConfig, study: StudyConfig, point: DataflowConfig) -> Row:
    """Time some steps and record some others; return what was measured."""
    job = job_of(model, study, point)
    compile_kernels(job.precision)  # else the first step, by whose times auto chooses, loads them
    others = machine.busy_cores()
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        steps = TimedEngine(job, scheduler, study.seed)
        number = max(study.steps, math.ceil(study.seconds / min(steps.run(study.warmup))))
        seconds, peak, summary = steps.measured(number, study.steps)
    chunk = steps.engine.chunk
    row: Row = {
        "batch_chunk_used": chunk[0],
        "sequence_chunk_used": chunk[1],
        "grain_used": steps.grain,
        "tasks": steps.tasks,
        "steps": seconds.n,
        **dict(zip(("step_ms_q1", "step_ms", "step_ms_q3"), (1e3 * value for value in seconds.quartiles))),
        "critical_path_ms": summary.critical_path * 1e3 / summary.steps,
        **{name: getattr(summary, name) for name in (*OVERLAPS, *SHARES)},
        "peak_gb": peak / 1e9,
        "others_cores": others,
    }
    numbers = {name: significant(value) for name, value in row.items() if isinstance(value, float)}
    return row | numbers | {"loss": steps.losses[study.warmup + study.steps - 1], **origin()}


def write_timelines(model: ModelConfig, study: StudyConfig, folder: Path) -> None:
    """Write a timeline of each barrier to FOLDER/BARRIER.html and .json, and all of them to FOLDER/barriers.html.

    A timeline has as many steps as a window. A chunk has a quarter of the sequences, so that chunks can overlap. A task
    is a segment of a chunk, and one kernel with fork-join.
    """
    from daskgpt.profiling.pages import write_side_by_side, write_timeline  # loads Bokeh

    base = replace(base_point(study, usable_cores()), batch_chunk=max(study.batch_size // 4, 1), grain="segment")
    flows = {f"barrier {label}": runnable(replace(base, barrier=barrier)) for barrier, label in BARRIERS.items()}
    data = {name: getattr(study, name) for name in ("batch_size", "sequence_length", "groups")}
    runs = measure(model, data, flows, turns=1, steps=study.window, seed=study.seed)
    for barrier, run in zip(BARRIERS, runs.values()):
        _, page = write_timeline(run.timeline, folder / barrier)
        print(f"\nbarrier {barrier}: {page}\n{describe_summary(run.summary)}")
    timelines = {name: run.timeline for name, run in runs.items()}
    page = write_side_by_side(timelines, folder / "barriers.html", f"{study.window} steps: {size_of(model, study)}")
    print(f"\nall barriers on one time scale: {page}")


# Table and figures.


def median(rows: Iterable[Row], column: str = "step_ms") -> float:
    """Return the median of a column; nan without rows."""
    return float(np.median([row[column] for row in rows] or [math.nan]))


def sequential(points: Points) -> Sequence[Row]:
    """Return the runs of the base of every speedup: the fastest point on one thread; none if there is none."""
    return min((rows for point, rows in points.items() if point.threads == 1), key=median, default=())


def table_of(points: Points) -> list[list[str]]:
    """Return a row of text for each point, below a head; the first columns are the most important ones."""
    table = [["settings", "ms a step", "speedup", "efficiency", "runs", *NUMBERS.values()]]
    table[0] += [*SHARES.values(), *OVERLAPS.values(), "loss"]
    base = median(sequential(points))
    for point, rows in points.items():
        step, speedup = Spread.of(row["step_ms"] for row in rows), base / median(rows)
        numbers = [(speedup, ".2f"), (speedup / point.threads, ".0%"), (len(rows), "")]
        numbers += [(median(rows, column), ".4g") for column in NUMBERS]
        numbers += [(median(rows, column), ".1%") for column in (*SHARES, *OVERLAPS)]
        cells = ["" if math.isnan(value) else format(value, form) for value, form in numbers]
        losses = " or ".join(sorted({repr(row["loss"]) for row in rows}))
        table.append([described(point), step.text(""), *cells, losses])
    return table


def caption(results: Results) -> list[str]:
    """Return what was run, the base of speedups, where, and how busy the machine was."""
    row, base, others = results.rows[-1], sequential(results.points), max(row["others_cores"] for row in results.rows)
    over = f"speedup over {described(point_of(base[0]))}" if base else "no run on one thread, so no speedup"
    where = f"{row['machine']['processor']}, {row['machine']['cores']} cores, {row['date']}"
    busy = [f"other programs kept up to {rounded(others)} cores busy"] * (others > machine.BUSY)
    return [size_of(results.model, results.study), over, where, *busy]


def write(results: Results) -> None:
    """Write the table and the figures beside the results."""
    from daskgpt.profiling import plots  # loads matplotlib

    table = table_of(results.points)
    table.insert(1, ["---"] * len(table[0]))
    lines = [*(f"- {line}" for line in caption(results)), "", *(f"| {' | '.join(cells)} |" for cells in table), ""]
    results.path.with_name("table.md").write_text("\n".join(lines), encoding="utf-8")
    with plots.style():
        for name, figure in figures(results.points).items():
            figure.suptitle("\n".join(caption(results)[:2]), fontsize=11)
            for kind in ("png", "svg"):
                plots.save(figure, results.path.with_name(f"{name}.{kind}"), kind)


def figures(points: Points) -> dict[str, Any]:
    """Return the figures by name: all points, and times by the number of threads where several numbers were run."""
    groups = dict[DataflowConfig, dict[int, Sequence[Row]]]()  # points that differ in their threads only
    for point, rows in points.items():
        groups.setdefault(replace(point, threads=0), {})[point.threads] = rows
    groups = {point: group for point, group in groups.items() if len(group) > 1}
    lines = {described(point, groups) or "measured": group for point, group in groups.items()}
    return {"points": _bars(points)} | ({"threads": _by_threads(lines, median(sequential(points)))} if lines else {})


def _by_threads(lines: Mapping[str, Mapping[int, Sequence[Row]]], base: float) -> Any:
    """Draw time, speedup and efficiency by the number of threads, a line for each group.

    base   ms of a step that speedups refer to; nan without one
    """
    from daskgpt.profiling.plots import Figure

    numbers = sorted({number for line in lines.values() for number in line})
    figure = Figure(figsize=(12, 4.6 + len(lines) / 6))
    time, speedup, efficiency = figure.subplots(1, 3)
    for index, (label, line) in enumerate(lines.items()):
        look = {"color": f"C{index}", "marker": "o^sDvP*X"[index % 8], "label": label}
        low, middle, high = np.array([Spread.of(r["step_ms"] for r in line[n]).quartiles for n in sorted(line)]).T
        places = [numbers.index(number) for number in sorted(line)]  # equally far apart, so that all are legible
        time.errorbar(places, middle, (middle - low, high - middle), **look)
        speedup.plot(places, base / middle, **look)
        efficiency.plot(places, 100 * base / middle / sorted(line), **look)
    ideals = {"ms a step": [], "speedup (dotted: ideal)": numbers, "efficiency (%)": [100] * len(numbers)}
    for axes, (label, ideal) in zip(figure.axes, ideals.items()):
        axes.plot(range(len(ideal)), ideal, ":", color="#888888")
        axes.set(xlabel="threads", ylabel=label, ylim=(0, 1.05 * axes.get_ylim()[1]), xticks=range(len(numbers)))
        axes.set_xticklabels(map(str, numbers))
    figure.legend(*time.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    return figure


def _bars(points: Points) -> Any:
    """Draw a bar for each point: the time of a step, by what the threads did in it."""
    from daskgpt.profiling.plots import Figure

    figure = Figure(figsize=(13, 2 + 0.3 * len(points)))
    axes, places, ends = figure.subplots(), np.arange(len(points)), np.zeros(len(points))
    low, middle, high = np.array([Spread.of(row["step_ms"] for row in rows).quartiles for rows in points.values()]).T
    for (column, label), color in zip(SHARES.items(), ("#00798c", "#a463f2", "#edae49", "#d9d9d9")):
        widths = middle * [median(rows, column) for rows in points.values()]
        axes.barh(places, widths, 0.7, left=ends, label=label, color=color)
        ends += widths
    axes.errorbar(middle, places, xerr=(middle - low, high - middle), fmt="none", color="#303030", capsize=2)
    axes.set(xlabel="ms a step", xlim=(0, 1.02 * high.max()), yticks=places, ylim=(len(points) - 0.5, -0.5))
    axes.set_yticklabels([described(point, points) for point in points])
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    return figure


def main() -> None:
    """Make the run that the command line describes, on as many cores as it has threads."""
    model, study, point = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: point["threads"]])
    with contextlib.redirect_stdout(sys.stderr):
        row = run(ModelConfig(**model), StudyConfig(**study), DataflowConfig(**point))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
