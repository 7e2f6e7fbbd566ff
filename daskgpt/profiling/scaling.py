"""What more threads bring: the same steps with 1, 2, 4 ... threads, chunks and grain chosen by the machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.model.parameters import parameter_count
from daskgpt.profiling import machine
from daskgpt.profiling.measure import BenchConfig
from daskgpt.profiling.records import Figure
from daskgpt.profiling.study.grid import Point, StudyConfig, job_of_point, thread_counts
from daskgpt.profiling.study.runs import Order, run_one
from daskgpt.schedulers.local import usable_cores
from daskgpt.training.job import Job, compile_kernels, facts

SETTLING = 3  # steps at least before any is timed: chunks and grain are settled in the first two


def orders(config: GPT2Config, options: BenchConfig, dataflow: DataflowConfig) -> list[Order]:
    """Return a run for 1, 2, 4 ... threads, up to --threads or to the cores.

    Errors   ValueError for a scheduler that has no number of threads, or where the model does not fit the batch
    """
    if dataflow.scheduler == "auto":
        dataflow = replace(dataflow, scheduler="threads")
    rule, got = "--scaling must run on threads or on a local cluster", {"scheduler": dataflow.scheduler}
    require(dataflow.scheduler in ("threads", "local"), "bench", rule, got, "Leave --scheduler out.")
    shared = {name: getattr(options, name) for name in ("batch_size", "sequence_length", "groups", "steps", "seed")}
    shared |= {"precision": dataflow.precision, "window": dataflow.window}
    study = StudyConfig(warmup=max(options.warmup, SETTLING), **shared)
    dials = ("scheduler", "barrier", "batch_chunk", "sequence_chunk", "grain")
    known = {name: getattr(dataflow, name) for name in dials}
    counts = thread_counts(dataflow.threads or usable_cores())
    return [Order(config, study, Point(threads=threads, **known)) for threads in counts]


@dataclass(frozen=True)
class Scaling:
    """The steps of a job by number of threads: rows of a study, the first one of one thread."""

    job: Job
    rows: dict[int, dict[str, Any]]

    def speedup(self, threads: int) -> float:
        """The time on one thread over the time on so many; efficiency is speedup over threads."""
        return float(self.rows[1]["step_ms"] / self.rows[threads]["step_ms"])

    def chosen(self, threads: int) -> str:
        """Chunks and grain."""
        (size, length), row = self.job.batch_shape, self.rows[threads]
        b, t = row["batch_chunk_used"], row["sequence_chunk_used"]
        return f"{size // b * (length // t)} of {b} x {t}, {row['grain_used']}"

    @property
    def settings(self) -> dict[str, Any]:
        """What was measured, beside the model."""
        size, length = self.job.batch_shape
        known = {"batch_size": size, "sequence_length": length, "precision": self.job.precision.name}
        known["others_cores"] = max(row["others_cores"] or 0.0 for row in self.rows.values())
        return known | {f"chosen_{threads}": self.chosen(threads) for threads in self.rows}

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements: milliseconds a step, speedup, efficiency and memory by number of threads."""
        known = {}
        for threads, row in self.rows.items():
            known[f"step_{threads}"] = Figure("ms", row["step_ms"], q1=row["step_ms_q1"], q3=row["step_ms_q3"])
            known[f"speedup_{threads}"] = Figure.single(self.speedup(threads), "")
            known[f"efficiency_{threads}"] = Figure.single(self.speedup(threads) / threads, "")
            known[f"peak_{threads}"] = Figure.single(row["peak_gb"], "GB")
        return known

    def describe(self) -> str:
        """A table for people, and whether all runs computed one number."""
        lines = [
            f"model        {parameter_count(self.job.config):,} parameters",
            f"batch        {facts(self.job)['batch']}",
            f"machine      {machine.processor()}, {usable_cores()} cores",
            f"{'threads':>7} {'ms a step':>10} {'quartiles':>19} {'speedup':>8} {'efficiency':>10}  chunks, grain",
        ]
        for threads, row in self.rows.items():
            quartiles, speedup = f"{row['step_ms_q1']:,.1f} .. {row['step_ms_q3']:,.1f}", self.speedup(threads)
            times = f"{threads:7} {row['step_ms']:10,.1f} {quartiles:>19}"
            lines.append(f"{times} {speedup:8.2f} {speedup / threads:10.0%}  {self.chosen(threads)}")
        same = len({row["loss"] for row in self.rows.values()}) == 1
        lines.append("all gave the same loss, bit for bit" if same else "the losses differ in their last bits")
        return "\n".join(lines)


def measure_scaling(config: GPT2Config, options: BenchConfig, dataflow: DataflowConfig) -> Scaling:
    """Run one number of threads after the other, each in a process of its own on as many cores.

    Errors   as of `orders`; RuntimeError where a run did not end well
    """
    runs = orders(config, options, dataflow)
    jobs = [job_of_point(config, order.study, order.point) for order in runs]  # which checks all of them
    compile_kernels(jobs[0].precision)
    found = {}
    for order in runs:
        threads = order.point.threads
        print(f"{threads} thread{'s' * (threads != 1)} ...", file=sys.stderr, flush=True)
        found[threads] = run_one(order)
    return Scaling(jobs[-1], found)
