"""Run training steps on random tokens under many settings of the dataflow, and compare them.

Each run is `python -m daskgpt.bench` in a fresh process, on as many cores as it has threads. A study is a folder:
results.jsonl (the line of `bench --json` per run, with machine, versions and loss), table.md (times, speedup,
efficiency, overlap and memory of every point), and a figure, threads.png and .svg (time, speedup and efficiency by the
number of threads). Speedups are over the sequential run: the fastest point on one thread. Table and figure name it.
Repetitions take turns, so that noise affects all settings alike.

Every combination of the values in the lists below is run. Without lists, and with --threads alone, that is each
barrier on these numbers of threads (1, 2, 4 ... up to all cores): fork-join, phases, tasks, and barrier-free. Settings
without a list are barrier step, grain block, half of the sequences in a chunk, and all cores. Barrier layer always has
grain kernel, the scheduler sync one thread, and a cluster at an address the threads of its workers.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import number_of, require, text_table
from daskgpt.config.files import write_file, written
from daskgpt.config.flags import Parser, add_flags, add_model_flags, given_flags, run_command
from daskgpt.config.model import ModelConfig, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import setting
from daskgpt.config.stopping import ASKING, heeding_interrupts
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling.measure import BenchConfig, Spread, job_of, rounded
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import on_cores, usable_cores
from daskgpt.schedulers.opening import LOCAL_SCHEDULERS, chosen_address, open_scheduler
from daskgpt.training.job import compile_kernels

BARRIERS = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
# Settings of the dataflow that a study varies, those that are words before those that are numbers.
WORDS = ("scheduler", "barrier", "grain", "engine")
DIALS = (*WORDS, "batch_chunk", "sequence_chunk", "threads")
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
QUICK_MODEL = {"blocks": 1, "heads": 2, "channels": 32, "vocabulary": 64, "positions": 16}
QUICK_STUDY = {"batch_size": 4, "sequence_length": 16, "steps": 3, "repetitions": 1}

Row = dict[str, Any]  # the line of `bench --json` of a run, with its point and repetition
Points = Mapping[DataflowConfig, Sequence[Row]]


class StudyConfig(BenchConfig):
    """Settings that all runs of a study share."""

    precision: str = setting("float32", "operands of matrix products", choices=("float32", "bfloat16"))
    window: int = setting(4, "steps in flight with barrier none", unit="steps", least=1, most=2**12)
    repetitions: int = setting(3, "how often every point is run", least=1)
    out: str = setting("", "folder of the study; without it, studies/DATE-TIME")


def parser() -> Parser:
    """Return all flags."""
    flags = Parser(prog="daskgpt.study", description=__doc__)
    flags.add_argument(
        "--quick", action="store_true", help="a very small model, each barrier on one and two threads, one repetition"
    )
    lists = flags.add_argument_group("Values to combine, with commas between them")
    for name in DIALS:
        flag, kind = f"--{name.replace('_', '-')}", words if name in WORDS else numbers
        lists.add_argument(flag, type=kind, metavar="LIST", help=f"values of daskgpt.train's {flag}")
    add_model_flags(flags)
    add_flags(flags, StudyConfig)
    return flags


def words(text: str) -> list[str]:
    """Return the parts of a list."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Return the numbers of a list, 0 for auto; argparse names this function where a text is no such list."""
    return [0 if part == "auto" else int(part) for part in text.split(",")]


def main(arguments: list[str]) -> int:
    """Check everything, make the runs, and print the table."""
    values = parser().parse_args(arguments)
    sizes, settings = given_flags(ModelConfig, values), given_flags(StudyConfig, values)
    if values.quick:  # small, except for given flags
        sizes, settings = QUICK_MODEL | sizes, QUICK_STUDY | settings
    model, study, cores = preset(values.preset, **sizes), StudyConfig(**settings), usable_cores()
    chosen = {dial: getattr(values, dial) for dial in DIALS if getattr(values, dial)}
    chosen = chosen or {"threads": thread_counts(min(cores, 2) if values.quick else cores)}
    if chosen.keys() == {"threads"}:
        chosen = {"barrier": [*BARRIERS], **chosen}
    points = grid(study, cores, chosen)
    for point in points:
        job_of(model, study, point)
    import daskgpt.profiling.plots  # noqa: F401 # refuses to be imported without matplotlib

    folder = Path(study.out or Path("studies") / time.strftime("%Y%m%d-%H%M%S"))
    with written(folder, "study"):
        folder.mkdir(parents=True, exist_ok=True)
    rule, got = "a study must have a folder of its own", {"out": folder}
    require(not any(folder.iterdir()), "study", rule, got, "Give another --out.")
    compile_kernels()
    about = f"{model.blocks} x {model.channels} ({parameter_count(model):,} parameters)"
    about += f", {study.batch_size} x {study.sequence_length} tokens a step, {study.precision}"
    results, failures = run_all(points, study, folder, about, flags_of({"preset": values.preset} | sizes))
    if results:
        print("\n".join([text_table([cells[:4] for cells in table_of(results)]), *caption(results, about)]))
        print(f"study written to {folder / 'table.md'}")
    return 1 if failures else 0


# The grid.


def runnable(point: DataflowConfig) -> DataflowConfig:
    """Return a point without contradictions: one thread with the synchronous scheduler, and those of a cluster at an
    address, engine tasks on clusters only, and tasks of one kernel with fork-join, which waits after each layer.

    Errors   as of `open_scheduler`
    """
    scheduler = chosen_address(point.scheduler)
    threads = 1 if scheduler == "sync" else point.threads or usable_cores()
    threads = threads if scheduler in LOCAL_SCHEDULERS else threads_at(scheduler)
    grain = "kernel" if point.barrier == "layer" else point.grain
    engine = "ranks" if scheduler in ("sync", "threads") else point.engine
    return replace(point, scheduler=scheduler, threads=threads, engine=engine, grain=grain)


@functools.cache
def threads_at(address: str) -> int:
    """Return how many threads all workers of the cluster at an address have. Errors   as of `open_scheduler`"""
    with open_scheduler(address) as scheduler:
        return scheduler.threads


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
    """Return every runnable combination of the chosen values once, in the order of the values; other settings are those
    of the base point.
    """
    base = base_point(study, cores)
    points = (replace(base, **dict(zip(chosen, values))) for values in product(*chosen.values()))
    return list(dict.fromkeys(map(runnable, points)))


def described(point: DataflowConfig, among: Iterable[DataflowConfig] = ()) -> str:
    """Return a point in one line: its settings, or only those in which the points `among` differ."""
    dials = [dial for dial in DIALS if dial != "engine" or point.scheduler not in ("sync", "threads")]
    varied = [dial for dial in dials if not among or len({getattr(other, dial) for other in among}) > 1]
    values = {dial: getattr(point, dial) or "auto" for dial in varied}
    return ", ".join(f"{dial.replace('_', ' ')} {BARRIERS.get(value, value)}" for dial, value in values.items())


# The runs.


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return flags of settings by name."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def bench_flags(study: StudyConfig, point: DataflowConfig) -> list[str]:
    """Return the flags of `daskgpt.bench` that make a run, without those of the model."""
    changed = {f.name: value for f in fields(point) if (value := getattr(point, f.name)) != f.default}
    return flags_of({f.name: getattr(study, f.name) for f in fields(BenchConfig)} | changed)


def run_all(
    points: Sequence[DataflowConfig], study: StudyConfig, folder: Path, about: str, model_flags: Sequence[str] = ()
) -> tuple[Points, list[str]]:
    """Run every point, repetition by repetition; return the runs of points, and a line for each failure.

    Results are written after each run, table and figure after each repetition.

    about   the model and its batch, for people
    """
    rows: list[Row] = []
    runs: dict[DataflowConfig, list[Row]] = {point: [] for point in points}
    failures: list[str] = []
    with tqdm(total=study.repetitions * len(points), unit="run", dynamic_ncols=True) as bar:
        for repetition in range(study.repetitions):
            # Each repetition has another order, so that no point always follows the same one.
            for point in Random(f"{study.seed} {repetition}").sample(points, len(points)):
                bar.set_postfix_str(f"repetition {repetition + 1}: {described(point)}")
                try:
                    measured = run_one([*model_flags, *bench_flags(study, point)], point.threads)
                    rows.append({"point": asdict(point), "repetition": repetition, **measured})
                    runs[point].append(rows[-1])
                    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
                    write_file(folder / "results.jsonl", lines.encode(), "study")
                except RuntimeError as error:
                    failures.append(f"{described(point)}: {error}")
                    bar.write(failures[-1])
                bar.update()
            results = {point: of_point for point, of_point in runs.items() if of_point}
            if results:
                write(results, folder, about)
    return results, failures


def run_one(flags: Sequence[str], threads: int) -> Row:
    """Run `daskgpt.bench` in a process of its own, on as many cores as it has threads; return what it measured.

    Errors   RuntimeError with the last line that the process wrote, if it failed
    """
    command = [sys.executable, "-m", "daskgpt.bench", *flags, "--json"]
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    with on_cores(threads), heeding_interrupts(*ASKING):  # so that it ends with the study
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"the run must end; got exit code {result.returncode}, {last}")
    return dict(json.loads(result.stdout))


# Table and figures.


def spread(rows: Iterable[Row], figure: str = "step") -> Spread:
    """Return the medians of a figure, one for each run."""
    return Spread.of(row["figures"][figure]["median"] for row in rows)


def sequential(points: Points) -> DataflowConfig | None:
    """Return the base of every speedup: the fastest point on one thread; None if there is none."""
    on_one_thread = (point for point in points if point.threads == 1)
    return min(on_one_thread, key=lambda point: spread(points[point]).median, default=None)


def base_of(points: Points) -> float:
    """Return the milliseconds of a step of the base of speedups; nan if there is none."""
    base = sequential(points)
    return spread(points[base]).median if base else math.nan


def table_of(points: Points) -> list[list[str]]:
    """Return a row of text for each point, below a head; the first columns are the most important ones."""
    head = ["settings", "ms a step", "speedup", "efficiency", "runs", *NUMBERS.values(), "tasks", *SHARES.values()]
    table, base = [[*head, "loss"]], base_of(points)
    for point, rows in points.items():
        speedup = base / spread(rows).median
        values = [(speedup, ".2f"), (speedup / point.threads, ".0%"), (len(rows), "")]
        values += [(spread(rows, name).median, ".4g") for name in NUMBERS] + [(rows[-1]["settings"]["tasks"], "")]
        values += [(spread(rows, name).median, ".1%") for name in SHARES]
        cells = ["" if math.isnan(value) else format(value, form) for value, form in values]
        losses = " or ".join(sorted({repr(row["settings"]["loss"]) for row in rows}))
        table.append([described(point), spread(rows).text(""), *cells, losses])
    return table


def caption(points: Points, about: str) -> list[str]:
    """Return what was run, the base of speedups, where, and how busy the machine was."""
    rows, base = [row for of_point in points.values() for row in of_point], sequential(points)
    over = f"speedup over {described(base)}" if base else "no run on one thread, so no speedup"
    cores = max(row["machine"]["cores"] for row in rows)  # runs on fewer threads have fewer
    date = max(row["date"] for row in rows)
    where = f"{rows[0]['machine']['processor']}, {number_of(cores, 'core')}, {date}"
    others = max(row["settings"]["others_cores"] for row in rows)
    busy = [f"other programs kept up to {rounded(others)} cores busy"] * (others > machine.BUSY)
    return [about, over, where, *busy]


def write(points: Points, folder: Path, about: str) -> None:
    """Write the table and the figure."""
    from daskgpt.profiling import plots  # loads matplotlib

    table = table_of(points)
    table.insert(1, ["---"] * len(table[0]))
    lines = [*(f"- {line}" for line in caption(points, about)), ""]
    lines += [*(f"| {' | '.join(cells)} |" for cells in table), ""]
    write_file(folder / "table.md", "\n".join(lines).encode(), "study")
    with plots.style():
        figure = figure_of(points)
        figure.suptitle("\n".join(caption(points, about)[:2]), fontsize=11)
        for kind in ("png", "svg"):
            write_file(folder / f"threads.{kind}", plots.content(figure, kind), "study")


def figure_of(points: Points) -> Any:
    """Draw time, speedup and efficiency by the number of threads, a line for points that differ only in it."""
    from daskgpt.profiling.plots import Figure

    groups = dict[DataflowConfig, dict[int, Sequence[Row]]]()
    for point, rows in points.items():
        groups.setdefault(replace(point, threads=0), {})[point.threads] = rows
    groups = {point: group for point, group in groups.items() if len(group) > 1} or groups
    base, counts = base_of(points), sorted({threads for group in groups.values() for threads in group})
    figure = Figure(figsize=(12, 4.6 + len(groups) / 6))
    runtime, speedup, efficiency = figure.subplots(1, 3)
    for index, (point, line) in enumerate(groups.items()):
        label = described(point, groups) or "measured"
        look = {"color": f"C{index % 10}", "marker": "o^sDvP*X"[index % 8], "label": label}
        low, middle, high = np.array([spread(line[n]).quartiles for n in sorted(line)]).T
        places = [counts.index(threads) for threads in sorted(line)]  # equally far apart, so that all are legible
        runtime.errorbar(places, middle, (middle - low, high - middle), **look)
        speedup.plot(places, base / middle, **look)
        efficiency.plot(places, 100 * base / middle / sorted(line), **look)
    ideals = {"ms a step": [], "speedup (dotted: ideal)": counts, "efficiency (%)": [100] * len(counts)}
    for axes, (label, ideal) in zip(figure.axes, ideals.items()):
        axes.plot(range(len(ideal)), ideal, ":", color="#888888")
        axes.set(xlabel="threads", ylabel=label, ylim=(0, 1.05 * axes.get_ylim()[1]), xticks=range(len(counts)))
        axes.set_xticklabels(map(str, counts))
    figure.legend(*runtime.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    run_command(main)
