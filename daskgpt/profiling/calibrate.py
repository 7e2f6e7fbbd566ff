"""Measure what steps are made of on this machine: kernel calls and Dask's tasks.

`python -m daskgpt.bench --calibrate` runs steps of small models on one thread and on all of them, and keeps the median
time of each kernel call by its kind (layer, pass, precision) and sizes. The time of a call of other sizes is

    a calls + b numbers read + c numbers written + d pairs      a, b, c, d >= 0

fitted to the samples of its kind, times the ratio between measured and fitted times of samples of similar sizes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import dask.threaded
import numpy as np
from dask.local import start_state_from_dask
from dask.order import order

from daskgpt.config.errors import require
from daskgpt.config.files import check_writable, digest_of, expanded, write_file
from daskgpt.config.flags import called
from daskgpt.config.model import ModelConfig, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.calls import wait
from daskgpt.graph.compiled import Submission
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.program import calls_of
from daskgpt.kernels.bfloat16.isa import outruns_float32, unit
from daskgpt.profiling.measure import BenchConfig, TimedEngine, in_turns, job_of
from daskgpt.schedulers import machine
from daskgpt.schedulers.local import LocalScheduler, local_scheduler
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.autotune import Trial
from daskgpt.training.cost import Sizes, features, work_of
from daskgpt.training.engine import LocalEngine
from daskgpt.training.job import Job, compile_kernels

Samples = dict[str, list[tuple[Sizes, float]]]  # situation and kind of a call -> sizes of its axes, and seconds
SITUATIONS = ("alone", "beside")  # a call on one thread, and while all others run calls as well
FORM = 4  # of the stored file
# Steps that are sampled: chunks, sequences of each, tokens of a sequence and of each in a chunk, and the barrier. With
# barrier phase, sums and updates are apart, as on ranks.
SMALL = [(2, 6, 64, 64, "step"), (2, 2, 64, 64, "step"), (2, 3, 64, 16, "step"), (2, 6, 64, 64, "phase")]
MEDIUM = [(2, 4, 64, 64, "step"), (2, 1, 256, 256, "step"), (2, 2, 64, 32, "step"), (2, 4, 64, 64, "phase")]
EIGHT = (8, 1, 64, 64, "phase")
LARGE = [(2, 2, 64, 64, "step"), (2, 1, 256, 256, "step"), (4, 1, 256, 256, "phase")]
# Models with few weights, and with more than caches hold; how often their steps are measured; and these steps.
TINY = preset("tiny")
MODELS: dict[str, tuple[ModelConfig, int, list[tuple[int, int, int, int, str]]]] = {
    "tiny": (TINY, 9, [*SMALL, EIGHT]),
    "384": (preset("tiny", blocks=6, heads=6, channels=384, positions=256), 3, [*MEDIUM, EIGHT]),
    "gpt2": (preset("gpt2", blocks=2), 3, LARGE),
}
WARMUP, QUICK_TURNS, TASK_TURNS = 1, 2, 11  # steps
# Sequences of a chunk, grain, and barrier of steps that show the cost of tasks: of some tenths of a ms up to some ms.
TASK_POINTS = [(2, "kernel", "layer"), (6, "kernel", "step"), (6, "segment", "phase"), (2, "block", "step")]
TASK_POINTS.append((6, "block", "step"))
FEW_TASK_POINTS = [TASK_POINTS[0], TASK_POINTS[-1]]  # the shortest and the longest tasks
PAIRS = 3  # their place among the features of a call
QUICK_TOKENS = 512  # of a chunk
FEW, MANY = 20, 220  # tasks of graphs without work


class Times:
    """Seconds of the calls of one kind, from samples."""

    def __init__(self, kind: str, samples: Sequence[tuple[Sizes, float]]) -> None:
        self.kind, self.axes = kind, sorted(samples[0][0])
        seconds = np.array([measured for _, measured in samples])
        terms = np.array([features(kind, sizes) for sizes, _ in samples], float)
        best = np.inf
        for count in range(1, min(terms.shape[1], len(samples)) + 1):
            for columns in combinations(reversed(range(terms.shape[1])), count):
                chosen = terms[:, columns] / seconds[:, None]
                scale = chosen.max(axis=0)
                rates = np.linalg.lstsq(chosen / scale, np.ones(len(seconds)), rcond=None)[0]
                # Samples that leave it open are explained by pairs, and nothing by noise.
                error = float(np.mean((chosen / scale @ rates - 1) ** 2)) + 1e-3 * (count - (PAIRS in columns))
                if rates.min() >= 0 and error < best:
                    best, self.rates = error, np.zeros(terms.shape[1])
                    self.rates[list(columns)] = rates / scale
        self.places = np.log([[sizes[axis] for axis in self.axes] for sizes, _ in samples])
        self.ratios = np.log(seconds / (terms @ self.rates))

    def __call__(self, sizes: Sizes) -> float:
        distances = ((np.log([sizes[axis] for axis in self.axes]) - self.places) ** 2).sum(axis=1)
        weights = 1 / (distances + 1e-6)
        ratio = np.exp(weights @ self.ratios / weights.sum())
        return float(np.dot(features(self.kind, sizes), self.rates) * ratio)


@dataclass(frozen=True)
class Calibration:
    """The measured cost of the parts of a step on a machine.

    cores      that ran calls at once in the samples called beside
    samples    of kernel calls
    graph      seconds to begin the run of a graph, and for each of its nodes
    tasks      seconds of a task's kernels, and seconds that the synchronous scheduler and the threaded one add to it
    lock       seconds of the latter in which a thread holds the interpreter's lock
    crowd      how many times as long kernels take with twice as many threads as cores, beside having half of a core
    copy       bytes a second that a thread reads and writes
    message    seconds for which a message keeps the interpreter of its sender busy, and that of its receiver
    rate       bytes a second of messages between two workers; both are those of two cores of an EPYC (Zen 3)
    """

    cores: int
    samples: Samples
    graph: tuple[float, float]
    tasks: Sequence[tuple[float, float, float]]
    lock: float
    crowd: float
    copy: float
    message: float = 0.4e-3
    rate: float = 1e9

    @cached_property
    def _times(self) -> dict[str, Times]:
        return {kind: Times(kind, rows) for kind, rows in self.samples.items()}

    def knows(self, kind: str) -> bool:
        """Return whether calls of a kind were measured."""
        return f"alone {kind}" in self.samples

    def seconds(self, kind: str, sizes: Sizes) -> tuple[float, float]:
        """Return the seconds of a call on one thread, and beside calls of all other threads; as if it only read and
        wrote, if its kind is unknown.
        """
        if not self.knows(kind):
            _, read, written, _ = features(kind, sizes)
            return (4 * (read + written) / self.copy,) * 2
        alone, beside = (self._times[f"{name} {kind}"](sizes) for name in SITUATIONS)
        return alone, max(alone, beside)

    def of_task(self, kernels: float, pooled: bool) -> tuple[float, float]:
        """Return for how long the scheduler holds the lock for a task with so many seconds of kernels, and how long it
        takes besides.
        """
        lengths, sync, threaded = zip(*self.tasks)
        seconds = float(np.interp(kernels, lengths, threaded if pooled else sync))
        lock = min(self.lock, seconds) if pooled else seconds
        return lock, seconds - lock

    def save(self) -> Path:
        """Write the calibration to this user's cache; return the path. Errors   as of `write_file`"""
        path = cache_path()
        write_file(path, json.dumps(asdict(self)).encode(), "bench")
        return path


def load() -> Calibration | None:
    """Return this machine's calibration from this user's cache; None without a readable one."""
    try:
        return Calibration(**json.loads(cache_path().read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def cache_path() -> Path:
    """Return the file of this machine's calibration, whose name says what it depends on."""
    versions = machine.versions("numpy", "numba", "dask", "distributed")
    facts = {"processor": machine.processor(), "cores": usable_cores(), "form": FORM, **versions}
    folder = Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache"))
    return folder / "daskgpt" / f"calibration-{digest_of(facts)[:12]}.json"


def calibrate() -> Calibration:
    """Measure everything, in some minutes; the machine should have nothing else to do.

    Errors   as of `check_writable`, OSError: there must be a place for the result
    """
    cache_path().parent.mkdir(parents=True, exist_ok=True)
    check_writable(cache_path(), "bench", "path")
    cores, samples, start = usable_cores(), Samples(), perf_counter()
    print("calibrate  kernels and tasks of this machine, for two to three minutes ...")
    for model, (config, turns, shapes) in MODELS.items():
        jobs = list[Job]()
        precisions = ("float32", "bfloat16") if model == "gpt2" and outruns_float32(unit()) else ("float32",)
        for precision, (chunks, sequences, length, tokens, barrier) in product(precisions, shapes):
            shape = BenchConfig(batch_size=sequences * max(cores, chunks), sequence_length=length)
            cuts: dict[str, Any] = {"batch_chunk": sequences, "sequence_chunk": tokens, "barrier": barrier}
            jobs.append(job_of(config, shape, DataflowConfig(**cuts, precision=precision, grain="block")))
        for kind, rows in sample(jobs, cores, turns).items():
            samples.setdefault(kind, []).extend(rows)
        print(f"calibrate  kernels of {model}: {perf_counter() - start:.0f} s")
    return overheads(samples, cores)


def of_job(job: Job, chunk: tuple[int, int], stored: Calibration | None) -> Calibration:
    """Return a calibration from a few steps of the job's model with few blocks, and print that they take some time.

    stored  the calibration that lacks kinds of calls of this job, if there is one

    Errors   MemoryError if that might take more than half of the free memory
    """
    cores, length = usable_cores(), job.batch_shape[1]
    sequences = max(1, min(chunk[0], QUICK_TOKENS // length))
    dials: dict[str, Any] = {"batch_chunk": sequences, "sequence_chunk": chunk[1], "grain": "block"}
    trial = replace(
        job,
        config=replace(job.config, blocks=min(job.config.blocks, 2)),
        data=replace(job.data, batch_size=sequences * max(cores, 2), accumulate=1, groups=0),
        dataflow=replace(job.dataflow, scheduler="threads", **dials),
        dataset=None,
    )
    step = LocalEngine(trial, local_scheduler("sync", 1), lambda line: None, memory=math.inf).step
    needed, half = Trial(step).peak, machine.available_memory() / 2
    rule, advice = "kernels must be timed to predict a step", "Free memory."
    advice = advice if stored else f"Run {called('bench')} --calibrate, or free memory."
    got = f"{needed / 1e9:,.1f} GB for a trial of {half / 1e9:,.1f} GB"
    require(needed <= half, "plan", rule, got, advice, MemoryError)
    jobs = [trial]
    if job.dataflow.barrier in ("step", "none"):  # ranks sum and update apart
        jobs.append(replace(trial, dataflow=replace(trial.dataflow, barrier="phase")))
    kept = "" if stored else f" ({called('bench')} --calibrate keeps such times)"
    print(f"timing kernels of this model{kept} ...", file=sys.stderr, flush=True)
    samples = sample(jobs, cores, QUICK_TURNS)
    if stored:
        return replace(stored, samples=samples | stored.samples)
    return overheads(samples, cores, FEW_TASK_POINTS, QUICK_TURNS)


def engines_with(stack: ExitStack, jobs: Iterable[Job], *pools: tuple[str, int]) -> list[TimedEngine]:
    """Return engines of all jobs of one model on each scheduler (and threads), after a step; they share one state."""
    made, shared = list[TimedEngine](), dict[str, Any]()
    for name, threads in pools:
        scheduler = stack.enter_context(open_scheduler(name, threads))
        for job in jobs:
            compile_kernels(job.precision, job.uses)
            made.append(TimedEngine(job, scheduler, 0, shared.get(job.precision.name)))
            shared[job.precision.name] = made[-1].engine.state()
            made[-1].run(WARMUP)
    return made


def sample(jobs: Sequence[Job], cores: int, turns: int) -> Samples:
    """Return the median seconds of each kind of kernel call of the steps of some jobs of one model, on one thread and
    on all.

    They take turns, so that noise hits all alike.
    """
    seconds, samples = defaultdict[Any, list[float]](list), Samples()
    with ExitStack() as stack:
        engines = engines_with(stack, jobs, ("sync", 1), ("threads" if cores > 1 else "sync", cores))
        for _ in range(turns):
            for number, engine in enumerate(engines):
                name, precision = SITUATIONS[number // len(jobs)], engine.job.precision.name
                for span in engine.recorded(1)[1]:
                    if work := work_of(engine.engine.step.kernels.graph, span.key):
                        sizes = tuple(sorted(work[1].items()))
                        seconds[f"{name} {precision} {work[0]}", sizes].append(span.end - span.start)
    for (kind, sizes), times in seconds.items():
        samples.setdefault(kind, []).append((dict(sizes), median(times)))
    return samples


def overheads(
    samples: Samples,
    cores: int,
    points: Sequence[tuple[int, str, str]] = TASK_POINTS,
    turns: int = TASK_TURNS,
) -> Calibration:
    """Return a calibration with these samples and the measured cost of tasks, in steps of a small model.

    Dask's code takes longer the longer the kernels before it, which leave no other code in the caches, and let other
    threads and cores fall asleep; tasks that do nothing cost a third. So the cost is what remains of steps beside their
    kernels. Many threads keep Dask's code in the caches of the core that has the lock, so the time with the lock is
    that of tasks that do nothing.
    """

    def job(sequences: int, grain: str, barrier: str = "step") -> Job:
        cuts: dict[str, Any] = {"batch_chunk": sequences, "sequence_chunk": 64}
        return job_of(TINY, BenchConfig(), DataflowConfig(**cuts, grain=grain, barrier=barrier))

    graphs, tasks = list[tuple[float, float]](), list[tuple[float, float, float]]()
    for point in points:
        with ExitStack() as stack:
            alone, pooled = engines_with(stack, [job(*point)], ("sync", 1), ("sync", 1))
            pooled.engine.scheduler = LocalScheduler(partial(dask.threaded.get, num_workers=1), "a pool of one thread")
            rows = [(*_parts(alone), pooled.run(1)[0] - alone.run(1)[0]) for _ in range(turns)]
        ends, kernels, between, further = np.median(rows, axis=0).tolist()
        graphs.append((len(alone.engine.step.graph), ends))
        tasks.append((kernels / alone.engine.tasks, between, between + max(further, 0.0) / alone.engine.tasks))
    nodes, seconds = zip(*graphs)
    node, begin = np.polyfit(nodes, seconds, 1)
    with ExitStack() as stack:  # four chunks
        few, many = engines_with(stack, [job(3, "block")], ("threads", cores), ("threads", 2 * cores))
        times = in_turns({"few": few, "many": many}, turns)
    return Calibration(
        cores=cores,
        samples=samples,
        graph=(max(float(begin), 0.0), max(float(node), 0.0)),
        tasks=sorted(tasks),
        lock=max(_seconds_of_nothing(max(cores, 2)), 0.0),
        crowd=max(1.0, median(times["many"]) / median(times["few"])),
        copy=machine.copy_rate(),
    )


def _parts(engine: TimedEngine) -> tuple[float, float, float]:
    """Return the seconds of a step on one thread before its first call and after the last one, those of its calls, and
    those from the last call of a task to the first one of the next.
    """
    task_of = {call.key: key for key, node in engine.engine.step.graph.items() for call in calls_of(node)}
    (seconds,), spans = engine.recorded(1)
    gaps = [after.start - span.end for span, after in pairwise(spans) if task_of[span.key] != task_of[after.key]]
    return seconds - spans[-1].end + spans[0].start, sum(span.end - span.start for span in spans), fmean(gaps)


def _seconds_of_nothing(threads: int) -> float:
    """Return the seconds that each further task which does nothing takes, once Dask has begun to run its graph."""
    times = []
    with open_scheduler("threads", threads) as scheduler:
        for count in (FEW, MANY):
            keys: list[Key] = [("nothing", number) for number in range(count)]
            graph: Graph = {key: task(key, wait, []) for key in keys}
            turns = []
            for _ in range(5):
                start = perf_counter()
                start_state_from_dask(graph, {}, order(graph).get)
                begun = perf_counter()
                scheduler.run(Submission(graph, {}, keys))
                turns.append(perf_counter() - begun - (begun - start))
            times.append(median(turns))
    return (times[1] - times[0]) / (MANY - FEW)
