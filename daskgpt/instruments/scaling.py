"""What more threads bring: the same steps with 1, 2, 4 ... threads, chunks and grain chosen by the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.random_tokens import BenchConfig
from daskgpt.instruments.records import Figure
from daskgpt.instruments.study.grid import Point, StudyConfig, job_of_point, thread_counts
from daskgpt.instruments.study.runs import Order, run_one
from daskgpt.schedulers.local import usable_cores

SETTLING = 3  # steps at least before any is timed: chunks and grain are settled in the first two


@dataclass(frozen=True)
class Scale:
    """One number of threads: times of a step in milliseconds (median and quartiles), and what was chosen for it.

    speedup     the time on one thread over this one
    efficiency  speedup over threads
    loss        of the same step for every number of threads
    """

    threads: int
    step_ms: float
    step_ms_q1: float
    step_ms_q3: float
    speedup: float
    efficiency: float
    tokens_per_s: float
    batch_chunk: int
    sequence_chunk: int
    chunks: int
    grain: str
    tasks: int
    peak_gb: float
    others_cores: float | None
    loss: str


def orders(config: GPT2Config, asked: BenchConfig, dataflow: DataflowConfig) -> list[Order]:
    """A run for 1, 2, 4 ... threads, up to --threads or to the cores.

    Errors   ValueError for a scheduler that has no number of threads, or where the model does not fit the batch
    """
    if dataflow.scheduler == "auto":
        dataflow = replace(dataflow, scheduler="threads")
    rule, got = "--scaling must run on threads or on a local cluster", {"scheduler": dataflow.scheduler}
    require(dataflow.scheduler in ("threads", "local"), "bench", rule, got, "Leave --scheduler out.")
    study = StudyConfig(
        batch_size=asked.batch_size,
        sequence_length=asked.sequence_length,
        groups=asked.groups,
        precision=dataflow.precision,
        window=dataflow.window,
        steps=asked.steps,
        warmup=max(asked.warmup, SETTLING),
        seed=asked.seed,
    )
    known = {
        name: getattr(dataflow, name) for name in ("scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain")
    }
    found = [
        Order(config, study, Point(threads=threads, **known))
        for threads in thread_counts(dataflow.threads or usable_cores())
    ]
    for order in found:
        job_of_point(config, study, order.point)
    return found


def scale(orders: list[Order], say: Callable[[str], None]) -> list[Scale]:
    """Run one after the other, each in a process of its own on as many cores as it has threads.

    say      where progress is told

    Errors   RuntimeError where a run did not end well
    """
    found: list[Scale] = []
    for order in orders:
        threads = order.point.threads
        say(f"{threads} thread{'s' * (threads != 1)} ...")
        found.append(_scale(order, run_one(order), found[0].step_ms if found else None))
    return found


def _scale(order: Order, row: dict[str, Any], alone: float | None) -> Scale:
    """alone   milliseconds of a step on one thread; None for that run itself"""
    threads, study = order.point.threads, order.study
    speedup = (alone or row["step_ms"]) / row["step_ms"]
    b, t = row["batch_chunk_used"], row["sequence_chunk_used"]
    same = ("step_ms", "step_ms_q1", "step_ms_q3", "tokens_per_s", "tasks", "peak_gb", "others_cores", "loss")
    return Scale(
        threads=threads,
        speedup=round(speedup, 4),
        efficiency=round(speedup / threads, 4),
        batch_chunk=b,
        sequence_chunk=t,
        chunks=study.batch_size // b * (study.sequence_length // t),
        grain=row["grain_used"],
        **{name: row[name] for name in same},
    )


def describe(found: list[Scale]) -> str:
    """A table for people, and whether all runs computed one number."""
    lines = [f"{'threads':>7} {'ms a step':>10} {'quartiles':>19} {'speedup':>8} {'efficiency':>10}  chunks, grain"]
    for one in found:
        quartiles = f"{one.step_ms_q1:,.1f} .. {one.step_ms_q3:,.1f}"
        lines.append(
            f"{one.threads:7} {one.step_ms:10,.1f} {quartiles:>19} {one.speedup:8.2f} {one.efficiency:10.0%}  "
            f"{one.chunks} of {one.batch_chunk} x {one.sequence_chunk}, {one.grain}"
        )
    same = len({one.loss for one in found}) == 1
    lines.append("all gave the same loss, bit for bit" if same else "the losses differ in their last bits")
    return "\n".join(lines)


def record(found: list[Scale]) -> dict[str, Any]:
    """The same for a machine to read."""
    return {"scaling": [asdict(one) for one in found]}


def figures(found: list[Scale]) -> dict[str, Figure]:
    """For a record of measurements: milliseconds a step, speedup, efficiency and memory by number of threads."""
    known = {}
    for one in found:
        known[f"step_{one.threads}"] = Figure("ms", one.step_ms, q1=one.step_ms_q1, q3=one.step_ms_q3)
        known[f"speedup_{one.threads}"] = Figure.single(one.speedup, "")
        known[f"efficiency_{one.threads}"] = Figure.single(one.efficiency, "")
        known[f"peak_{one.threads}"] = Figure.single(one.peak_gb, "GB")
    return known
