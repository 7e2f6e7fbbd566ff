"""Time steps on random tokens: how long they take, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from daskgpt.config.errors import refusal, text_table, whole_number
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig, groups_setting
from daskgpt.config.settings import Checked, setting
from daskgpt.graph.calls import PHASES
from daskgpt.graph.program import Span
from daskgpt.kernels.simd.lanes import features
from daskgpt.model.parameters import RandomParameters, step_operations
from daskgpt.profiling.recorder import Recorder
from daskgpt.profiling.timeline import Timeline, is_message
from daskgpt.schedulers import machine
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job, compile_kernels
from daskgpt.training.start import configurations
from daskgpt.training.trainer import engine_of

K = TypeVar("K")
PACKAGES = ("numpy", "numba", "dask", "distributed")
# Of a processor's instruction sets those that decide how fast products are here.
TELLING = ("avx2", "avx512f", "avx512bf16", "amx-bf16", "amx-tile")
DIGITS = 6
RANKS_WINDOW = 8  # steps that ranks make before anybody asks: a window costs some milliseconds


class BenchConfig(Checked):
    """Settings of a measurement, and its batches of random tokens."""

    batch_size: int = setting(12, "B, sequences a step", least=1, most=2**20)
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens", least=1, most=2**24)
    groups: int = groups_setting()
    seed: int = setting(0, "seed of initial values, tokens, and of the order of runs")
    steps: int = setting(10, "timed steps", unit="steps", least=1, most=2**20)
    warmup: int = setting(3, "untimed steps before them", unit="steps", least=1, most=2**20)
    recorded: int = setting(
        3, "further steps, in which every kernel call is recorded", unit="steps", least=1, most=2**10
    )


@dataclass(frozen=True)
class Spread:
    """Some values of one quantity: how many, median and quartiles.

    Errors   ValueError if there is no value
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise refusal(ValueError, "Spread", "there must be a value", "values=()", "Measure at least once.")

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of the values, with linear interpolation.

        Source   Hyndman and Fan 1996, definition 7
        """
        low, middle, high = np.percentile(self.values, (25, 50, 75)).tolist()
        return low, middle, high

    @property
    def median(self) -> float:
        return self.quartiles[1]

    def text(self, unit: str = "ms", digits: int | None = None, factor: float = 1) -> str:
        """Return median and quartiles of the values times a factor, such as `30.1 ms (29.8 .. 30.5)`."""
        low, middle, high = (rounded(factor * value, digits) for value in self.quartiles)
        return " ".join(filter(None, (middle, unit, f"({low} .. {high})" if self.n > 1 else "")))


def rounded(value: float, digits: int | None = None) -> str:
    """Return a number as text, with three to four significant digits, or with this many decimals."""
    if digits is None:
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def significant(value: float) -> float:
    """Return a number rounded to the digits of lines of JSON."""
    return float(f"{value:.{DIGITS}g}")


def figure(values: Spread, unit: str) -> dict[str, Any]:
    """Return a quantity for a line of JSON: unit and median, and of several values their spread and all of them."""
    low, middle, high = map(significant, values.quartiles)
    if values.n == 1:
        return {"unit": unit, "median": middle, "n": 1}
    turns = [significant(value) for value in values.values]
    ends = {"least": min(turns), "largest": max(turns), "q1": low, "q3": high}
    return {"unit": unit, "median": middle, **ends, "turns": turns, "n": values.n}


def origin() -> dict[str, Any]:
    """Return date, machine and versions for a line of JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": machine.processor(),
            "cores": machine.usable_cores(),
            "features": [name for name in TELLING if name in features()],
        },
        "versions": machine.versions(*PACKAGES),
    }


def job_of(config: ModelConfig, options: BenchConfig, dataflow: DataflowConfig) -> Job:
    """Return the checked job of a run on random tokens, with a constant learning rate."""
    data = DataConfig(batch_size=options.batch_size, sequence_length=options.sequence_length, groups=options.groups)
    return Job(config, data, OptimizerConfig(schedule="constant"), dataflow, RunConfig(seed=options.seed))


def job_from(config: ModelConfig, **given: Any) -> Job:
    """Return the job of some configurations (data, optimizer ...), each an object, its fields, or None."""
    made = configurations("plan", {"model": config, **given})
    return Job(made.pop("model"), **made)


def random_batch(job: Job, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets (B, T) int32, uniform over the vocabulary; the same for the same seed and step."""
    size, length = job.batch_shape
    tokens = np.random.default_rng([seed, step]).integers(0, job.config.vocabulary, (size, length + 1), np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


class TimedEngine:
    """The engine of a job on random tokens, whose steps are timed."""

    def __init__(self, job: Job, scheduler: Scheduler, seed: int, state: Any = None) -> None:
        """state   that others use as well, for steps that write over it; None for an own one"""
        self.job, self.scheduler, self.seed = job, scheduler, seed
        self.engine: Any = engine_of(job, scheduler, lambda line: None)
        self.ranks = self.engine.ranks  # whether workers share a batch
        self.engine.resume(state or self.engine.initial(RandomParameters(job.config, seed)))
        self.losses: list[float] = []
        self.length = job.steps

    @property
    def settings(self) -> dict[str, Any]:
        """Return what runs, for a record of measurements."""
        job, engine = self.job, self.engine
        names = ("batch_size", "sequence_length", "batch_chunk", "sequence_chunk", "groups", "scheduler", "precision")
        values = (*job.batch_shape, *engine.chunk, job.groups, job.scheduler, job.precision.name)
        return dict(zip(names, values)) | {"grain": engine.grain, "tasks": engine.tasks}

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of some further steps, from a batch to its loss.

        Steps that overlap (barrier none), and steps of workers that share a batch, are timed together, and always so
        many: a value for each window is its mean. With --engine tasks a cluster has a step's loss before its backward
        pass, so a step is timed from loss to loss; what it still does when the last loss is there counts to the first
        step, whose time has no such part.
        """
        end, seconds = len(self.losses) + count, []
        while (done := len(self.losses)) < end:
            size = min(self.window, end - done) if self.ranks else self.window
            batches = [random_batch(self.job, self.seed, done + number) for number in range(size)]
            start = perf_counter()
            outcomes = self.engine.run(batches, self.length)
            seconds.append((perf_counter() - start) / len(outcomes))
            self.losses += [outcome.loss for outcome in outcomes]
        if seconds and not self.scheduler.in_place and not self.ranks:
            start = perf_counter()
            self.scheduler.wait_for(list(self.engine.state().packs))
            seconds[0] += (perf_counter() - start) / self.window
        return seconds

    def recorded(self, count: int) -> tuple[list[float], list[Span]]:
        """Return the seconds of some further steps, as `run`, and the spans of their kernel calls."""
        with self.scheduler.record() as processes:
            seconds = self.run(count)
        return seconds, [span for process in processes for span in process.spans]

    def timeline(self, count: int) -> Timeline:
        """Return the timeline of so many further steps, or some more where the last window has more."""
        recorder, size, done = Recorder(self.engine), self.window, len(self.losses)
        for first in range(done, done + count, size):
            with recorder.window(range(first, first + size)):
                self.run(size)
        return recorder.finish()

    def reset_peak(self) -> None:
        """Let `peak` count from now on."""
        self.scheduler.everywhere(machine.reset_peak_memory, here=True)

    def peak(self) -> int:
        """Return the most bytes in memory since then, of this process and of the workers together."""
        return sum(self.scheduler.everywhere(machine.peak_memory, here=True))

    def cpu(self) -> dict[tuple[str, int], float]:
        """Return seconds of processor time of this process, the workers and a cluster's scheduler, by process."""
        processes = self.scheduler.everywhere(machine.processor_time, here=True)
        if not self.scheduler.in_place:
            client = cast(Any, self.scheduler).client
            processes.append(client.run_on_scheduler(machine.processor_time))
        return {process: seconds for times in processes for process, seconds in times.items()}

    @property
    def window(self) -> int:
        """Return how many steps the scheduler gets at once."""
        return RANKS_WINDOW if self.ranks else int(self.engine.together())


def in_turns(engines: Mapping[K, TimedEngine], turns: int, steps: int = 1, untimed: int = 0) -> dict[K, list[float]]:
    """Return the seconds of a step of each engine, one value a turn. They take turns, so that noise hits all alike.

    untimed   steps of each turn before those that are timed, since the caches hold what the others used
    """
    seconds: dict[K, list[float]] = {name: [] for name in engines}
    for _ in range(turns):
        for name, engine in engines.items():
            engine.run(untimed)
            seconds[name].append(fmean(engine.run(steps)))
    return seconds


def measure_steps(steps: TimedEngine, warmup: int, timed: int, recorded: int) -> dict[str, tuple[Spread, str]]:
    """Run and time some steps, and record some others, so that recording slows no timed one; return values and unit of
    each quantity by name.
    """
    job, threads = steps.job, steps.scheduler.threads
    steps.run(warmup)
    steps.reset_peak()
    seconds = Spread.of(steps.run(timed))
    peak, summary = steps.peak(), steps.timeline(recorded).summary
    passes = dict.fromkeys(PHASES, 0.0)
    for (layer, phase), (duration, _) in summary.kernels.items():
        passes[phase] += 0.0 if is_message(layer) else 1e3 * duration / (threads * summary.steps)
    values = {name: (value, "ms") for name, value in passes.items()}
    values |= {
        "overhead": (1 - summary.kernel_share, ""),
        "inside": (summary.inside_share, ""),
        "scheduling": (summary.scheduling_share, ""),
        "waiting": (summary.waiting_share, ""),
        "overlap": (summary.overlap, ""),
        "steps_overlap": (summary.steps_overlap, ""),
        "critical_path": (1e3 * summary.critical_path / summary.steps, "ms"),
        "tokens": (prod(job.batch_shape) / seconds.median, "tokens/s"),
        "rate": (step_operations(job.config, *job.batch_shape) / seconds.median / 1e9, "GFLOP/s"),
        "peak": (peak / 1e9, "GB"),
    }
    figures = {name: (Spread.of([value]), unit) for name, (value, unit) in values.items()}
    return {"step": (Spread.of(1e3 * value for value in seconds.values), "ms"), **figures}


WARMUP = 4  # steps before the first turn


@dataclass(frozen=True)
class Execution:
    """Steps under one dataflow.

    seconds   a step, one value a turn
    losses    of all steps that were made, in their order
    timeline  of some further steps
    """

    threads: int
    seconds: Spread
    losses: tuple[float, ...]
    timeline: Timeline


class Executions(dict[str, Execution]):
    """Name -> execution. The first one is what the others' speedup is measured by.

    others   cores that other programs kept busy before
    """

    def __init__(self, executions: Mapping[str, Execution], others: float = 0.0) -> None:
        super().__init__(executions)
        self.others = others

    def speedup(self, name: str) -> float:
        """Return how many times as fast as the first, by medians."""
        return next(iter(self.values())).seconds.median / self[name].seconds.median

    def efficiency(self, name: str) -> float:
        """Return the speedup by how many times as many threads it has."""
        return self.speedup(name) * next(iter(self.values())).threads / self[name].threads

    @property
    def note(self) -> str:
        """Say that the machine was busy, "" where it was not."""
        if self.others <= machine.BUSY:
            return ""
        return f"note: other programs kept {self.others:.1f} cores busy; these are times of a share of the machine"

    def __repr__(self) -> str:
        table = [["", "ms a step", "speedup", "efficiency", "overlap", "idle"]]
        for name, run in self.items():
            shares = self.efficiency(name), run.timeline.summary.overlap, 1 - run.timeline.summary.kernel_share
            times = [run.seconds.text("", 1, 1e3), f"{self.speedup(name):.2f}"]
            table.append([name, *times, *(f"{share:.0%}" for share in shares)])
        return f"{text_table(table)}\nspeedup over {next(iter(self))}\n{self.note}".rstrip()


def measure(
    config: ModelConfig,
    data: DataConfig | Mapping[str, Any] | None = None,
    dataflows: Mapping[str, DataflowConfig | Mapping[str, Any]] | None = None,
    *,
    turns: int = 5,
    steps: int = 4,
    seed: int = 0,
) -> Executions:
    """Time training steps on random tokens under several dataflows, and record some further ones of each.

    They take turns, so that noise hits all alike. Each turn begins with a step or a window of steps that is not
    counted, since the caches hold what the others used.

    dataflows  by name, the first one being what the others are compared with
    turns      how often each has its turn
    steps      of a turn, and of the recorded ones; more where a window has more

    Errors     ValueError where configurations do not fit each other, or there is no turn or step

    >>> import daskgpt
    >>> small = daskgpt.preset("tiny", blocks=1, channels=32)
    >>> models = {"sequential": {"scheduler": "sync", "grain": "block"}, "threads": {"threads": 2, "grain": "block"}}
    >>> found = daskgpt.measure(small, {"batch_size": 4}, models, turns=1)
    >>> list(found), found["sequential"].losses == found["threads"].losses
    (['sequential', 'threads'], True)
    """
    for name, number in {"turns": turns, "steps": steps}.items():
        whole_number(number, "measure", name, 1)
    shared = {"data": data, "optimizer": {"schedule": "constant"}, "run": {"seed": seed}}
    jobs = {name: job_from(config, dataflow=dials, **shared) for name, dials in (dataflows or {"default": {}}).items()}
    for job in jobs.values():
        require_scheduler(job.dataflow.scheduler)
    for job in jobs.values():
        compile_kernels(job.precision, job.uses)
    others = machine.busy_cores()
    with ExitStack() as stack:
        runs: dict[str, TimedEngine] = {}
        for name, job in jobs.items():
            scheduler = stack.enter_context(open_scheduler(job.dataflow.scheduler, job.dataflow.threads))
            runs[name] = TimedEngine(job, scheduler, seed)
            runs[name].run(WARMUP)
        untimed = max(1 if run.ranks else run.window for run in runs.values())  # alike, as the losses are compared
        seconds = in_turns(runs, turns, steps, untimed)
        executions = {
            name: Execution(run.scheduler.threads, Spread.of(seconds[name]), tuple(run.losses), run.timeline(steps))
            for name, run in runs.items()
        }
        return Executions(executions, others)
