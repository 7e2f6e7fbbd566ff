"""Predict the time of a step by discrete events, from the graphs that would run and the calibration of a machine.

Each process chooses tasks as Dask's schedulers do, with Dask's own functions. The start of a task and its messages need
the interpreter's lock, which one thread of a process holds at a time; kernels do not.
A task takes the time of its calls on one thread or, with k of n cores in kernels, k / n of their time beside calls on
all n cores if that is longer: cores share the memory. A machine with more to do than cores slows everything on it
equally, and a little more than by their number. Messages from one process to another follow each other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import count, pairwise
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

from dask.local import finish_task, start_state_from_dask
from dask.order import order

from daskgpt.config.errors import require
from daskgpt.config.flags import called
from daskgpt.graph.calls import MESSAGE, Exchange, call_of
from daskgpt.graph.distribute import Rank
from daskgpt.graph.nodes import Graph, Key, is_leaf, key_trees, renamed, with_leaves
from daskgpt.graph.program import Span, calls_of
from daskgpt.graph.update_in_place import RowUpdate
from daskgpt.model.step import CompiledStep
from daskgpt.profiling.calibrate import Calibration, load, of_job
from daskgpt.profiling.timeline import longest_chain
from daskgpt.schedulers.local import local_scheduler
from daskgpt.schedulers.machine import usable_cores
from daskgpt.training.autotune import empty_submission
from daskgpt.training.cost import work_of
from daskgpt.training.engine import LocalEngine
from daskgpt.training.job import Job

Task = tuple[int, Key]  # of a rank
RUNS = 3  # of several processes, one after the other; the first one only fills their pipeline
TASKS = 10**9  # more than there are: their numbers have equally many digits


@dataclass(frozen=True)
class Demand:
    """The needs of a task.

    alone     seconds of its kernels on one thread
    beside    seconds of them while all cores run kernels
    sends     ranks, channels and bytes of its messages; receives: ranks and channels
    """

    alone: float = 0.0
    beside: float = 0.0
    sends: Sequence[tuple[int, Hashable, int]] = ()
    receives: Sequence[tuple[int, Hashable]] = ()

    @classmethod
    def of(cls, calls: Sequence[Demand]) -> Demand:
        """Return what a task of several calls needs."""
        sends, receives = ([part for call in calls for part in getattr(call, name)] for name in ("sends", "receives"))
        return cls(sum(call.alone for call in calls), sum(call.beside for call in calls), sends, receives)


def call_demands(step: CompiledStep, costs: Calibration) -> dict[Key, Demand]:
    """Return what each call of a step needs, before calls are fused."""
    graph, demands = step.kernels.graph, dict[Key, Demand]()
    for key, node in graph.items():
        call: Any = call_of(node)
        if is_leaf(node) or call.origin is None:
            continue
        copied, messages, alone, beside = 0, dict[str, Any](), 0.0, 0.0
        if isinstance(call, Exchange) and call.peer < 0:
            copied = call.size
        elif isinstance(call, Exchange) and call.returns == MESSAGE:
            messages = {"receives": [(call.peer, call.channel)]}
        elif isinstance(call, Exchange):
            messages = {"sends": [(call.peer, call.channel, call.size)]}
        elif isinstance(call, RowUpdate) and call.tree:
            rows = call.rows.stop - call.rows.start
            _, totals, _ = key_trees(node)
            copied = len(totals) * rows * prod(call.columns) * call.dtype.itemsize
        if work := work_of(graph, key):
            alone, beside = costs.seconds(f"{step.dials.precision.name} {work[0]}", work[1])
        copying = 2 * copied / costs.copy
        demands[key] = Demand(alone + copying, beside + copying, **messages)
    return demands


@dataclass(frozen=True)
class Process:
    """A graph that a process runs again and again.

    wanted   keys whose results are read from outside
    demands  of its tasks
    steps    of one run
    """

    graph: Graph
    wanted: Sequence[Key]
    demands: Mapping[Key, Demand]
    threads: int
    steps: int = 1

    @classmethod
    def of_engine(cls, engine: LocalEngine, costs: Calibration) -> Process:
        """Return the process that runs the steps of an engine: one, or several that overlap, as a window."""
        step, demands = engine.step, call_demands(engine.step, costs)
        run = empty_submission(step, [None] * len(step.layout.packs), engine.together())
        graph = with_leaves(run.graph, run.leaves)
        # Dask breaks ties by names and by hashes, which differ from run to run; those of numbers do not.
        names = sorted(graph, key=lambda key: str(key).replace(step.kernels.token, ""))
        new: dict[Key, Key] = {key: (TASKS + number,) for number, key in enumerate(names)}
        graph, wanted = renamed(graph, new), [new[key] for key in run.keys]
        of_tasks = {key: Demand.of([demands[call.key] for call in calls_of(node)]) for key, node in graph.items()}
        return cls(graph, wanted, of_tasks, engine.scheduler.threads, run.runs)

    @cached_property
    def order(self) -> dict[Key, int]:
        """Dask's order of the nodes."""
        return dict(order(self.graph))


class Message(NamedTuple):
    """A message of so many bytes on its way."""

    sender: int
    receiver: int
    channel: Hashable
    size: int


class Simulation:
    """The run of some processes of one machine that exchange messages.

    ends    of the runs of each process
    busy    seconds of kernels on all threads
    locked  seconds for which each process's lock was held
    interpreter
            seconds between kernels of all threads, with and without the lock
    """

    def __init__(self, processes: Sequence[Process], costs: Calibration, cores: int, runs: int = 1) -> None:
        """cores   of the machine; runs: of each process, one after the other"""
        self.processes, self.costs, self.cores, self.runs = processes, costs, cores, runs
        self.now, self.events, self.number = 0.0, list[Any](), count()
        ranks = range(len(processes))
        # Kernels of tasks and messages that go on: the part of each that is left, and what is called at its end.
        self.left, self.at_end = dict[Task | Message, float](), dict[Task | Message, Callable[[], None]]()
        self.speed, self.since, self.version = dict[Task | Message, float](), 0.0, 0  # in parts a second
        self.state: list[dict[str, Any]] = [{} for _ in ranks]
        self.free, self.locked = [0.0] * len(ranks), [0.0] * len(ranks)
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy = 0.0
        self.interpreter = 0.0
        self.arrived = Counter[tuple[int, int, Hashable]]()  # receiver, sender and channel -> messages
        self.blocked = [list[Key]() for _ in ranks]  # tasks that wait for messages
        self.pairs: dict[tuple[int, int], deque[Message]] = defaultdict(deque)  # messages to send
        for rank in ranks:
            self._begin(rank)
        while self.events:
            self.now, _, function, arguments = heappop(self.events)
            function(*arguments)
        rule, stuck = "every process must end its runs", [rank for rank in ranks if len(self.ends[rank]) < runs]
        require(not stuck, "simulate", rule, {"waiting": stuck}, "Give messages senders.", RuntimeError)

    @property
    def seconds(self) -> float:
        """Seconds of a step, once processes have begun; of the only run, from its start."""
        ends = [0.0, *self.ends[0]] if self.runs == 1 else self.ends[0]
        return (ends[-1] - ends[0]) / (len(ends) - 1) / self.processes[0].steps

    def at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a time."""
        heappush(self.events, (time, next(self.number), function, arguments))

    def _locked(
        self, rank: int, seconds: float, function: Callable[..., None], *arguments: Any, more: float = 0.0
    ) -> None:
        """Call a function after its thread has held the lock for some seconds, and has run for more without it."""
        self.free[rank] = max(self.now, self.free[rank]) + seconds
        self.locked[rank] += seconds
        self.interpreter += seconds + more
        self.at(self.free[rank] + more, function, *arguments)

    def _begin(self, rank: int) -> None:
        process, (any_graph, node) = self.processes[rank], self.costs.graph
        keys = set(process.wanted)
        self.state[rank] = start_state_from_dask(process.graph, {}, process.order.__getitem__, keys)
        self._locked(rank, any_graph + node * len(process.graph), self._fire, rank)

    def _fire(self, rank: int) -> None:
        """Give tasks whose needs are done to threads that have none, from the end of Dask's list."""
        state, process = self.state[rank], self.processes[rank]
        while state["ready"] and len(state["running"]) < process.threads:
            key = state["ready"].pop()
            state["running"].add(key)
            lock, besides = self.costs.of_task(process.demands[key].alone, process.threads > 1)
            self._locked(rank, lock, self._receive, rank, key, more=besides)

    def _receive(self, rank: int, key: Key) -> None:
        """Let a task wait in its thread for its messages."""
        places = [(rank, *place) for place in self.processes[rank].demands[key].receives]
        if all(self.arrived[place] for place in places):
            self.arrived.subtract(places)
            self._compute(rank, key)
        else:
            self.blocked[rank].append(key)

    def _compute(self, rank: int, key: Key) -> None:
        """Let a task run its kernels, which do not hold the lock."""
        began, demand = self.now, self.processes[rank].demands[key]
        if not demand.alone:
            self._done(rank, key)
            return

        def ended() -> None:
            self.busy += self.now - began
            self._done(rank, key)

        self._start((rank, key), ended)

    def _start(self, name: Task | Message, end: Callable[[], None]) -> None:
        """Begin the kernels of a task, or a message; `end` is called when they are done."""
        self.left[name], self.at_end[name] = 1.0, end
        self._go_on()

    def _go_on(self) -> None:
        """Let everything go on at the speeds of now, until the first one is done."""
        for name, speed in self.speed.items():
            self.left[name] -= (self.now - self.since) * speed
        self.speed, self.since, self.version = self._speeds(), self.now, self.version + 1
        if self.left:
            first = min(self.left, key=lambda name: self.left[name] / self.speed[name])
            self.at(self.now + max(self.left[first], 0.0) / self.speed[first], self._end, first, self.version)

    def _end(self, name: Task | Message, version: int) -> None:
        if version == self.version:
            del self.speed[name], self.left[name]
            self.at_end.pop(name)()
            self._go_on()

    def _speeds(self) -> dict[Task | Message, float]:
        tasks, speeds = sum(not isinstance(name, Message) for name in self.left), dict[Task | Message, float]()
        active = (2 * len(self.left) - tasks) / self.cores  # a message keeps two cores busy, at both of its ends
        share = 1.0 if active <= 1 else 1 / active / (1 + (self.costs.crowd - 1) * min(active - 1, 1))
        slowed = min(tasks, self.costs.cores) / self.costs.cores if tasks > 1 else 0.0
        for name in self.left:
            if isinstance(name, Message):
                speeds[name] = share * self.costs.rate / max(name.size, 1)
            else:
                demand = self.processes[name[0]].demands[name[1]]
                speeds[name] = share / max(demand.alone, demand.beside * slowed)
        return speeds

    def _done(self, rank: int, key: Key) -> None:
        """Send the messages of a task whose calls are made, and go on with others."""
        process, state = self.processes[rank], self.state[rank]
        for send in process.demands[key].sends:
            self._locked(rank, self.costs.message, self._post, Message(rank, *send))
        finish_task(process.graph, key, state, set(), process.order.__getitem__, delete=False)
        if state["waiting"] or state["ready"] or state["running"]:
            self._fire(rank)
            return
        self.ends[rank].append(self.now)
        if len(self.ends[rank]) < self.runs:
            self._begin(rank)

    def _post(self, message: Message) -> None:
        """Send a message after those from the same process to the same one."""
        messages = self.pairs[message.sender, message.receiver]
        messages.append(message)
        if len(messages) == 1:
            self._start(message, partial(self._sent, message))

    def _sent(self, message: Message) -> None:
        messages = self.pairs[message.sender, message.receiver]
        self._locked(message.receiver, self.costs.message, self._arrive, message)
        messages.popleft()
        if messages:
            self._start(messages[0], partial(self._sent, messages[0]))

    def _arrive(self, message: Message) -> None:
        self.arrived[message.receiver, message.sender, message.channel] += 1
        blocked, self.blocked[message.receiver] = self.blocked[message.receiver], []
        for key in blocked:
            self._receive(message.receiver, key)


def critical_path(processes: Sequence[Process], costs: Calibration) -> float:
    """Return the seconds of the longest chain of kernels and messages of a run that wait for each other, with as many
    threads as there are tasks.
    """
    posts = defaultdict[Any, deque[tuple[Task, float]]](deque)  # sender, receiver, channel -> tasks, seconds
    needs = dict[Task, dict[Task, float]]()
    tasks = {(rank, key): demand for rank, one in enumerate(processes) for key, demand in one.demands.items()}
    for (rank, key), demand in tasks.items():
        for peer, channel, size in demand.sends:
            posts[rank, peer, channel].append(((rank, key), 2 * costs.message + size / costs.rate))
    for (rank, key), demand in tasks.items():
        graph = processes[rank].graph
        needs[rank, key] = {(rank, needed): 0.0 for needed in graph[key].dependencies if needed in graph}
        # Runs that overlap use a channel one after the other.
        needs[rank, key] |= [posts[peer, rank, channel].popleft() for peer, channel in demand.receives]
    ordered = ((task, needs[task]) for task in TopologicalSorter(needs).static_order())
    chain = longest_chain(ordered, {task: demand.alone for task, demand in tasks.items()})
    on_links = sum(needs[task][before] for before, task in pairwise(chain))
    return (sum(tasks[task].alone for task in chain) + on_links) / processes[0].steps


@dataclass(frozen=True)
class Forecast:
    """The predicted time of a step.

    seconds     of a step
    one_thread  seconds of a step on one thread; 0 for that thread itself
    threads     of all processes together
    busy        seconds of kernels in a step, all threads together; `work` on one thread
    path        seconds of the longest chain of kernels and messages that wait for each other
    locked      seconds for which the busiest process held its interpreter's lock
    interpreter seconds of the interpreter between kernels in a step, all threads together
    notes       what was assumed
    """

    seconds: float
    one_thread: float
    threads: int
    busy: float
    work: float
    path: float
    locked: float
    interpreter: float
    notes: Sequence[str]

    def rows(self) -> dict[str, str]:
        """Return lines for people, by name."""
        ms, all_time = 1e3, self.threads * self.seconds
        time = f"{ms * self.seconds:,.1f} ms a step predicted"
        if self.one_thread:
            speedup = self.one_thread / self.seconds
            time += f", {speedup:.2f} times as fast as one thread ({ms * self.one_thread:,.1f} ms): "
            time += f"efficiency {speedup / self.threads:.0%}"
        kernels, interpreter = self.busy / all_time, self.interpreter / all_time
        idle = max(1 - kernels - interpreter, 0.0)  # a message needs the interpreter beside the threads
        limits = {"kernels, on each thread": self.busy / self.threads, "critical path": self.path}
        limits["the interpreter's lock"] = self.locked
        most, *others = sorted(limits.items(), key=lambda item: -item[1])
        lines = {
            "time": time,
            "threads' time": f"kernels {kernels:.0%}, interpreter {interpreter:.0%}, idle {idle:.0%}",
            "critical path": f"{ms * self.path:,.1f} of {ms * self.work:,.1f} ms of work",
            "limit": f"{most[0]}: {ms * most[1]:,.1f} ms ({', '.join(f'{a} {ms * b:,.1f}' for a, b in others)})",
        }
        return lines | ({"from": "; ".join(self.notes)} if self.notes else {})


def forecast(job: Job, engines: Sequence[LocalEngine], *, cores: int = 0, costs: Calibration | None = None) -> Forecast:
    """Return the predicted time of a job's steps.

    Auto chunks and grain of the engines are settled by predicted times of kernels, as a run settles them by measured
    ones. Without a stored calibration, or one that lacks kernels of this job, a few steps of its model with few blocks
    are run.

    engines  as of `engines_of`
    cores    of the machine; 0 for those of this one, or one a thread if there are more threads
    costs    the calibration; None for the stored one

    Errors   MemoryError if kernels must be timed, and that might take more than half of the free memory
    """
    ranks, threads, notes = len(engines), engines[0].scheduler.threads, list[str]()
    costs = costs or _calibration(job, engines[0].step, notes)
    for engine in engines:
        while engine.undecided:
            demands = call_demands(engine.step, costs)
            times = {key: demand.beside if threads > 1 else demand.alone for key, demand in demands.items()}
            engine.tune([Span(key, 0, 0.0, seconds) for key, seconds in times.items()], job.steps)
    processes = [Process.of_engine(engine, costs) for engine in engines]
    cores = cores or max(ranks * threads, usable_cores())
    if cores > costs.cores:
        notes.append(f"more cores than the {costs.cores} that were measured, each with the memory rate of one of them")
    if ranks > 1:
        notes.append("messages within a machine take as long as on two cores of an EPYC (Zen 3)")
    runs = RUNS if ranks > 1 else 1
    simulation, steps, alone = Simulation(processes, costs, cores, runs), processes[0].steps, 0.0
    if ranks * threads > 1:
        single = replace(job, dataflow=replace(job.dataflow, scheduler="sync", threads=1))
        alone = forecast(single, engines_of(single), costs=costs).seconds
    return Forecast(
        seconds=simulation.seconds,
        one_thread=alone,
        threads=ranks * threads,
        busy=simulation.busy / runs / steps,
        work=sum(demand.alone for process in processes for demand in process.demands.values()) / steps,
        path=critical_path(processes, costs),
        locked=max(simulation.locked) / runs / steps,
        interpreter=simulation.interpreter / runs / steps,
        notes=notes,
    )


def engines_of(job: Job, workers: int = 0) -> list[LocalEngine]:
    """Return the engine of each worker that would share a job's batch, without links; of one process if it is alone.

    workers   each with the job's threads, or one; 0 for the scheduler of the job
    """
    ranks, here = max(1, min(workers, job.groups)), usable_cores()
    is_local = workers > 0 or job.scheduler in ("sync", "threads")
    threads = job.dataflow.threads or (1 if workers else here)
    scheduler = local_scheduler("threads", 1 if job.scheduler == "sync" and not workers else threads)
    # The memory of this machine does not bound others.
    memory = None if is_local and ranks * scheduler.threads <= here else math.inf
    nobody: Any = None  # sends anything
    given = ranks, nobody, job.groups, *job.batch_shape, scheduler.threads
    numbers = [Rank(number, *given) if ranks > 1 else None for number in range(ranks)]
    return [LocalEngine(job, scheduler, lambda line: None, rank, memory) for rank in numbers]


def _calibration(job: Job, step: CompiledStep, notes: list[str]) -> Calibration:
    """Return the stored calibration, or one that is made now from steps like this one.

    Errors   MemoryError if those steps might not fit
    """
    graph, stored, start = step.kernels.graph, load(), perf_counter()
    works = [work for key in graph if (work := work_of(graph, key))]
    if stored and all(stored.knows(f"{step.dials.precision.name} {kind}") for kind, _ in works):
        return stored
    made, advice = of_job(job, step.dials.chunk, stored), f" (better: {called('bench')} --calibrate)" * (not stored)
    seconds = perf_counter() - start
    notes.append(f"kernels timed for {seconds:.1f} s just now, in steps of this model with few blocks{advice}")
    return made
