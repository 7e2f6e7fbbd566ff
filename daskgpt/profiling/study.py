"""A study: a grid of settings, runs of `daskgpt.bench` for each, a table of their times, and figures.

Repetitions take turns, so that noise affects all settings alike. The folder of a study holds `results.jsonl` (the line
of `bench --json` per run; a study is continued from it), `table.md`, and figures as PNG and SVG.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import number_of, refusing, require
from daskgpt.config.files import write_file
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import setting
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling.measure import BatchConfig, Spread, rounded
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import on_cores, usable_cores

BARRIERS = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
# Settings of the dataflow that a study varies, and the order of those values that are words.
DIALS = ("threads", "scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain", "engine")
ORDER: dict[str, tuple[str, ...]] = {
    "scheduler": ("sync", "threads", "local"),
    "barrier": tuple(BARRIERS),
    "grain": ("kernel", "segment", "block", "chunk", "auto"),
    "engine": ("ranks", "tasks"),
}
NUMBERS = {"critical_path": "critical path (ms)", "peak": "memory (GB)"}
SHARES = {  # of the threads' time
    "overhead": "without a kernel",
    "inside": "between a task's kernels",
    "scheduling": "scheduling: a task was ready",
    "waiting": "waiting: no task was ready",
    "overlap": "layers at once",
    "steps_overlap": "steps at once",
}
# Libraries below a run must not start threads beside those of the scheduler.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Row = dict[str, Any]
Points = Mapping[DataflowConfig, Sequence[Row]]


class StudyConfig(BatchConfig):
    """Settings that all runs of a study share."""

    precision: str = setting("float32", "operands of matrix products", choices=("float32", "bfloat16"))
    window: int = setting(4, "steps in flight with barrier none", unit="steps", least=1, most=2**12)
    steps: int = setting(15, "timed steps of a run", unit="steps", least=1, most=2**20)
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
    """Return the settings of points that are not chosen: all cores, barrier step, grain block, half of the sequences
    in a chunk.
    """
    sequences = study.batch_size // 2 if study.batch_size % 2 == 0 else study.batch_size
    base = DataflowConfig(batch_chunk=sequences, sequence_chunk=study.sequence_length, threads=cores, grain="block")
    return replace(base, scheduler="threads", window=study.window, precision=study.precision)


def thread_counts(cores: int) -> list[int]:
    """Return the powers of two below the number of cores, and that number."""
    return [2**power for power in range(10) if 2**power < cores] + [cores]


def grid(study: StudyConfig, cores: int, chosen: Mapping[str, Sequence[Any]]) -> list[DataflowConfig]:
    """Return every runnable combination of the chosen values once; other settings are those of the base point."""
    base = base_point(study, cores)
    points = (replace(base, **dict(zip(chosen, values))) for values in product(*chosen.values()))
    return list(dict.fromkeys(map(runnable, points)))


def described(point: DataflowConfig, among: Iterable[DataflowConfig] = ()) -> str:
    """Return a point in one line: its settings, or only those in which the points `among` differ."""
    dials = [dial for dial in DIALS if dial != "engine" or point.scheduler == "local"]
    varied = [dial for dial in dials if not among or len({getattr(other, dial) for other in among}) > 1]
    values = {dial: getattr(point, dial) or "auto" for dial in varied}
    return ", ".join(f"{dial.replace('_', ' ')} {BARRIERS.get(value, value)}" for dial, value in values.items())


# The runs.


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return flags of settings by name."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def bench_flags(study: StudyConfig, point: DataflowConfig) -> list[str]:
    """Return the flags of `daskgpt.bench` that make a run, without those of the model."""
    names = ("steps", "warmup", *(f.name for f in fields(BatchConfig)))
    changed = {f.name: value for f in fields(point) if (value := getattr(point, f.name)) != f.default}
    return flags_of({name: getattr(study, name) for name in names} | changed)


class Results:
    """The runs of a study, in memory and in a file.

    rows   a run each: what all runs share, the point, the repetition, and the line of `bench --json`

    Errors   ValueError if the file is of another study: another model or batch; or if a line lacks something
    """

    def __init__(self, path: Path, model: ModelConfig, study: StudyConfig) -> None:
        self.path, self.model, self.study = path, model, study
        left_out = {"repetitions": None, "out": None}
        self.shared: Row = json.loads(json.dumps(asdict(model) | asdict(study) | left_out))
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # without a line that is not whole
        self.rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        rule, got = "every line must be a point, its repetition and the line of bench --json", {"file": path}
        with refusing((ArithmeticError, LookupError, TypeError, ValueError), "study", rule, got, "Give another --out."):
            _ = table_of(self.points), self.rows and caption(self), {row["repetition"] for row in self.rows}

    def _row(self, number: int, line: bytes) -> Row:
        shared: Row = {}
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row: Row = json.loads(line)
            shared.update(row["shared"])
        differing = [name for name in self.shared if shared.get(name, "nothing") != self.shared[name]]
        got = [f"{name}={self.shared[name]}, and {name}={shared.get(name, 'nothing')}" for name in differing[:3]]
        rule, advice = "a folder must hold runs of one study", "Give another --out."
        require(not got, "study", rule, f"{', '.join(got)} in line {number} of {self.path}", advice)
        return row

    def add(self, point: DataflowConfig, repetition: int, measured: Row) -> None:
        """Add a run, and write the file."""
        self.rows.append({"shared": self.shared, "point": asdict(point), "repetition": repetition, **measured})
        write_file(self.path, "".join(f"{json.dumps(row)}\n" for row in self.rows).encode(), "study")

    @property
    def points(self) -> dict[DataflowConfig, list[Row]]:
        """The runs of each point, in the order of the settings."""
        points: dict[DataflowConfig, list[Row]] = {}
        for row in self.rows:
            points.setdefault(DataflowConfig(**row["point"]), []).append(row)
        return {point: points[point] for point in sorted(points, key=rank)}


def rank(point: DataflowConfig) -> tuple[Any, ...]:
    """Return what points are sorted by: words as ORDER has them, then numbers by size."""
    words = [(getattr(point, name), order) for name, order in ORDER.items()]
    ranks = (order.index(word) if word in order else len(order) for word, order in words)
    return *ranks, point.batch_chunk, point.sequence_chunk, point.threads


def run_all(points: Sequence[DataflowConfig], results: Results, model_flags: Sequence[str] = ()) -> list[str]:
    """Run every point that the results lack, repetition by repetition; return a line for each failure.

    Table and figure are written after each repetition.
    """
    study = results.study
    failures: list[str] = []
    # Each repetition has another order, so that no point always follows the same one.
    orders = [Random(f"{study.seed} {n}").sample(points, len(points)) for n in range(study.repetitions)]
    done = {(DataflowConfig(**row["point"]), row["repetition"]) for row in results.rows}
    missing = [[point for point in order if (point, n) not in done] for n, order in enumerate(orders)]
    with tqdm(total=sum(map(len, missing)), unit="run", dynamic_ncols=True) as bar:
        for repetition, order in enumerate(missing):
            for point in order:
                bar.set_postfix_str(f"repetition {repetition + 1}: {described(point)}")
                try:
                    flags = [*model_flags, *bench_flags(study, point)]
                    results.add(point, repetition, run_one(flags, point.threads))
                except RuntimeError as error:
                    failures.append(f"{described(point)}: {error}")
                    bar.write(failures[-1])
                bar.update()
            if results.rows and (order or not bar.total):
                write(results)
    return failures


def run_one(flags: Sequence[str], threads: int) -> Row:
    """Run `daskgpt.bench` in a process of its own, on as many cores as it has threads; return what it measured.

    Errors   RuntimeError with the last line that the process wrote, if it failed
    """
    command = [sys.executable, "-m", "daskgpt.bench", *flags, "--json"]
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    with on_cores(threads):
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"the run must end; got exit code {result.returncode}, {last}")
    return dict(json.loads(result.stdout))


# Table and figures.


def median(rows: Iterable[Row], figure: str = "step") -> float:
    """Return the median of a figure; nan without rows."""
    return float(np.median([row["figures"][figure]["median"] for row in rows] or [math.nan]))


def spread(rows: Iterable[Row]) -> Spread:
    """Return the milliseconds of a step, a median for each run."""
    return Spread.of(row["figures"]["step"]["median"] for row in rows)


def sequential(points: Points) -> Sequence[Row]:
    """Return the runs of the base of every speedup: the fastest point on one thread; none if there is none."""
    return min((rows for point, rows in points.items() if point.threads == 1), key=median, default=())


def table_of(points: Points) -> list[list[str]]:
    """Return a row of text for each point, below a head; the first columns are the most important ones."""
    head = ["settings", "ms a step", "speedup", "efficiency", "runs", *NUMBERS.values(), "tasks", *SHARES.values()]
    table, base = [[*head, "loss"]], median(sequential(points))
    for point, rows in points.items():
        speedup = base / median(rows)
        numbers = [(speedup, ".2f"), (speedup / point.threads, ".0%"), (len(rows), "")]
        numbers += [(median(rows, name), ".4g") for name in NUMBERS] + [(rows[-1]["settings"]["tasks"], "")]
        numbers += [(median(rows, name), ".1%") for name in SHARES]
        cells = ["" if math.isnan(value) else format(value, form) for value, form in numbers]
        losses = " or ".join(sorted({repr(row["settings"]["loss"]) for row in rows}))
        table.append([described(point), spread(rows).text(""), *cells, losses])
    return table


def caption(results: Results) -> list[str]:
    """Return what was run, the base of speedups, where, and how busy the machine was."""
    model, study, row, base = results.model, results.study, results.rows[-1], sequential(results.points)
    size = f"{model.blocks} x {model.channels} ({parameter_count(model):,} parameters)"
    size += f", {study.batch_size} x {study.sequence_length} tokens a step, {study.precision}"
    over = "no run on one thread, so no speedup"
    if base:
        over = f"speedup over {described(DataflowConfig(**base[0]['point']))}"
    cores = max(one["machine"]["cores"] for one in results.rows)  # runs on fewer threads have fewer
    where = f"{row['machine']['processor']}, {number_of(cores, 'core')}, {row['date']}"
    others = max(row["settings"]["others_cores"] for row in results.rows)
    busy = [f"other programs kept up to {rounded(others)} cores busy"] * (others > machine.BUSY)
    return [size, over, where, *busy]


def write(results: Results) -> None:
    """Write the table and the figure beside the results."""
    from daskgpt.profiling import plots  # loads matplotlib

    table = table_of(results.points)
    table.insert(1, ["---"] * len(table[0]))
    lines = [*(f"- {line}" for line in caption(results)), "", *(f"| {' | '.join(cells)} |" for cells in table), ""]
    write_file(results.path.with_name("table.md"), "\n".join(lines).encode(), "study")
    with plots.style():
        figure = figure_of(results.points)
        figure.suptitle("\n".join(caption(results)[:2]), fontsize=11)
        for kind in ("png", "svg"):
            write_file(results.path.with_name(f"threads.{kind}"), plots.content(figure, kind), "study")


def figure_of(points: Points) -> Any:
    """Draw time, speedup and efficiency by the number of threads, a line for points that differ only in it."""
    from daskgpt.profiling.plots import Figure

    groups = dict[DataflowConfig, dict[int, Sequence[Row]]]()
    for point, rows in points.items():
        groups.setdefault(replace(point, threads=0), {})[point.threads] = rows
    groups = {point: group for point, group in groups.items() if len(group) > 1} or groups
    base, numbers = median(sequential(points)), sorted({threads for group in groups.values() for threads in group})
    figure = Figure(figsize=(12, 4.6 + len(groups) / 6))
    time, speedup, efficiency = figure.subplots(1, 3)
    for index, (point, line) in enumerate(groups.items()):
        label = described(point, groups) or "measured"
        look = {"color": f"C{index % 10}", "marker": "o^sDvP*X"[index % 8], "label": label}
        low, middle, high = np.array([spread(line[n]).quartiles for n in sorted(line)]).T
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
