"""Measure what steps are made of on this machine: kernel calls, Dask's tasks, and messages between workers.

`python -m daskgpt.bench --calibrate` runs steps of small models on one thread and on all of them, and keeps the median
time of each kernel call by its kind (layer, pass, precision) and sizes. The time of a call of other sizes is

    a calls + b numbers read + c numbers written + d operations      a, b, c, d >= 0

fitted to the samples of its kind, times the ratio between measured and fitted times of samples of similar sizes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
from dask.local import start_state_from_dask
from dask.order import order

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of, replacing
from daskgpt.config.flags import called
from daskgpt.config.model import ModelConfig, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.calls import wait
from daskgpt.graph.compiled import Submission
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.program import calls_of
from daskgpt.model.parameters import step_operations, value_count
from daskgpt.profiling.measure import BatchConfig, TimedEngine, job_of
from daskgpt.profiling.work import Sizes, features, work_of
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job, compile_kernels

Samples = dict[str, list[tuple[Sizes, float]]]  # kind of a call -> sizes of its axes, and seconds
SITUATIONS = ("alone", "beside")  # a call on one thread, and while all others run calls as well
# Blocks, heads, channels, and the vocabulary of the models of a calibration: more weights than caches hold, or few.
MODELS = {"tiny": preset("tiny"), "384": preset("tiny", blocks=6, heads=6, channels=384, positions=256)}
MODELS["gpt2"] = preset("gpt2", blocks=2)
# Chunks, sequences of each, tokens of a sequence and of each in a chunk, and the barrier. With barrier phase, sums and
# updates are apart, as on ranks.
POINTS: dict[str, Sequence[tuple[int, int, int, int, str]]] = {
    "tiny": [
        (2, 6, 64, 64, "step"),
        (2, 2, 64, 64, "step"),
        (2, 3, 64, 16, "step"),
        (2, 6, 64, 64, "phase"),
        (8, 1, 64, 64, "phase"),
    ],
    "384": [
        (2, 4, 64, 64, "step"),
        (2, 1, 256, 256, "step"),
        (2, 2, 64, 32, "step"),
        (2, 4, 64, 64, "phase"),
        (8, 1, 64, 64, "phase"),
    ],
    "gpt2": [(2, 2, 64, 64, "step"), (2, 1, 256, 256, "step"), (4, 1, 256, 256, "phase")],
}
WARMUP, QUICK_TURNS, TASK_TURNS = 1, 2, 11  # steps
TURNS = {"tiny": 9, "384": 3, "gpt2": 3}
# Sequences of a chunk, grain, and barrier of steps that show the cost of tasks: of some tenths of a ms up to some ms.
TASK_POINTS = [(2, "kernel", "layer"), (6, "kernel", "step"), (6, "segment", "phase"), (2, "block", "step")]
TASK_POINTS.append((6, "block", "step"))
FEW_TASK_POINTS = [TASK_POINTS[0], TASK_POINTS[-1]]  # the shortest and the longest tasks
OPERATIONS = 3  # their place among the features of a call
QUICK_TOKENS = 512  # of a chunk
FEW, MANY = 20, 220  # tasks of graphs without work
SMALL_MESSAGES, LARGE_MESSAGES, LARGE = 50, 8, 1 << 23  # numbers of messages, and bytes of a large one
CACHE = 1 << 22  # bytes


class Times:
    """Seconds of the calls of one kind, from samples."""

    def __init__(self, kind: str, samples: Sequence[tuple[Sizes, float]]) -> None:
        self.kind, self.axes = kind, sorted(samples[0][0])
        seconds = np.array([own for _, own in samples])
        known = np.array([features(kind, sizes) for sizes, _ in samples], float)
        best = np.inf
        for count in range(1, min(known.shape[1], len(samples)) + 1):
            for columns in combinations(reversed(range(known.shape[1])), count):
                some = known[:, columns] / seconds[:, None]
                scale = some.max(axis=0)
                found = np.linalg.lstsq(some / scale, np.ones(len(seconds)), rcond=None)[0]
                # Samples that leave it open are explained by operations, and nothing by noise.
                error = float(np.mean((some / scale @ found - 1) ** 2)) + 1e-3 * (count - (OPERATIONS in columns))
                if found.min() >= 0 and error < best:
                    best, self.rates = error, np.zeros(known.shape[1])
                    self.rates[list(columns)] = found / scale
        self.places = np.log([[sizes[axis] for axis in self.axes] for sizes, _ in samples])
        self.ratios = np.log(seconds / (known @ self.rates))

    def __call__(self, sizes: Sizes) -> float:
        distances = ((np.log([sizes[axis] for axis in self.axes]) - self.places) ** 2).sum(axis=1)
        weights = 1 / (distances + 1e-6)
        ratio = np.exp(weights @ self.ratios / weights.sum())
        return float(np.dot(features(self.kind, sizes), self.rates) * ratio)


@dataclass(frozen=True)
class Calibration:
    """The measured cost of the parts of a step on a machine.

    cores      that ran calls at once in the samples called beside
    samples    of kernel calls, by situation
    graph      seconds to begin the run of a graph, and for each of its nodes
    tasks      seconds of a task's kernels, and seconds that the synchronous scheduler and the threaded one add to it
    lock       seconds of the latter in which a thread holds the interpreter's lock
    call       seconds between two calls of a task, with the lock
    crowd      how many times as long kernels take with twice as many threads as cores, beside having half of a core
    copy       bytes a second that a thread reads and writes
    message    seconds for which a message keeps the interpreter of its sender busy, and that of its receiver
    rate       bytes a second of messages between two workers
    measured   whether message and rate were; otherwise they are those of two cores of an EPYC (Zen 3)
    """

    cores: int
    samples: dict[str, Samples]
    graph: tuple[float, float]
    tasks: Sequence[tuple[float, float, float]]
    lock: float
    call: float
    crowd: float
    copy: float
    message: float = 0.4e-3
    rate: float = 1e9
    measured: bool = False
    machine: dict[str, Any] = field(default_factory=lambda: known_machine())

    @cached_property
    def _times(self) -> dict[tuple[str, str], Times]:
        return {(name, kind): Times(kind, own) for name in SITUATIONS for kind, own in self.samples[name].items()}

    def knows(self, kind: str) -> bool:
        """Return whether calls of a kind were measured."""
        return all(kind in self.samples[name] for name in SITUATIONS)

    def seconds(self, kind: str, sizes: Sizes) -> tuple[float, float]:
        """Return the seconds of a call on one thread, and beside calls of all other threads; as if it only read and
        wrote, if its kind is unknown.
        """
        if not self.knows(kind):
            _, read, written, _ = features(kind, sizes)
            return (4 * (read + written) / self.copy,) * 2
        alone, beside = (self._times[name, kind](sizes) for name in SITUATIONS)
        return alone, max(alone, beside)

    def of_task(self, kernels: float, pooled: bool) -> tuple[float, float]:
        """Return for how long the scheduler holds the lock for a task with so many seconds of kernels, and how long it
        takes besides.
        """
        lengths, sync, threaded = zip(*self.tasks)
        seconds = float(np.interp(kernels, lengths, threaded if pooled else sync))
        lock = min(self.lock, seconds) if pooled else seconds
        return lock, seconds - lock

    def with_samples(self, more: Mapping[str, Samples]) -> Calibration:
        """Return the calibration with samples of further kinds."""
        return replace(self, samples={name: {**more[name], **self.samples[name]} for name in SITUATIONS})

    def describe(self) -> str:
        """Return what tasks, memory and messages cost, for people."""
        own, us = self.samples["alone"], 1e6
        sync, threaded = (f"{us * min(some):.0f} to {us * max(some):.0f}" for some in [*zip(*self.tasks)][1:])
        return (
            f"{sum(map(len, own.values()))} calls of {len(own)} kinds; beside its kernels, a task takes {sync} us of "
            f"the synchronous scheduler and {threaded} us of the threaded one, {us * self.lock:.0f} us of them with "
            f"the interpreter's lock, and each of its calls {us * self.call:.1f} us; a thread copies "
            f"{self.copy / 1e9:.1f} GB/s; a message {1e3 * self.message:.2f} ms at each end, {self.rate / 1e9:.2f} GB/s"
        )

    def save(self) -> Path:
        """Write the calibration to this user's cache; return the path. Errors   as of `replacing`"""
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "bench") as file:
            file.write(json.dumps(asdict(self)).encode())
        return path


def load() -> Calibration | None:
    """Return this machine's calibration from this user's cache; None without a readable one."""
    try:
        found = Calibration(**json.loads(cache_path().read_bytes()))
        return found if found.machine == known_machine() and found.samples.keys() == set(SITUATIONS) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def known_machine() -> dict[str, Any]:
    """Return what a calibration depends on."""
    own = machine.versions("numpy", "numba", "dask", "distributed")
    return {"processor": machine.processor(), "cores": usable_cores(), **own}


def cache_path() -> Path:
    """Return the file of this machine's calibration."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "daskgpt" / f"calibration-{digest_of(known_machine())[:12]}.json"


def calibrate(say: Callable[[str], None] = print) -> Calibration:
    """Measure everything, in some minutes; the machine should have nothing else to do."""
    cores, samples, start = usable_cores(), {name: Samples() for name in SITUATIONS}, perf_counter()
    say("calibrate  kernels, tasks and messages of this machine, for two to three minutes ...")
    for model, points in POINTS.items():
        config, jobs = MODELS[model], list[Job]()
        for precision in ("float32",) if model == "384" else ("float32", "auto"):
            for chunks, sequences, length, tokens, barrier in points:
                shape = BatchConfig(batch_size=sequences * max(cores, chunks), sequence_length=length)
                cuts: dict[str, Any] = {"batch_chunk": sequences, "sequence_chunk": tokens}
                job = job_of(config, shape, DataflowConfig(**cuts, barrier=barrier, precision=precision, grain="block"))
                if precision == "float32" or job.precision.name != "float32":
                    jobs.append(job)
        for job in jobs:
            compile_kernels(job.precision)
        _extend(samples, sample(jobs, cores, TURNS[model]))
        say(f"calibrate  kernels of {model}: {perf_counter() - start:.0f} s")
    return replace(overheads(samples, cores), **messages())


def of_job(job: Job, chunk: tuple[int, int], known: Calibration | None) -> Calibration:
    """Return a calibration from a few steps of the job's model with few blocks, without messages, and print that these
    steps take some time.

    known   the calibration that lacks kinds of calls of this job, if there is one

    Errors   MemoryError if that might take more than half of the free memory
    """
    cores, length = usable_cores(), job.batch_shape[1]
    sequences = max(1, min(chunk[0], QUICK_TOKENS // length))
    dials: dict[str, Any] = {"batch_chunk": sequences, "sequence_chunk": chunk[1], "grain": "block"}
    own = replace(
        job,
        config=replace(job.config, blocks=min(job.config.blocks, 2)),
        data=replace(job.data, batch_size=sequences * max(cores, 2), accumulate=1, groups=0),
        dataflow=replace(job.dataflow, scheduler="threads", **dials),
        dataset=None,
    )
    rows, half = math.prod(own.batch_shape), machine.available_memory() / 2
    needed = 16 * value_count(own.config) + 8 * rows * own.config.padded_vocabulary
    rule, advice = "kernels must be timed to predict a step", f"Run {called('bench')} --calibrate, or free memory."
    got = f"{needed / 1e9:,.1f} GB for a trial of {half / 1e9:,.1f} GB"
    require(needed <= half, "plan", rule, got, advice, MemoryError)
    compile_kernels(own.precision, own.uses)
    shapes = [own]
    if job.dataflow.barrier in ("step", "none"):  # ranks sum and update apart
        shapes.append(replace(own, dataflow=replace(own.dataflow, barrier="phase")))
    steps = len(shapes) * (WARMUP + QUICK_TURNS) * (1 + 1 / cores)
    operations, rate = step_operations(own.config, *own.batch_shape), machine.product_rate(1, products=2, rounds=1)
    seconds = 5 + 2 * steps * operations / rate
    kept = "" if known else f" ({called('bench')} --calibrate keeps such times)"
    print(f"timing kernels of this model for about {seconds:.0f} seconds{kept} ...", file=sys.stderr, flush=True)
    samples = sample(shapes, cores, QUICK_TURNS)
    if known:
        return known.with_samples(samples)
    return overheads(samples, cores, MODELS["tiny"], FEW_TASK_POINTS, QUICK_TURNS)


def _extend(samples: dict[str, Samples], more: Mapping[str, Samples]) -> None:
    for name, kinds in more.items():
        for kind, own in kinds.items():
            samples[name].setdefault(kind, []).extend(own)


def sample(jobs: Sequence[Job], cores: int, turns: int) -> dict[str, Samples]:
    """Return the median seconds of each kind of kernel call of the steps of some jobs of one model, on one thread and
    on all.

    They take turns, so that noise hits all alike, and share one state.
    """
    seconds, shared = defaultdict[Any, list[float]](list), dict[str, Any]()
    with ExitStack() as stack:
        runs = list[tuple[str, TimedEngine]]()
        for name, threads in zip(SITUATIONS, (1, cores)):
            if cores > 1 or name == "alone":
                scheduler = stack.enter_context(open_scheduler("sync" if threads == 1 else "threads", threads))
                for job in jobs:
                    steps = TimedEngine(job, scheduler, 0, shared.get(job.precision.name))
                    shared[job.precision.name] = steps.engine.state()
                    steps.run(WARMUP)
                    runs.append((name, steps))
        for _, (name, steps) in product(range(turns), runs):
            with steps.scheduler.record() as processes:
                steps.run(1)
            graph, precision = steps.engine.step.kernels.graph, steps.job.precision.name
            for span in (span for process in processes for span in process.spans):
                if work := work_of(graph, span.key):
                    kind, sizes = f"{precision} {work[0]}", tuple(sorted(work[1].items()))
                    seconds[name, kind, sizes].append(span.end - span.start)
    found = {name: Samples() for name in SITUATIONS}
    for (name, kind, sizes), own in seconds.items():
        found[name].setdefault(kind, []).append((dict(sizes), median(own)))
    return found if cores > 1 else dict.fromkeys(SITUATIONS, found["alone"])


def overheads(
    samples: dict[str, Samples],
    cores: int,
    model: ModelConfig = MODELS["tiny"],
    points: Sequence[tuple[int, str, str]] = TASK_POINTS,
    turns: int = TASK_TURNS,
) -> Calibration:
    """Return a calibration with these samples and the measured cost of tasks, in steps of a small model.

    Dask's code takes longer the longer the kernels before it, which leave no other code in the caches, and let other
    threads and cores fall asleep; tasks that do nothing cost a third. So the cost is what remains of steps beside their
    kernels. Many threads keep Dask's code in the caches of the core that has the lock, so the time with the lock is
    that of tasks that do nothing.
    """
    with open_scheduler("threads", max(cores, 2)) as scheduler:
        lock = _slope(partial(_run, scheduler)) - _slope(_begin)
    shape = BatchConfig(batch_size=12, sequence_length=min(64, model.positions))
    ends, calls, tasks = list[tuple[float, float]](), list[float](), list[tuple[float, float, float]]()
    with open_scheduler("sync", 1) as alone, open_scheduler("threads", 1) as pooled:
        for chunk, grain, barrier in points:
            dials: dict[str, Any] = {"sequence_chunk": shape.sequence_length, "grain": grain, "barrier": barrier}
            job = job_of(model, shape, DataflowConfig(batch_chunk=chunk, **dials))
            compile_kernels(job.precision, job.uses)
            one = TimedEngine(job, alone, 0)
            other = TimedEngine(job, pooled, 0, one.engine.state())
            one.run(WARMUP)
            other.run(WARMUP)
            rows = [(*_parts(one), other.run(1)[0] - one.run(1)[0]) for _ in range(turns)]
            end, kernels, inside, between, further = np.median(rows, axis=0).tolist()
            ends.append((len(one.engine.step.graph), end))
            calls.append(inside)
            tasks.append((kernels / one.tasks, between, between + max(further, 0.0) / one.tasks))
    nodes, seconds = zip(*ends)
    node, begin = np.polyfit(nodes, seconds, 1)
    return Calibration(
        cores=cores,
        samples=samples,
        graph=(max(float(begin), 0.0), max(float(node), 0.0)),
        tasks=sorted(tasks),
        lock=max(lock, 0.0),
        call=median(calls),
        crowd=_crowd(model, shape, cores, turns),
        copy=machine.copy_rate(1),
    )


def _crowd(model: ModelConfig, shape: BatchConfig, cores: int, turns: int) -> float:
    """Return how many times as long a step of four chunks takes with twice as many threads as cores."""
    cuts: dict[str, Any] = {"batch_chunk": 3, "sequence_chunk": shape.sequence_length}
    job = job_of(model, shape, DataflowConfig(**cuts, grain="block"))
    with open_scheduler("threads", cores) as few, open_scheduler("threads", 2 * cores) as many:
        one = TimedEngine(job, few, 0)
        other = TimedEngine(job, many, 0, one.engine.state())
        one.run(WARMUP)
        other.run(WARMUP)
        return max(1.0, median(other.run(1)[0] / one.run(1)[0] for _ in range(turns)))


def _parts(steps: TimedEngine) -> tuple[float, float, float, float]:
    """Return the seconds of a step on one thread before its first call and after the last one, those of its calls,
    those between two calls of a task, and those from the last call of a task to the first one of the next.
    """
    task_of = {call.key: key for key, node in steps.engine.step.graph.items() for call in calls_of(node)}
    with steps.scheduler.record() as processes:
        (seconds,) = steps.run(1)
    spans = processes[0].spans
    gaps = defaultdict[bool, list[float]](list)
    for span, following in pairwise(spans):
        gaps[task_of[span.key] == task_of[following.key]].append(following.start - span.end)
    calls = sum(span.end - span.start for span in spans)
    return seconds - spans[-1].end + spans[0].start, calls, fmean(gaps[True]), fmean(gaps[False])


def _slope(work: Callable[[Graph], object]) -> float:
    """Return the seconds that a further task which does nothing adds to the work on a graph of such tasks."""
    seconds = []
    for count in (FEW, MANY):
        keys: list[Key] = [("nothing", number) for number in range(count)]
        seconds.append(_seconds(partial(work, {key: task(key, wait, []) for key in keys})))
    return (seconds[1] - seconds[0]) / (MANY - FEW)


def _run(scheduler: Scheduler, graph: Graph) -> None:
    scheduler.run(Submission(graph, {}, list(graph)))


def _begin(graph: Graph) -> None:
    start_state_from_dask(graph, {}, order(graph).get)


def _seconds(work: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        start = perf_counter()
        work()
        found.append(perf_counter() - start)
    return median(found)


def messages() -> dict[str, Any]:
    """Return the cost of messages between two workers of this machine, as fields of a calibration."""
    with open_scheduler("local", 2) as scheduler:
        own: Any = scheduler
        addresses, epoch = sorted(own.addresses()), uuid4().hex

        def both(*arguments: Any) -> float:
            calls = [
                own.submit_to(address, "calibrate", _talk, epoch, number, addresses, *arguments)
                for number, address in enumerate(addresses)
            ]
            return float(own.fetch_together(calls)[0])

        both(0, 0)  # opens the links
        both(1, SMALL_MESSAGES)
        small, large = both(1, SMALL_MESSAGES), both(LARGE, LARGE_MESSAGES)
    return {"message": small / 2, "rate": LARGE / max(large - small, 1e-6), "measured": True}


def _talk(epoch: str, number: int, addresses: Sequence[str], size: int, count: int) -> float:
    """Send messages to the other worker and back; return the mean seconds of one. Without messages, open the link."""
    from distributed import get_worker

    from daskgpt.schedulers.links import WorkerLink, ranks_of

    links = ranks_of(get_worker()).links
    link = links.get(epoch) or WorkerLink(get_worker(), epoch, number, addresses)
    value, cache, besides = np.ones(size, np.uint8), np.ones(CACHE, np.uint8), 0.0
    start = perf_counter()
    for turn in range(2 * count):
        if turn % 2 == number:
            before = perf_counter()
            cache += 1  # as kernels do, which leave no other code in the caches
            besides += perf_counter() - before
            link.send(1 - number, "calibrate", value)
        else:
            link.receive(1 - number, "calibrate")
    return (perf_counter() - start - 2 * besides) / max(2 * count, 1)
