"""Running a study: every run in a fresh process, and the repetitions in turns, so that noise hits all points alike.

`python -m daskgpt.profiling.study.runs JSON` makes one run and prints what it measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from daskgpt.config.model import GPT2Config
from daskgpt.graph.calls import PHASES
from daskgpt.profiling import machine
from daskgpt.profiling.measure import Steps
from daskgpt.profiling.records import PACKAGES, significant
from daskgpt.profiling.statistics import Spread
from daskgpt.profiling.study.grid import BARRIERS, Point, StudyConfig, job_of_point
from daskgpt.profiling.study.table import SHARES, Table, model_name
from daskgpt.profiling.timeline import Timeline, describe_summary, summarise
from daskgpt.schedulers.connect import open_scheduler
from daskgpt.schedulers.local import usable_cores
from daskgpt.training.job import compile_kernels

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def run_all(
    model: GPT2Config, study: StudyConfig, points: Sequence[Point], table: Table, after: Callable[[], None]
) -> list[str]:
    """Run every point that the table lacks, repetition by repetition; return what failed, a line each.

    after   called after each repetition; once, where nothing was left to run
    """
    failed: list[str] = []
    todo = {n: [p for p in shuffled(points, study, n) if (p, n) not in table] for n in range(study.repetitions)}
    start, took = time.monotonic(), 0.0
    bar = tqdm(total=sum(map(len, todo.values())), unit="run", dynamic_ncols=True)
    for repetition, own in todo.items():
        elapsed = time.monotonic() - start
        if took and elapsed + took * len(own) > study.minutes * 60:
            bar.write(f"stopped after {repetition} of {study.repetitions} repetitions: --minutes {study.minutes:g}")
            break
        for point in own:
            bar.set_postfix_str(f"repetition {repetition + 1}: {point}")
            try:
                table.add(point, repetition, run_one(model, study, point))
            except RuntimeError as error:
                failed.append(f"{point}: {error}")
                bar.write(failed[-1])
            bar.update()
        if own:
            took = (time.monotonic() - start - elapsed) / len(own)
            after()
    bar.close()
    if not bar.total:
        after()
    return failed


def shuffled(points: Sequence[Point], study: StudyConfig, repetition: int) -> list[Point]:
    """Return the points in another order for each repetition, so that no point always follows the same one."""
    return Random(f"{study.seed} {repetition}").sample(points, len(points))


def run_one(model: GPT2Config, study: StudyConfig, point: Point) -> dict[str, Any]:
    """Return the columns of one run, made by a process of its own.

    Errors   RuntimeError with the last line that the process wrote, where it failed
    """
    described = json.dumps([asdict(model), asdict(study), asdict(point)])
    command = [sys.executable, "-m", "daskgpt.profiling.study.runs", described]
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"the run must end; got exit code {result.returncode}, {last}")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def run(model: GPT2Config, study: StudyConfig, point: Point) -> dict[str, Any]:
    """Time and record some steps; return the columns of its row in the table.

    The time of a step and those of its phases come from the same steps, in which every kernel call is recorded. Others
    before and after them, which are not recorded, show what recording costs. A phase has a time of its own only where
    it never runs beside another: its share of the recorded steps, of the median step.
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
        found = summarise(timeline)
        tasks, grain, chunk = steps.tasks, steps.grain, steps.steps.chunk
    seconds = Spread.of([(window.end - window.start) / len(window.steps) for window in timeline.windows])
    low, middle, high = (1e3 * value for value in seconds.quartiles)
    part = middle / (sum(found.phases.values()) or 1.0)
    own = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch_chunk_used": chunk[0],
        "sequence_chunk_used": chunk[1],
        "grain_used": grain,
        "tasks": tasks,
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


def write_timelines(model: GPT2Config, study: StudyConfig, folder: Path) -> None:
    """Write FOLDER/BARRIER.html and .json of every barrier, with as many steps as a window has, FOLDER/barriers.html
    with all of them on one time scale, and FOLDER/fork_join.svg with the first and the last.

    A chunk holds a quarter of the sequences, so that there is something to overlap. A task is what one chunk does
    between two gathers, for fork-join one kernel. Of --repetitions recordings the shortest is kept: other programs can
    only make one longer.
    """
    from daskgpt.profiling.pages import write_picture, write_side_by_side, write_timeline  # loads Bokeh

    chunk = max(study.batch_size // 4, 1)
    timelines: dict[str, Timeline] = {}
    for barrier, label in BARRIERS.items():
        point = Point(usable_cores(), "threads", barrier, chunk, study.sequence_length, "segment").runnable()
        job = job_of_point(model, study, point)
        with open_scheduler("threads", point.threads) as scheduler:
            steps = Steps(job, scheduler, study.seed)
            steps.run(max(study.warmup, study.window))
            found = [steps.timeline(study.window) for _ in range(study.repetitions)]
        shortest = timelines[f"barrier {label}"] = min(found, key=lambda own: summarise(own).wall)
        _, page = write_timeline(shortest, folder / barrier)
        print(f"\nbarrier {barrier}: {page}\n{describe_summary(summarise(shortest))}")
    name = model_name(asdict(model))
    title = f"{study.window} steps of {name}, {study.batch_size} x {study.sequence_length} tokens a step"
    first, *_, last = timelines
    picture = write_picture({name: timelines[name] for name in (first, last)}, folder / "fork_join.svg")
    print(f"\nfork-join beside barrier-free, a picture: {picture}")
    print(f"all barriers on one time scale: {write_side_by_side(timelines, folder / 'barriers.html', title)}")


def main() -> None:
    """Make the run that the command line describes, on as many cores as it has threads."""
    model, study, point = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(point["threads"], 1)])
    with contextlib.redirect_stdout(sys.stderr):
        row = run(GPT2Config(**model), StudyConfig(**study), Point(**point))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
