"""A study: the settings that it compares, its runs, each in a fresh process, and the table of their results.

Repetitions take turns, so that noise affects all settings alike. `python -m daskgpt.profiling.study JSON` makes one run
and prints its measurements.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from daskgpt.config.errors import require
from daskgpt.config.groups import groups_of_batch
from daskgpt.config.model import PRESETS, ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import documented, setting
from daskgpt.graph.calls import PHASES
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling import calibrate
from daskgpt.profiling.measure import BatchConfig, Steps, job_of
from daskgpt.profiling.records import PACKAGES, Figure, Record, Spread, measured, significant
from daskgpt.profiling.simulate import forecast
from daskgpt.profiling.timeline import Timeline, describe_summary, summarise
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.job import Job, compile_kernels

BARRIERS = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
# Values that are words, in the order in which they are shown; the other settings of a point are numbers.
ORDER: dict[str, tuple[str, ...]] = {
    "scheduler": ("sync", "threads", "local"),
    "barrier": tuple(BARRIERS),
    "grain": ("kernel", "segment", "block", "chunk", "auto"),
    "engine": ("ranks", "tasks"),
}
TOKEN_PARTS = (1, 2, 4, 8)
MOST_CHUNKS = 8


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
    minutes: float = setting(
        28.0, "after the first repetition, begin none that would probably end later", unit="minutes", least=0
    )
    out: str = setting("", "folder of the study, an earlier one to continue; without it, studies/DATE-TIME")


# Settings of the dataflow that a study varies; those of a point, which is a DataflowConfig.
DIALS = ("threads", "scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain", "engine")


def runnable(point: DataflowConfig) -> DataflowConfig:
    """Return a point without contradictions: one thread with the synchronous scheduler, engine tasks on clusters
    only, and tasks of one kernel with fork-join, which waits after each layer.
    """
    return replace(
        point,
        threads=1 if point.scheduler == "sync" else point.threads,
        engine=point.engine if point.scheduler == "local" else "ranks",
        grain="kernel" if point.barrier == "layer" else point.grain,
    )


def described(point: DataflowConfig) -> str:
    """Return a point in one line, for people."""
    chunks = f"chunks of {point.batch_chunk or 'auto'} x {point.sequence_chunk or 'auto'}"
    engine = ", engine tasks" * (point.engine == "tasks")
    return f"{point.threads} x {point.scheduler}, barrier {point.barrier}, {chunks}, grain {point.grain}{engine}"


def base_point(study: StudyConfig, cores: int) -> DataflowConfig:
    """Return the point that the others differ from in one setting: all cores, barrier step, grain block."""
    return DataflowConfig(
        batch_chunk=study.batch_size // 2 if study.batch_size % 2 == 0 else study.batch_size,
        sequence_chunk=study.sequence_length,
        scheduler="threads",
        grain="block",
        threads=cores,
        window=study.window,
        precision=study.precision,
    )


def default_grid(study: StudyConfig, cores: int) -> list[DataflowConfig]:
    """Return the points of a study's questions: threads and barriers, slicing, grain, and schedulers."""
    base = base_point(study, cores)
    points = [replace(base, threads=n, barrier=barrier) for n in thread_counts(cores) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=b, sequence_chunk=t) for b, t in slicings(study)]
    points += [replace(base, grain=grain) for grain in ("kernel", "segment", "block", "chunk")]
    points += [replace(base, scheduler=scheduler) for scheduler in ORDER["scheduler"]]
    points += [replace(base, scheduler="local", engine="tasks")]
    return distinct(points)


def quick_grid(study: StudyConfig, cores: int) -> list[DataflowConfig]:
    """Return a few points, enough to fill every section of the report."""
    base = base_point(study, min(cores, 2))
    points = [replace(base, threads=n, barrier=barrier) for n in (1, base.threads) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=study.batch_size, sequence_chunk=study.sequence_length // 2)]
    points += [replace(base, grain="kernel"), replace(base, scheduler="sync")]
    return distinct(points)


def chosen_grid(study: StudyConfig, cores: int, chosen: Mapping[str, Sequence[Any]]) -> list[DataflowConfig]:
    """Return every combination of the chosen values; other settings are those of the base point."""
    base = base_point(study, cores)
    return distinct(replace(base, **dict(zip(chosen, values))) for values in product(*chosen.values()))


def distinct(points: Iterable[DataflowConfig]) -> list[DataflowConfig]:
    """Return each runnable point once."""
    return list(dict.fromkeys(map(runnable, points)))


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4 ... and all cores."""
    return [2**power for power in range(10) if 2**power < cores] + [cores]


def slicings(study: StudyConfig) -> list[tuple[int, int]]:
    """Return chunks (sequences, tokens): all sequences, half of them and one, with their tokens in 1 to 8 parts.

    No batch is cut into more than MOST_CHUNKS chunks, except into single sequences.
    """
    size, length = study.batch_size, study.sequence_length
    return [
        (sequences, length // parts)
        for sequences in dict.fromkeys((size, max(size // 2, 1), 1))
        for parts in TOKEN_PARTS
        if size % sequences == length % parts == 0 and (parts == 1 or size // sequences * parts <= MOST_CHUNKS)
    ]


def job_of_point(config: ModelConfig, study: StudyConfig, point: DataflowConfig) -> Job:
    """Return the checked job of a point's runs.

    Errors   ValueError if the point does not fit the model or the batch
    """
    return job_of(config, study, point)


MODEL = tuple(f.name for f in fields(ModelConfig))
SHARED = ("batch_size", "sequence_length", "groups", "precision", "window", "warmup", "seed")
PHASES_MS = ("forward_ms", "backward_ms", "update_ms")
SHARES = ("overlap", "steps_overlap", "kernel_share", "inside_share", "scheduling_share", "waiting_share")
TEXT = ("date", "loss", "machine", "cpu", "python", "daskgpt", *PACKAGES)
FOUND = (
    *("batch_chunk_used", "sequence_chunk_used", "grain_used", "tasks", "steps"),
    *(
        "predicted_ms",
        "step_ms",
        "step_ms_q1",
        "step_ms_q3",
        "tokens_per_s",
        *PHASES_MS,
        "recording_cost",
        "critical_path_ms",
    ),
    *(*SHARES, "peak_gb", "others_cores", "cores", *TEXT),
)
COLUMNS = (*MODEL, *SHARED, *DIALS, "repetition", *FOUND)
# Column -> figure and unit of a record.
FIGURES = {
    **{
        "step_ms": ("step", "ms"),
        "predicted_ms": ("predicted", "ms"),
        "critical_path_ms": ("critical_path", "ms"),
        "peak_gb": ("peak", "GB"),
    },
    **{name: (name, "") for name in SHARES},
}

Row = dict[str, Any]


class Table:
    """The rows of a study, in memory and on disk.

    Errors   ValueError if the file is of another study: other columns, another model or batch
    """

    def __init__(self, path: Path, model: ModelConfig, study: StudyConfig) -> None:
        self.path = path
        self.shared = asdict(model) | {name: getattr(study, name) for name in SHARED}
        self.shared["groups"] = groups_of_batch(study.batch_size, study.sequence_length, study.groups)
        self.rows = list(self._read()) if path.exists() else []

    def _read(self) -> Iterator[Row]:
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            rule, advice = "the table must have the columns of this version", "Give another --out."
            require(tuple(reader.fieldnames or ()) == COLUMNS, "study", rule, {"file": self.path}, advice)
            for texts in reader:
                row = {name: text if name in TEXT else _value(text) for name, text in texts.items()}
                for name, value in self.shared.items():
                    got = f"{name}={value}, and {name}={row[name]} in {self.path}"
                    require(row[name] == value, "study", "a folder must hold one study", got, advice)
                yield row

    def __contains__(self, run: tuple[DataflowConfig, int]) -> bool:
        point, repetition = run
        wanted = asdict(point) | {"repetition": repetition}
        return any(wanted.items() <= row.items() for row in self.rows)

    def add(self, point: DataflowConfig, repetition: int, found: Mapping[str, Any]) -> None:
        """Append a run's row."""
        new = not self.path.exists()
        row = self.shared | asdict(point) | {"repetition": repetition} | dict(found)
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)


def _value(text: str) -> Any:
    """Return the number or word of a cell; None for an empty one."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


class Rows:
    """The rows of a study, seen from a reference point: the one whose values the most points share."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = list(rows)
        self.runs: Counter[tuple[Any, ...]] = Counter(tuple(row[dial] for dial in DIALS) for row in rows)
        counts = [Counter(values) for values in zip(*self.runs)]

        def commonness(point: tuple[Any, ...]) -> tuple[int, bool, tuple[Any, ...]]:
            return sum(own[value] for own, value in zip(counts, point)), "step" in point, point

        most_common = max(self.runs, key=commonness)
        self.reference: dict[str, Any] = dict(zip(DIALS, most_common))

    def at(self, **values: Any) -> list[Row]:
        """Return the rows with these values, and those of the reference for the other settings; fork-join has grain
        kernel unless a grain is given.
        """
        wanted = self.reference | values
        if wanted["barrier"] == "layer" and "grain" not in values:
            wanted["grain"] = "kernel"
        return [row for row in self.all if wanted.items() <= row.items()]

    def values(self, dial: str) -> list[Any]:
        """Return the values of a setting that were run: words as ORDER has them, numbers by size."""
        order = ORDER.get(dial, ())
        own = {row[dial] for row in self.all}
        return sorted(own, key=lambda value: (order.index(value) if value in order else len(order), value))

    def along(self, dial: str, **values: Any) -> dict[Any, list[Row]]:
        """Return the rows of each value of a setting that was run."""
        return {value: rows for value in self.values(dial) if (rows := self.at(**{dial: value}, **values))}

    def sequential(self, column: str = "step_ms") -> Spread | None:
        """Return the times of the sequential run, the base of every speedup: one thread, and no barrier that costs.

        On one thread a barrier between phases costs next to nothing, and phases have times of their own there.
        """
        return spread(self.at(threads=1, barrier=self.base), column) if self.base else None

    @property
    def base(self) -> str:
        """Return the barrier of the sequential run; empty without one."""
        return next((barrier for barrier in ("phase", "step", "none") if self.at(threads=1, barrier=barrier)), "")

    def records(self, arguments: Sequence[str]) -> list[Record]:
        """Return a record for each point, whose turns are its runs; `arguments` are the study's command line."""
        shared = ("batch_size", "sequence_length", "groups", "precision", "window", "tasks", "others_cores", "loss")
        found = []
        for point in self.runs:
            rows = [row for row in self.all if tuple(row[dial] for dial in DIALS) == point]
            first, spreads = rows[0], {column: spread(rows, column) for column in FIGURES}
            settings = {"model": model_name(first)} | {name: first[name] for name in (*DIALS, *shared)}
            figures = {FIGURES[name][0]: Figure.of(own, FIGURES[name][1]) for name, own in spreads.items() if own}
            record = measured("python -m daskgpt.study", arguments, figures, settings)
            where = {**record.machine, "processor": first["cpu"], "cores": first["cores"]}
            versions = {name: first[name] for name in record.versions}
            found.append(replace(record, date=str(rows[-1]["date"]), machine=where, versions=versions))
        return found


def spread(rows: Iterable[Row], column: str = "step_ms") -> Spread | None:
    """Return the values of a column, of those rows that have one; None if there is none."""
    values = tuple(float(row[column]) for row in rows if row[column] is not None)
    return Spread(values) if values else None


def spreads(found: Mapping[Any, Iterable[Row]], column: str = "step_ms") -> dict[Any, Spread]:
    """Return the `spread` of the rows of each name, without names that have none."""
    own = {name: spread(rows, column) for name, rows in found.items()}
    return {name: values for name, values in own.items() if values is not None}


def median(rows: Iterable[Row], column: str) -> float:
    """Return the median of a column; 0 if no row has a value."""
    found = spread(rows, column)
    return found.median if found else 0.0


def speedups(times: Mapping[int, Spread], base: Spread | None) -> dict[int, float]:
    """Return the time of the base divided by the time with each number of threads; empty without a base."""
    return {threads: base.median / own.median for threads, own in times.items()} if base else {}


def model_name(row: Row) -> str:
    """Return the name of a run's model, or its numbers, such as `gpt2 (124,439,808 parameters)`."""
    config = ModelConfig(**{name: row[name] for name in MODEL})
    known = [name for name, size in PRESETS.items() if size == config]
    numbers = f"a GPT-2 with {count(config.blocks, 'block')} of {config.channels} channels"
    return f"{known[0] if known else numbers} ({parameter_count(config):,} parameters)"


def count(number: int, what: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def run_all(
    model: ModelConfig,
    study: StudyConfig,
    points: Sequence[DataflowConfig],
    table: Table,
    after: Callable[[], None],
    predicted: Mapping[DataflowConfig, float],
) -> list[str]:
    """Run every point that the table lacks, repetition by repetition; return a line for each failure.

    predicted   ms a step of points
    after       called after each repetition that leaves rows in the table; once, if nothing was left to run
    """
    failed: list[str] = []
    # Each repetition has another order, so that no point always follows the same one.
    orders = [Random(f"{study.seed} {n}").sample(points, len(points)) for n in range(study.repetitions)]
    todo = [[point for point in order if (point, n) not in table] for n, order in enumerate(orders)]
    start, took = time.monotonic(), 0.0
    bar = tqdm(total=sum(map(len, todo)), unit="run", dynamic_ncols=True)
    for repetition, own in enumerate(todo):
        elapsed = time.monotonic() - start
        if took and elapsed + took * len(own) > study.minutes * 60:
            bar.write(f"stopped after {repetition} of {study.repetitions} repetitions: --minutes {study.minutes:g}")
            break
        for point in own:
            bar.set_postfix_str(f"repetition {repetition + 1}: {described(point)}")
            try:
                found = run_one(model, study, point)
                table.add(point, repetition, found | {"predicted_ms": predicted.get(point)})
            except RuntimeError as error:
                failed.append(f"{described(point)}: {error}")
                bar.write(failed[-1])
            bar.update()
        if own and table.rows:
            took = (time.monotonic() - start - elapsed) / len(own)
            after()
    bar.close()
    if not bar.total:
        after()
    return failed


def predicted_times(
    model: ModelConfig, study: StudyConfig, points: Sequence[DataflowConfig]
) -> dict[DataflowConfig, float]:
    """Return the predicted ms a step of those points that are one process, each on as many cores as it has threads; a
    machine that is not calibrated is calibrated first.
    """
    costs = calibrate.load()
    if costs is None:
        costs = calibrate.calibrate()
        print(f"calibrate  written to {costs.save()}")
    alone = [point for point in points if point.scheduler != "local"]
    print(f"predict    {count(len(alone), 'point')}")
    jobs = {point: job_of_point(model, study, point) for point in alone}
    return {point: 1e3 * forecast(job, cores=point.threads, costs=costs)[0].seconds for point, job in jobs.items()}


def run_one(model: ModelConfig, study: StudyConfig, point: DataflowConfig) -> dict[str, Any]:
    """Make one run in a process of its own; return its columns.

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


def run(model: ModelConfig, study: StudyConfig, point: DataflowConfig) -> dict[str, Any]:
    """Time and record some steps; return the columns of its row in the table.

    The times of a step and of its phases come from the same steps, in which every kernel call is recorded. Steps before
    and after them, which are not recorded, show the cost of recording. Phases have times only if they never overlap:
    their shares of the recorded steps, of the median step.
    """
    job = job_of_point(model, study, point)
    compile_kernels(job.precision)  # else the first step, by whose times auto chooses, loads them
    others = machine.busy_cores()
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        steps = Steps(job, scheduler, study.seed)
        number = max(study.steps, math.ceil(study.seconds / min(steps.run(study.warmup))))
        steps.reset_peak()
        bare = steps.run(-(-number // 2))
        timeline = steps.timeline(number)
        bare += steps.run(-(-number // 2))
        peak = steps.peak()
    found, chunk = summarise(timeline), steps.steps.chunk
    seconds = Spread.of([(window.end - window.start) / len(window.steps) for window in timeline.windows])
    low, middle, high = (1e3 * value for value in seconds.quartiles)
    part = middle / (sum(found.phases.values()) or 1.0)
    own = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch_chunk_used": chunk[0],
        "sequence_chunk_used": chunk[1],
        "grain_used": steps.grain,
        "tasks": steps.tasks,
        "steps": seconds.n,
        "step_ms": middle,
        "step_ms_q1": low,
        "step_ms_q3": high,
        "recording_cost": middle / Spread.of(bare).median / 1e3 - 1,
        "tokens_per_s": 1e3 * study.batch_size * study.sequence_length / middle,
        **{f"{name}_ms": part * found.phases[name] if found.phases else None for name in PHASES},
        "critical_path_ms": found.critical_path * 1e3 / found.steps,
        **{name: getattr(found, name) for name in SHARES},
        "peak_gb": peak / 1e9,
        "loss": repr(steps.losses[study.warmup + study.steps]),
        "others_cores": others,
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        **machine.versions(*PACKAGES),
    }
    return {name: significant(value) if isinstance(value, float) else value for name, value in own.items()}


def write_timelines(model: ModelConfig, study: StudyConfig, folder: Path) -> None:
    """Write a timeline of each barrier to FOLDER/BARRIER.html and .json, and all of them to FOLDER/barriers.html.

    A timeline has as many steps as a window. A chunk has a quarter of the sequences, so that chunks can overlap. A task
    is a segment of a chunk, and one kernel with fork-join. The shortest of --repetitions recordings is kept, since
    other programs can only make one longer.
    """
    from daskgpt.profiling.pages import write_side_by_side, write_timeline  # loads Bokeh

    base = replace(base_point(study, usable_cores()), batch_chunk=max(study.batch_size // 4, 1), grain="segment")
    timelines: dict[str, Timeline] = {}
    for barrier, label in BARRIERS.items():
        job = job_of_point(model, study, runnable(replace(base, barrier=barrier)))
        with open_scheduler("threads", base.threads) as scheduler:
            steps = Steps(job, scheduler, study.seed)
            steps.run(max(study.warmup, study.window))
            found = [steps.timeline(study.window) for _ in range(study.repetitions)]
        shortest = timelines[f"barrier {label}"] = min(found, key=lambda own: summarise(own).wall)
        _, page = write_timeline(shortest, folder / barrier)
        print(f"\nbarrier {barrier}: {page}\n{describe_summary(summarise(shortest))}")
    size = f"{study.batch_size} x {study.sequence_length} tokens a step"
    title = f"{study.window} steps of {model_name(asdict(model))}, {size}"
    page = write_side_by_side(timelines, folder / "barriers.html", title)
    print(f"\nall barriers on one time scale: {page}")


def main() -> None:
    """Make the run that the command line describes, on as many cores as it has threads."""
    model, study, point = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(point["threads"], 1)])
    with contextlib.redirect_stdout(sys.stderr):
        row = run(ModelConfig(**model), StudyConfig(**study), DataflowConfig(**point))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
