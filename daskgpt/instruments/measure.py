"""Time the steps of a job: how long, where the time went, how much of the machine it used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
from distributed import wait

from daskgpt.config.model import GPT2Config
from daskgpt.graph.nodes import is_leaf
from daskgpt.graph.recording import Runs
from daskgpt.graph.spans import RECORDER, Span
from daskgpt.instruments import machine
from daskgpt.instruments.random_tokens import random_batch
from daskgpt.instruments.statistics import Spread
from daskgpt.model.parameters import PARAMETERS, initial_parameters, parameter_count
from daskgpt.training.grouping import layer_of
from daskgpt.training.job import Job
from daskgpt.training.loop import run_steps, training_step

PASSES = ("forward", "backward", "update")


@dataclass(frozen=True)
class Measurement:
    """What was found. Seconds, bytes, and operations a second.

    step         seconds a step, over the timed steps
    busy         pass -> seconds a step that kernels ran, divided by the threads; from the recorded steps
    idle         share of the threads' time in the recorded steps in which no kernel ran
    operations   of a step, see `step_operations`
    matmul_rate  of the same machine and as many threads, see `machine.matmul_rate`
    peak         most bytes in memory in the timed steps, all processes together
    """

    step: Spread
    busy: dict[str, float]
    idle: float
    operations: int
    matmul_rate: float
    peak: int
    tasks: int
    grain: str
    threads: int

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.operations / self.step.median


class Steps:
    """Training steps of a job on random tokens, ready to be run and timed."""

    def __init__(self, job: Job, scheduler: Runs, seed: int) -> None:
        self.job, self.scheduler, self.seed = job, scheduler, seed
        self.step = training_step(job, scheduler)
        self.state = self.step.initial(initial_parameters(job.config, seed))
        self.losses: list[float] = []

    def run(self, count: int) -> list[float]:
        """Seconds of each of some further steps, from a batch to its loss.

        Steps that overlap (barrier none) are timed together, and always so many: a value for each window is its mean.
        """
        window = self.job.dataflow.window if self.job.dataflow.barrier == "none" else 1
        end, seconds = len(self.losses) + count, []
        while (done := len(self.losses)) < end:
            batches = [random_batch(self.job, self.seed, done + number) for number in range(window)]
            start = perf_counter()
            losses, self.state = run_steps(self.job, self.scheduler, self.step, self.state, batches)
            seconds.append((perf_counter() - start) / len(losses))
            self.losses += losses
        self.settle()
        return seconds

    def settle(self) -> None:
        """Wait until a cluster has done what it goes on doing after a step's loss is there: the updates."""
        if hasattr(self.scheduler, "client"):
            wait(self.state.packs)

    def recorded(self, count: int) -> tuple[dict[str, float], float]:
        """Busy seconds by pass of all threads, and seconds, both a step, over some further steps."""
        everywhere(self.scheduler, start_recording)
        done, start = len(self.losses), perf_counter()
        try:
            self.run(count)
        finally:
            seconds = perf_counter() - start
            found = everywhere(self.scheduler, stop_recording)
        ran = len(self.losses) - done
        return {name: sum(each[name] for each in found) / ran for name in PASSES}, seconds / ran

    def reset_peak(self) -> None:
        """Let `peak` count from now on."""
        everywhere(self.scheduler, machine.reset_peak_memory, here=True)

    def peak(self) -> int:
        """Most bytes in memory since then, of this process and of the workers, together."""
        return sum(everywhere(self.scheduler, machine.peak_memory, here=True))

    def cpu(self) -> float:
        """Seconds of processor time that this process and the workers have used."""
        return sum(everywhere(self.scheduler, process_time, here=True))

    @property
    def tasks(self) -> int:
        """Tasks of one step."""
        return sum(not is_leaf(node) for node in self.step.recording.graph.values())


def measure(steps: Steps, warmup: int, timed: int, recorded: int) -> Measurement:
    """Run and time some steps; those in which kernels are recorded are others, so that recording slows no timed one."""
    job, scheduler = steps.job, steps.scheduler
    threads = scheduler.threads
    steps.run(warmup)
    steps.reset_peak()
    step = Spread.of(steps.run(timed))
    peak = steps.peak()
    busy, seconds = steps.recorded(recorded)
    return Measurement(
        step=step,
        busy={name: total / threads for name, total in busy.items()},
        idle=1 - sum(busy.values()) / (threads * seconds),
        operations=step_operations(job.config, *job.batch_shape),
        matmul_rate=sum(everywhere(scheduler, matmul_rate, threads)),
        peak=peak,
        tasks=steps.tasks,
        grain=steps.step.grain,
        threads=threads,
    )


def matmul_rate(threads: int, dask_worker: Any = None) -> float:
    """`machine.matmul_rate` of this process; a worker (Dask gives it under this name) has threads of its own number."""
    return machine.matmul_rate(dask_worker.state.nthreads if dask_worker else threads)


def product_parameters(config: GPT2Config) -> int:
    """Values of the matrices that activations are multiplied with: all but the positions, and without padding."""
    biases_and_positions = sum(
        int(np.prod(row.shape(config))) * (config.blocks if row.per_block else 1)
        for row in PARAMETERS
        if not row.is_matrix or row.name == "wpe.weight"
    )
    return parameter_count(config) - biases_and_positions


def step_operations(config: GPT2Config, batch_size: int, sequence_length: int) -> int:
    """Floating-point operations of the matrix products of one step, nothing that is computed twice counted twice.

    6 N B T + 6 L C B T (T + 1): a multiplication and an addition for each of the N values of `product_parameters`,
    for each token, in the forward pass and twice in the backward one; and the same for attention's two products, where
    a token meets the (T + 1) / 2 tokens up to itself on average.
    """
    tokens = batch_size * sequence_length
    attention = config.blocks * config.channels * (sequence_length + 1)
    return 6 * tokens * (product_parameters(config) + attention)


def busy_by_pass(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds in which kernels of each pass ran."""
    busy = dict.fromkeys(PASSES, 0.0)
    for span in spans:
        layer, _, way = layer_of(span.key).partition(".")
        busy["update" if layer == "adamw" else way] += span.end - span.start
    return busy


def start_recording() -> None:
    """Record the kernels of this process from now on."""
    RECORDER.spans = []


def stop_recording() -> dict[str, float]:
    """Busy seconds by pass since `start_recording`."""
    spans, RECORDER.spans = RECORDER.spans or [], None
    return busy_by_pass(spans)


def everywhere(scheduler: Runs, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
    """Call a function in each process that runs tasks; with `here`, in this one anyhow."""
    client = getattr(scheduler, "client", None)
    results = [function(*arguments)] if here or client is None else []
    return results + (list(client.run(function, *arguments).values()) if client else [])
