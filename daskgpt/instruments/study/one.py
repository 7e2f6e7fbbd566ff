"""One run of a study, in a process of its own: `python -m daskgpt.instruments.study.one ORDER` prints what it found."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from daskgpt.config.model import GPT2Config
from daskgpt.graph.calls import PHASES
from daskgpt.instruments import machine
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.statistics import Spread
from daskgpt.instruments.study.grid import Point, StudyConfig, job_of_point
from daskgpt.instruments.timeline import Summary, summarise
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.job import compile_kernels

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
PACKAGES = ("numpy", "numba", "dask", "distributed")


@dataclass(frozen=True)
class Order:
    """What one run needs to know."""

    model: GPT2Config
    study: StudyConfig
    point: Point

    def text(self) -> str:
        """For the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Order:
        values = json.loads(text)
        return cls(GPT2Config(**values["model"]), StudyConfig(**values["study"]), Point(**values["point"]))


def run(order: Order) -> dict[str, Any]:
    """Time and record some steps of a point: the columns of its row in the table.

    The time of a step and those of its phases come from the same steps, in which every kernel call is recorded. Others
    before and after them, which are not, tell what recording costs.
    """
    study = order.study
    job = job_of_point(order.model, study, order.point)
    compile_kernels(job.precision)  # else the first step, by whose times auto chooses, loads them
    others = machine.busy_cores()
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        steps = Steps(job, scheduler, study.seed)
        number = _count(study, steps.run(study.warmup))
        steps.reset_peak()
        bare = steps.run(-(-number // 2))
        timeline = steps.timeline(number)
        bare += steps.run(-(-number // 2))
        peak = steps.peak()
        seconds = Spread.of([(window.end - window.start) / len(window.steps) for window in timeline.windows])
        summary = summarise(timeline)
        tasks, grain, chunk = steps.tasks, steps.grain, steps.steps.chunk
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch_chunk_used": chunk[0],
        "sequence_chunk_used": chunk[1],
        "grain_used": grain,
        "tasks": tasks,
        "steps": seconds.n,
        **_milliseconds("step_ms", seconds),
        "recording_cost": round(seconds.median / Spread.of(bare).median - 1, 4),
        "tokens_per_s": round(study.batch_size * study.sequence_length / seconds.median, 1),
        **_summary(summary, seconds.median),
        "peak_gb": round(peak / 1e9, 4),
        "loss": repr(steps.losses[study.warmup + study.steps]),
        "others_cores": others,
        "machine": f"{os.uname().sysname} {os.uname().machine}" if hasattr(os, "uname") else sys.platform,
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        **machine.versions(*PACKAGES),
    }


def _count(study: StudyConfig, warm: list[float]) -> int:
    """How many steps are timed: so many and so long as is asked for, by the shortest step so far."""
    return max(study.steps, math.ceil(study.seconds / min(warm)))


def _summary(found: Summary, step: float) -> dict[str, Any]:
    """Milliseconds a step, and shares. A phase has a time of its own only where it never runs beside another: its share
    of the recorded steps, of a step in the median.
    """
    scale, whole = 1e3 / found.steps, sum(found.phases.values()) or 1.0
    walls = {f"{phase}_ms": round(1e3 * step * seconds / whole, 3) for phase, seconds in found.phases.items()}
    return {
        **{f"{phase}_ms": walls.get(f"{phase}_ms") for phase in PHASES},
        **{f"{phase}_kernel_ms": round(found.kernel_seconds(phase) * scale, 3) for phase in PHASES},
        "critical_path_ms": round(found.critical_path * scale, 3),
        "overlap": round(found.overlap, 4),
        "steps_overlap": round(found.steps_overlap, 4),
        "kernel_share": round(found.kernel_share, 4),
        "inside_share": round(found.inside, 4),
        "scheduling_share": round(found.scheduling, 4),
        "waiting_share": round(found.waiting, 4),
    }


def _milliseconds(name: str, seconds: Spread) -> dict[str, float]:
    low, middle, high = (round(value * 1e3, 3) for value in seconds.quartiles)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}


def pin(threads: int) -> None:
    """Keep this process and those that it starts on so many cores, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: max(threads, 1)])


if __name__ == "__main__":
    asked = Order.of(sys.argv[1])
    pin(asked.point.threads)
    with contextlib.redirect_stdout(sys.stderr):
        row = run(asked)
    print(json.dumps(row))
