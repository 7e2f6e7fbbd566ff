"""PyTorch's DistributedDataParallel beside a cluster of workers and beside threads: three programs in turns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from daskgpt.config.errors import require
from daskgpt.instruments import machine
from daskgpt.instruments.compare.apart import Apart
from daskgpt.instruments.compare.messages import TorchOptions
from daskgpt.instruments.compare.torch_process import Place, TorchSide, check_losses, described, require_torch
from daskgpt.instruments.compare.turns import (
    Side,
    Turn,
    disturbed,
    require_published_model,
    take_turns,
    undisturbed,
    warm_up,
)
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.records import Figure, figures_of
from daskgpt.instruments.statistics import Spread
from daskgpt.instruments.timeline import is_message
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job

WORKERS = 2  # of a local cluster, unless --threads says otherwise
STEPS_APART = 4  # of a turn of programs that are opened for it
CLUSTER, THREADS, THEIRS = range(3)
NAMES = ("cluster", "threads", "theirs")
LABELS = ("daskgpt, cluster", "daskgpt, threads")


@dataclass(frozen=True)
class WorkerTime:
    """Shares of the time of all workers' threads: in kernels, sending and waiting for messages, and the rest."""

    kernels: float
    messages: float
    rest: float

    def text(self) -> str:
        return f"{self.kernels:.1%} kernels, {self.messages:.1%} messages, {self.rest:.1%} between tasks"


@dataclass(frozen=True)
class Programs:
    """What three programs took for the same steps: ours on a cluster, ours on threads, PyTorch's processes.

    name      PyTorch, as it is printed
    turns     those that count; `tried` with those in which other programs ran, where there were enough without
    peaks     bytes: the workers together, this process with threads and client, PyTorch's processes together
    losses    the first ones, before any update
    shares    where the workers' time went, in steps of their own
    """

    name: str
    workers: int
    turns: Sequence[Turn]
    tried: int
    peaks: tuple[int, int, int]
    losses: tuple[float, float, float]
    shares: WorkerTime

    def step(self, program: int) -> Spread:
        """Mean seconds a step of each turn."""
        return Spread.of(turn.means[program] for turn in self.turns)

    def ratio(self, one: int, other: int) -> Spread:
        """Of one program's mean step to the other's in the same turn: below 1 where it is faster."""
        return Spread.of(turn.means[one] / turn.means[other] for turn in self.turns)

    def longest(self, program: int) -> float:
        """The longest step over the median of all."""
        steps = Spread.of(seconds for turn in self.turns for seconds in turn.seconds[program])
        return steps.largest / steps.median

    @property
    def steps_a_turn(self) -> int:
        return len(self.turns[0].seconds[THREADS])

    @property
    def disturbed(self) -> int:
        """How many of the turns that count met other programs."""
        return disturbed(self.turns)

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        found: dict[str, Any] = {"against": self.name, "workers": self.workers, "turns": len(self.turns)}
        found |= {"steps_a_turn": self.steps_a_turn, "disturbed_turns": self.disturbed}
        found["left_out_turns"] = self.tried - len(self.turns)
        for program, name in enumerate(NAMES):
            found |= fields(self.step(program), f"{name}_ms", 1e3, 3)
            found |= {f"{name}_longest": round(self.longest(program), 3)}
            found |= {f"{name}_peak_gb": round(self.peaks[program] / 1e9, 4)}
            found |= {f"{name}_first_loss": self.losses[program]}
        found |= fields(self.ratio(CLUSTER, THEIRS), "ratio", 1, 4)
        found |= fields(self.ratio(THREADS, CLUSTER), "throughput_of_threads", 1, 4)
        return found | {f"workers_{name}": round(share, 4) for name, share in asdict(self.shares).items()}

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements."""
        ratios = {"ratio": self.ratio(CLUSTER, THEIRS), "throughput_of_threads": self.ratio(THREADS, CLUSTER)}
        each = list(enumerate(NAMES))
        return {
            **figures_of({name: self.step(program) for program, name in each}, "ms", 1e3),
            **figures_of(ratios, ""),
            **{f"{name}_longest": Figure.single(self.longest(program), "") for program, name in each},
            **{f"{name}_peak": Figure.single(self.peaks[program] / 1e9, "GB") for program, name in each},
            **{f"workers_{name}": Figure.single(share, "") for name, share in asdict(self.shares).items()},
        }

    def describe(self) -> str:
        """For a person to read."""
        lines = [f"{len(self.turns)} turns of {self.steps_a_turn} steps each; {self.workers} workers of one thread"]
        lines[0] += f", {self.workers} threads, {self.workers} processes"
        if self.tried > len(self.turns):
            lines.append(f"{self.tried - len(self.turns)} more turns left out, in which other programs ran")
        if self.disturbed:
            lines.append(f"WARNING: other programs ran in {self.disturbed} of these turns: the ratios say little")
        lines.append(f"{'':17} {'ms a step':>10} {'quartiles':>19} {'longest':>8} {'peak GB':>8} {'first loss':>11}")
        for program, label in enumerate((*LABELS, "PyTorch DDP")):
            low, middle, high = (f"{value * 1e3:,.1f}" for value in self.step(program).quartiles)
            lines.append(
                f"{label:17} {middle:>10} {f'{low} .. {high}':>19} {self.longest(program):8.2f} "
                f"{self.peaks[program] / 1e9:8.2f} {self.losses[program]:11.5f}"
            )
        lines.append(f"{'cluster / DDP':17} {self.ratio(CLUSTER, THEIRS).text('', 3):>30}   of a turn's times")
        share = self.ratio(THREADS, CLUSTER)
        lines.append(f"{'cluster / threads':17} {share.text('', 3):>30}   of threads' throughput")
        told = f"DDP: {self.name}", "longest: the longest step over the median", f"workers' time: {self.shares.text()}"
        return "\n".join(lines + [textwrap.fill(text, 80, subsequent_indent=" " * 4) for text in told])


def fields(spread: Spread, name: str, factor: float, digits: int) -> dict[str, float]:
    """For a record: median, quartiles and ends."""
    low, _, high = (round(value * factor, digits) for value in spread.quartiles)
    return spread.fields(name, factor, digits) | {f"{name}_q1": low, f"{name}_q3": high}


class OnWorkers(Steps):
    """Steps on a cluster, of whose memory that of its workers counts."""

    def peak(self) -> int:
        return sum(self.scheduler.everywhere(machine.peak_memory))


def compare_ddp(
    job: Job,
    scheduler: Scheduler,
    seed: int,
    options: TorchOptions,
    turns: tuple[int, int, int],
    places: Sequence[Place] = (),
) -> tuple[Programs, Steps]:
    """Steps on a cluster, on threads and of PyTorch's processes in turns, once their first losses agree.

    scheduler   of workers with one thread each
    turns       steps to warm up, turns, and recorded steps after them
    places      of PyTorch's processes, as many as workers

    Errors   RuntimeError where PyTorch is not installed, a process fails, or the losses differ; ValueError for a batch
             without equal parts, or workers with more threads than one
    """
    workers = checked_workers(job, scheduler)
    warmup, count, recorded = turns
    own = places or [Place()] * workers
    with open_scheduler("threads", workers) as here, TorchSide(job, seed, 1, options, own) as torch:
        cluster, with_threads = OnWorkers(job, scheduler, seed), Steps(on_threads(job, workers), here, seed)
        sides = (cluster, with_threads, torch)
        for side in sides:
            side.run(1)
        check_first(sides, job, options)
        steps = warm_up(sides, warmup)
        found = take_turns(sides, count, steps)
        name = described(torch.version, options, f"{workers} processes")
        return _programs(name, workers, found, count, sides, recorded_time(cluster, recorded)), cluster


def compare_ddp_apart(
    job: Job, seed: int, options: TorchOptions, turns: tuple[int, int, int]
) -> tuple[Programs, Steps]:
    """The same with one program in memory at a time: each is opened for each of its turns, and warms up in it.

    Errors   as of `compare_ddp`
    """
    warmup, count, recorded = turns
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        workers = checked_workers(job, scheduler)

    @contextmanager
    def with_threads() -> Iterator[Side]:
        with open_scheduler("threads", workers) as here:
            yield Steps(on_threads(job, workers), here, seed)

    def with_torch() -> AbstractContextManager[Side]:
        return TorchSide(job, seed, 1, options, [Place()] * workers)

    opened = (partial(_on_cluster, job, seed), with_threads, with_torch)
    sides = (Apart(opened[0], warmup), Apart(opened[1], warmup), Apart(opened[2], warmup))
    found = take_turns(sides, count, STEPS_APART)
    check_first(sides, job, options)
    name = described(version("torch"), options, f"{workers} processes")
    with _on_cluster(job, seed) as cluster:
        cluster.run(warmup)
        return _programs(name, workers, found, count, sides, recorded_time(cluster, recorded)), cluster


@contextmanager
def _on_cluster(job: Job, seed: int) -> Iterator[OnWorkers]:
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        yield OnWorkers(job, scheduler, seed)


def checked_workers(job: Job, scheduler: Scheduler) -> int:
    """How many workers there are. Errors as of `compare_ddp`."""
    require_torch("torch-ddp")
    require_published_model(job)
    workers, threads = len(scheduler.addresses()), scheduler.threads
    rule, got = "the workers must have one thread each, as PyTorch's processes", {"workers": workers}
    require(threads == workers, "bench", rule, got | {"threads": threads}, "Start them with --nthreads 1.")
    return workers


def on_threads(job: Job, threads: int) -> Job:
    """The same job in this process."""
    return replace(job, dataflow=replace(job.dataflow, scheduler="threads", threads=threads))


def check_first(sides: Sequence[Side], job: Job, options: TorchOptions) -> None:
    """Errors   RuntimeError where the first losses on the cluster and of PyTorch differ"""
    precision = "bfloat16" if options.bf16 else job.precision.name
    check_losses((sides[CLUSTER].losses[0], sides[THEIRS].losses[0]), precision)


def _programs(
    name: str, workers: int, found: Sequence[Turn], wanted: int, sides: Sequence[Side], shares: WorkerTime
) -> Programs:
    """What turns have told."""
    cluster, with_threads, theirs = sides
    peaks = cluster.peak(), with_threads.peak(), theirs.peak()
    losses = cluster.losses[0], with_threads.losses[0], theirs.losses[0]
    return Programs(name, workers, undisturbed(found, wanted), len(found), peaks, losses, shares)


def recorded_time(steps: Steps, count: int) -> WorkerTime:
    """Where the workers' time goes in some steps, which are recorded."""
    timeline = steps.timeline(count)
    whole = len(timeline.lanes) * sum(window.end - window.start for window in timeline.windows)
    messages = sum(event.seconds for event in timeline.events if is_message(event.layer))
    kernels = sum(event.seconds for event in timeline.events) - messages
    return WorkerTime(kernels / whole, messages / whole, 1 - (kernels + messages) / whole)
