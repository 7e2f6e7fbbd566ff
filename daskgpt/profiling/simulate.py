"""Predict the time of a step by discrete events, from the graphs that would run and the calibration of a machine.

Each process chooses tasks as Dask's schedulers do, with Dask's own functions. The start of a task, the steps between
its calls, and its messages need the interpreter's lock, which one thread of a process holds at a time; kernels do not.
A task takes the time of its calls on one thread or, with k of n cores in kernels, k / n of their time beside calls on
all n cores if that is longer: cores share the memory. A machine with more to do than cores slows everything on it
equally, and a little more than by their number. Messages share the links of their machines equally, and those from one
process to another follow each other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import count, pairwise
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from dask.local import finish_task, start_state_from_dask
from dask.order import order

from daskgpt.config.errors import require
from daskgpt.config.flags import called
from daskgpt.graph.calls import MESSAGE, PHASES, Exchange, call_of
from daskgpt.graph.distribute import Rank
from daskgpt.graph.nodes import Graph, Key, is_leaf, renamed, with_leaves
from daskgpt.graph.program import Span, calls_of
from daskgpt.graph.update_in_place import RowUpdate
from daskgpt.model.step import CompiledStep
from daskgpt.profiling.calibrate import Calibration, load, of_job
from daskgpt.profiling.timeline import longest_chain
from daskgpt.profiling.work import work_of
from daskgpt.schedulers.local import local_scheduler
from daskgpt.schedulers.machine import usable_cores
from daskgpt.training.engine import LocalEngine
from daskgpt.training.job import Job

Kind = tuple[str, str]  # layer and phase
Seconds = dict[Kind, float]
ON_LINKS = ("messages", "update")
LEAST_GAIN = 0.005  # of the time of a step, to be shown
RUNS = 3  # of several processes, one after the other; the first one only fills their pipeline
TASKS = 10**9  # more than there are: their numbers have equally many digits


@dataclass(frozen=True)
class Platform:
    """The machines that processes run on.

    cores      of each machine
    bandwidth  bytes a second of each machine's link; 0 if all processes are on one machine
    latency    seconds of a message on a link
    """

    cores: int
    bandwidth: float = 0.0
    latency: float = 0.0


@dataclass
class Demand:
    """The needs of a task.

    alone     seconds of its kernels on one thread, by layer and phase; beside: while all cores run kernels
    calls     that it makes
    sends     ranks, channels and bytes of its messages; receives: ranks and channels
    """

    alone: Seconds = field(default_factory=dict)
    beside: Seconds = field(default_factory=dict)
    calls: int = 0
    sends: list[tuple[int, Hashable, int]] = field(default_factory=list)
    receives: list[tuple[int, Hashable]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seconds = sum(self.alone.values()), sum(self.beside.values())

    @classmethod
    def of(cls, calls: Sequence[Demand]) -> Demand:
        """Return what a task of several calls needs."""
        alone, beside = (added(getattr(own, name) for own in calls) for name in ("alone", "beside"))
        sends, receives = ([each for own in calls for each in getattr(own, name)] for name in ("sends", "receives"))
        return cls(alone, beside, len(calls), sends, receives)

    def faster(self, layer: str) -> Demand:
        """Return the same with a layer that takes half of its time."""
        alone, beside = (
            {kind: seconds / (2 if kind[0] == layer else 1) for kind, seconds in own.items()}
            for own in (self.alone, self.beside)
        )
        return replace(self, alone=alone, beside=beside)

    def with_memory(self) -> Demand:
        """Return the same where cores share twice the memory rate."""
        alone, beside = self.seconds
        share = max(alone, beside / 2) / (beside or 1.0)
        return replace(self, beside={kind: share * seconds for kind, seconds in self.beside.items()})


def added(parts: Iterable[Seconds]) -> Seconds:
    """Return the sums of seconds by layer and phase."""
    found = defaultdict[Kind, float](float)
    for part in parts:
        for kind, seconds in part.items():
            found[kind] += seconds
    return dict(found)


def call_demands(step: CompiledStep, calibration: Calibration) -> dict[Key, Demand]:
    """Return what each call of a step needs, before calls are fused."""
    graph, found = step.kernels.graph, dict[Key, Demand]()
    for key, node in graph.items():
        call: Any = call_of(node)
        if is_leaf(node) or call.origin is None:
            continue
        own, copied, seconds = Demand(calls=1), 0, (0.0, 0.0)
        if isinstance(call, Exchange) and call.peer < 0:
            copied = call.size
        elif isinstance(call, Exchange) and call.returns == MESSAGE:
            own.receives.append((call.peer, call.channel))
        elif isinstance(call, Exchange):
            own.sends.append((call.peer, call.channel, call.size))
        elif isinstance(call, RowUpdate) and call.tree:
            rows = call.rows.stop - call.rows.start
            copied = (len(node.args) - call.tensors) * rows * prod(call.columns) * call.dtype.itemsize
        if work := work_of(graph, key):
            seconds = calibration.seconds(f"{step.dials.precision.name} {work[0]}", work[1])
        kind = call.origin.layer, call.origin.phase
        alone, beside = ({kind: each + 2 * copied / calibration.copy} for each in seconds)
        found[key] = replace(own, alone=alone, beside=beside)
    return found


@dataclass(frozen=True)
class Process:
    """A graph that a process runs again and again.

    wanted   keys whose results are read from outside
    demands  of its tasks
    pooled   whether threads of a pool run the tasks
    steps    of one run
    """

    graph: Graph
    wanted: Sequence[Key]
    demands: Mapping[Key, Demand]
    threads: int
    pooled: bool
    steps: int = 1

    @classmethod
    def of_step(
        cls, step: CompiledStep, window: int, demands: Mapping[Key, Demand], threads: int, pooled: bool
    ) -> Process:
        """Return the process that runs a recorded step, or several that overlap, as a window."""
        values = {n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in step.kernels.inputs.items()}
        packs = [None] * len(step.layout.packs)
        run = step.submission(values, packs)
        if window > 1:
            run = step.window_submission([values] * window, packs)
        graph = with_leaves(run.graph, run.leaves)
        # Dask breaks ties by names and by hashes, which differ from run to run; those of numbers do not.
        names = sorted(graph, key=lambda key: str(key).replace(step.kernels.token, ""))
        new: dict[Key, Key] = {key: (TASKS + number,) for number, key in enumerate(names)}
        graph, wanted = renamed(graph, new), [new[key] for key in run.keys]
        own = {key: Demand.of([demands[call.key] for call in calls_of(node)]) for key, node in graph.items()}
        return cls(graph, wanted, own, threads, pooled, run.runs)

    @cached_property
    def order(self) -> dict[Key, int]:
        """Dask's order of the nodes."""
        return dict(order(self.graph))

    def needs(self, key: Key) -> list[Key]:
        """Return the tasks that a task waits for."""
        return [needed for needed in self.graph[key].dependencies if needed in self.graph]


class Events:
    """Functions to call at a time, in order."""

    def __init__(self) -> None:
        self.now, self.heap, self.number = 0.0, list[Any](), count()

    def at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        heappush(self.heap, (time, next(self.number), function, arguments))

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, function, *arguments)

    def run(self) -> None:
        while self.heap:
            self.now, _, function, arguments = heappop(self.heap)
            function(*arguments)


@dataclass
class Activity:
    """Work beside other work, at some speed (parts of it a second); `left` of it remained at `since`."""

    ended: Callable[[], None]
    left: float = 1.0
    speed: float = 0.0
    since: float = 0.0
    version: int = 0


class Activities:
    """Activities at speeds that depend on each other: on `circumstances` and on the activity alone."""

    def __init__(self, events: Events, circumstances: Callable[[], Any], speed: Callable[[Any], float]) -> None:
        self.events, self.circumstances, self.speed, self.known = events, circumstances, speed, None
        self.all: dict[Any, Activity] = {}
        self.others: Sequence[Activities] = ()  # whose circumstances these belong to

    def add(self, name: Any, ended: Callable[[], None]) -> None:
        """Begin an activity; `ended` is called at its end."""
        self.all[name] = Activity(ended, since=self.events.now)
        if not self.changed():
            self._pace(name)
        for other in self.others:
            other.changed()

    def changed(self) -> bool:
        """Find all speeds anew if the circumstances have changed; return whether they have."""
        now = self.circumstances()
        if now == self.known:
            return False
        self.known = now
        for name in self.all:
            self._pace(name)
        return True

    def _pace(self, name: Any) -> None:
        """Give an activity its speed from now on."""
        own, now = self.all[name], self.events.now
        own.left = max(own.left - (now - own.since) * own.speed, 0.0)
        own.speed, own.since, own.version = self.speed(name), now, next(self.events.number)
        self.events.at(now + own.left / own.speed, self._end, name, own.version)

    def _end(self, name: Any, version: int) -> None:
        if name not in self.all or self.all[name].version != version:
            return
        ended = self.all.pop(name).ended
        for each in (self, *self.others):
            each.changed()
        ended()


class Simulation(Events):
    """The run of some processes that exchange messages.

    ends    of the runs of each process
    busy    seconds of kernels on all threads, by layer and phase
    locked  seconds for which each process's lock was held
    sent    bytes that each process has sent
    """

    def __init__(self, processes: Sequence[Process], costs: Calibration, platform: Platform, runs: int = 1) -> None:
        super().__init__()
        self.processes, self.costs, self.platform, self.runs = processes, costs, platform, runs
        ranks = range(len(processes))
        apart = bool(platform.bandwidth)  # each process has its own machine
        self.host_of = [rank if apart else 0 for rank in ranks]
        self.hosts = [
            Activities(self, partial(self._circumstances, host), self._task_speed)
            for host in range(len(ranks) if apart else 1)
        ]
        self.links = Activities(self, self._on_links, self._message_speed)
        self.links.others = self.hosts
        for own in self.hosts:
            own.others = [self.links]
        self.using = Counter[tuple[str, int]]()  # messages under way from and to each process
        self.state: list[dict[str, Any]] = [{} for _ in ranks]
        self.free, self.locked, self.sent = [0.0] * len(ranks), [0.0] * len(ranks), [0] * len(ranks)
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy = defaultdict[Kind, float](float)
        self.arrived = Counter[tuple[int, int, Hashable]]()  # receiver, sender and channel -> messages
        self.waiting: dict[tuple[int, int, Hashable], deque[tuple[int, Key]]] = defaultdict(deque)
        self.missing = Counter[tuple[int, Key]]()  # messages that a task waits for
        self.pairs: dict[tuple[int, int], deque[tuple[Hashable, int]]] = defaultdict(deque)  # messages to send
        for rank in ranks:
            self._begin(rank)
        self.run()
        rule, stuck = "every process must end its runs", [rank for rank in ranks if len(self.ends[rank]) < runs]
        require(not stuck, "simulate", rule, {"waiting": stuck}, "Give messages senders.", RuntimeError)

    @property
    def seconds(self) -> float:
        """Seconds of a step, once processes have begun; of the only run, from its start."""
        ends = [0.0, *self.ends[0]] if self.runs == 1 else self.ends[0]
        return (ends[-1] - ends[0]) / (len(ends) - 1) / self.processes[0].steps

    def _locked(self, rank: int, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function after its thread has held the lock for some seconds."""
        self.free[rank] = max(self.now, self.free[rank]) + seconds
        self.locked[rank] += seconds
        self.at(self.free[rank], function, *arguments)

    def _begin(self, rank: int) -> None:
        process, (any_graph, node) = self.processes[rank], self.costs.graph
        keys = set(process.wanted)
        self.state[rank] = start_state_from_dask(process.graph, {}, process.order.__getitem__, keys)
        self._locked(rank, any_graph + node * len(process.graph), self._fire, rank)

    def _fire(self, rank: int) -> None:
        """Give tasks to threads that have none."""
        state, process = self.state[rank], self.processes[rank]
        while state["ready"] and len(state["running"]) < process.threads:
            key = state["ready"].pop()
            state["running"].add(key)
            lock, besides = self.costs.of_task(process.demands[key].seconds[0], process.pooled)
            self._locked(rank, lock, self.later, besides, self._receive, rank, key)

    def _receive(self, rank: int, key: Key) -> None:
        """Let a task wait in its thread for its messages."""
        for peer, channel in self.processes[rank].demands[key].receives:
            place = rank, peer, channel
            if self.arrived[place]:
                self.arrived[place] -= 1
            else:
                self.waiting[place].append((rank, key))
                self.missing[rank, key] += 1
        if not self.missing[rank, key]:
            self._call(rank, key)

    def _call(self, rank: int, key: Key) -> None:
        """Let a task make its calls: first what needs the lock, then the kernels."""
        demand = self.processes[rank].demands[key]
        then = self._compute if demand.seconds[0] else self._done
        self._locked(rank, demand.calls * self.costs.call, then, rank, key)

    def _compute(self, rank: int, key: Key) -> None:
        began = self.now

        def ended() -> None:
            demand = self.processes[rank].demands[key]
            for kind, seconds in demand.alone.items():
                self.busy[kind] += (self.now - began) * seconds / demand.seconds[0]
            self._done(rank, key)

        self.hosts[self.host_of[rank]].add((rank, key), ended)

    def _task_speed(self, activity: tuple[int, Key]) -> float:
        rank, key = activity
        host = self.host_of[rank]
        alone, beside = self.processes[rank].demands[key].seconds
        running, share = self._circumstances(host)
        return share / (max(alone, beside * running / self.costs.cores) if running > 1 else alone)

    def _circumstances(self, host: int) -> tuple[int, float]:
        """Return how many cores of a machine slow each other, and the share of a core that each activity has."""
        return min(len(self.hosts[host].all), self.costs.cores), self._share(host)

    def _on_links(self) -> Any:
        """Return how many messages share each link, and the shares of a core."""
        return list(self.using.items()), [self._share(host) for host in range(len(self.hosts))]

    def _share(self, host: int) -> float:
        """Return the share of a core that each activity of a machine has; a message is one at both of its ends."""
        apart = len(self.hosts) > 1
        messages = self.using["from", host] + self.using["to", host] if apart else 2 * len(self.links.all)
        active = (len(self.hosts[host].all) + messages) / self.platform.cores
        return 1.0 if active <= 1 else 1 / active / (1 + (self.costs.crowd - 1) * min(active - 1, 1))

    def _message_speed(self, activity: tuple[int, int, Hashable, int]) -> float:
        sender, receiver, _, size = activity
        rate = self.costs.rate * min(self._share(self.host_of[sender]), self._share(self.host_of[receiver]))
        if self.platform.bandwidth:
            sharing = max(self.using["from", sender], self.using["to", receiver])
            rate = min(rate, self.platform.bandwidth / sharing)
        return rate / max(size, 1)

    def _done(self, rank: int, key: Key) -> None:
        """Send the messages of a task whose calls are made, and go on with others."""
        process, state = self.processes[rank], self.state[rank]
        for peer, channel, size in process.demands[key].sends:
            self.sent[rank] += size
            self._locked(rank, self.costs.message, self._post, rank, peer, channel, size)
        finish_task(process.graph, key, state, set(), process.order.__getitem__, delete=False)
        if state["waiting"] or state["ready"] or state["running"]:
            self._fire(rank)
            return
        self.ends[rank].append(self.now)
        if len(self.ends[rank]) < self.runs:
            self._begin(rank)

    def _post(self, rank: int, peer: int, channel: Hashable, size: int) -> None:
        self.pairs[rank, peer].append((channel, size))
        if len(self.pairs[rank, peer]) == 1:
            self._send(rank, peer)

    def _send(self, rank: int, peer: int) -> None:
        channel, size = self.pairs[rank, peer][0]
        self.later(self.platform.latency, self._transfer, (rank, peer, channel, size))

    def _transfer(self, activity: tuple[int, int, Hashable, int]) -> None:
        self.using.update({("from", activity[0]): 1, ("to", activity[1]): 1})
        self.links.add(activity, partial(self._sent, activity))

    def _sent(self, activity: tuple[int, int, Hashable, int]) -> None:
        rank, peer, channel, _ = activity
        self.using.subtract({("from", rank): 1, ("to", peer): 1})
        for each in (self.links, *self.hosts):
            each.changed()
        self._locked(peer, self.costs.message, self._arrive, peer, rank, channel)
        self.pairs[rank, peer].popleft()
        if self.pairs[rank, peer]:
            self._send(rank, peer)

    def _arrive(self, rank: int, peer: int, channel: Hashable) -> None:
        place = rank, peer, channel
        if not self.waiting[place]:
            self.arrived[place] += 1
            return
        task = self.waiting[place].popleft()
        self.missing[task] -= 1
        if not self.missing[task]:
            self._call(*task)


def critical_path(processes: Sequence[Process], costs: Calibration, platform: Platform) -> Seconds:
    """Return the seconds of the longest chain of kernels and messages of a run that wait for each other, by layer and
    phase, with as many threads as there are tasks.
    """
    posts = defaultdict[Any, list[tuple[tuple[int, Key], float]]](list)  # sender, receiver, channel -> tasks, seconds
    rate = min(costs.rate, platform.bandwidth or costs.rate)
    for rank, process in enumerate(processes):
        for key, demand in process.demands.items():
            for peer, channel, size in demand.sends:
                seconds = 2 * costs.message + platform.latency + size / rate
                posts[rank, peer, channel].append(((rank, key), seconds))
    needs: dict[tuple[int, Key], dict[tuple[int, Key], float]] = {}
    for rank, process in enumerate(processes):
        for key, demand in process.demands.items():
            own = {(rank, needed): 0.0 for needed in process.needs(key)}
            for peer, channel in demand.receives:  # runs that overlap use a channel one after the other
                sender, seconds = posts[peer, rank, channel].pop(0)
                own[sender] = seconds
            needs[rank, key] = own
    ordered = ((task, needs[task]) for task in TopologicalSorter(needs).static_order())
    chain = longest_chain(ordered, {(rank, key): processes[rank].demands[key].seconds[0] for rank, key in needs})
    parts = [processes[rank].demands[key].alone for rank, key in chain]
    parts += [{ON_LINKS: needs[task][before]} for before, task in pairwise(chain)]
    found = {kind: seconds / processes[0].steps for kind, seconds in added(parts).items() if seconds}
    return dict(sorted(found.items(), key=lambda own: -own[1]))


@dataclass(frozen=True)
class Forecast:
    """The predicted time of a step.

    seconds     of a step
    one_thread  seconds of a step on one thread; 0 for that thread itself
    threads     of all processes together
    busy        seconds of kernels in a step, all threads together, by layer and phase; `work` on one thread
    path        seconds of the longest chain of kernels and messages that wait for each other, by layer and phase
    locked      seconds for which the busiest process held its interpreter's lock
    sent        bytes that the busiest process sent
    gains       what would be twice as fast -> share of the time of a step that this would save
    notes       what was assumed
    """

    seconds: float
    one_thread: float
    threads: int
    busy: Seconds
    work: float
    path: Seconds
    locked: float
    sent: int
    gains: Mapping[str, float]
    notes: Sequence[str]

    @property
    def speedup(self) -> float:
        """Return how many times as fast as on one thread."""
        return self.one_thread / self.seconds if self.one_thread else 1.0

    def rows(self) -> dict[str, str]:
        """Return lines for people, by name."""
        ms, threads = 1e3, self.threads * self.seconds
        beside = f", {self.speedup:.2f} times as fast as one thread ({ms * self.one_thread:,.1f} ms): efficiency "
        beside = f"{beside}{self.speedup / self.threads:.0%}" if self.one_thread else ""
        phases = {name: sum(own for (_, phase), own in self.busy.items() if phase == name) for name in PHASES}
        shares = [f"{name} {own / threads:.0%}" for name, own in phases.items()]
        idle = 1 - sum(phases.values()) / threads
        length = sum(self.path.values())
        on_path = [f"{_name(kind)} {seconds / length:.0%}" for kind, seconds in [*self.path.items()][:4]]
        limits = {"kernels, on each thread": sum(self.busy.values()) / self.threads, "critical path": length}
        limits["the interpreter's lock"] = self.locked
        most, *others = sorted(limits.items(), key=lambda own: -own[1])
        found = {
            "time": f"{ms * self.seconds:,.1f} ms a step predicted{beside}",
            "threads' time": f"{', '.join(shares)}, idle {idle:.0%}",
            "critical path": f"{ms * length:,.1f} of {ms * self.work:,.1f} ms of work: {', '.join(on_path)}",
            "limit": f"{most[0]}: {ms * most[1]:,.1f} ms ({', '.join(f'{a} {ms * b:,.1f}' for a, b in others)})",
            "if twice": ", ".join(f"{name} {-gain:+.1%}" for name, gain in self.gains.items() if gain >= LEAST_GAIN),
            "from": "; ".join(self.notes),
        }
        return {name: text for name, text in found.items() if text}


def forecast(
    job: Job,
    workers: int = 0,
    bandwidth: float = 0.0,
    latency: float = 0.0,
    *,
    explain: bool = False,
    cores: int = 0,
    costs: Calibration | None = None,
) -> tuple[Forecast, CompiledStep]:
    """Return the predicted time of a job's steps, and the step that was recorded, of the first worker.

    Auto chunks and grain are settled by predicted times of kernels, as a run settles them by measured ones. Without a
    stored calibration, or one that lacks kernels of this job, a few steps of its model with few blocks are run.

    workers    that share the batch, each with the job's threads, or one
    bandwidth  bytes a second of the link of each worker's machine; 0 if they share this one
    latency    seconds of a message on a link
    explain    whether to predict what is gained where something is twice as fast
    cores      of a machine; 0 for those of this one, and as many as threads where those have a machine of their own
    costs      the calibration; None for the stored one

    Errors     MemoryError if kernels must be timed, and that might take more than half of the free memory
    """
    ranks, notes = max(1, min(workers, job.groups)), list[str]()
    pooled = job.scheduler == "threads" and not workers
    threads = (job.dataflow.threads or (usable_cores() if pooled else 1)) if pooled or workers else 1
    pooled = pooled or threads > 1
    scheduler = local_scheduler("threads" if pooled else "sync", threads)
    memory = math.inf if bandwidth or threads > usable_cores() else None  # of a machine that is not this one
    engines = [LocalEngine(job, scheduler, lambda line: None, rank, memory) for rank in _ranks(job, ranks, threads)]
    costs = costs or _calibration(job, engines[0].step, notes)
    for engine in engines:
        while engine.undecided:
            demands = call_demands(engine.step, costs)
            spans = [Span(key, 0, 0.0, demand.seconds[threads > 1]) for key, demand in demands.items()]
            engine.tune(spans, job.steps)
    processes = [
        Process.of_step(one.step, one.together(), call_demands(one.step, costs), threads, pooled) for one in engines
    ]
    apart = bool(bandwidth) or ranks == 1
    place = Platform(cores or (max(threads, usable_cores()) if apart else usable_cores()), bandwidth, latency)
    if place.cores > costs.cores:
        notes.append(f"more cores than the {costs.cores} that were measured, each with the memory rate of one of them")
    if ranks > 1 and not costs.measured:
        notes.append("messages were not measured here")
    runs = RUNS if ranks > 1 else 1
    found = Simulation(processes, costs, place, runs)
    count, alone = runs * processes[0].steps, 0.0
    if ranks * threads > 1:
        single = replace(job, dataflow=replace(job.dataflow, scheduler="sync", threads=1))
        alone = forecast(single, costs=costs)[0].seconds
    gains = dict[str, float]()
    for name, others in _what_ifs(processes, costs, place) if explain else ():
        gains[name] = 1 - Simulation(*others, runs).seconds / found.seconds
    told = Forecast(
        seconds=found.seconds,
        one_thread=alone,
        threads=ranks * threads,
        busy={kind: seconds / count for kind, seconds in found.busy.items()},
        work=sum(demand.seconds[0] for own in processes for demand in own.demands.values()) / processes[0].steps,
        path=critical_path(processes, costs, place),
        locked=max(found.locked) / count,
        sent=max(found.sent) // count,
        gains=dict(sorted(gains.items(), key=lambda gain: -gain[1])),
        notes=notes,
    )
    return told, engines[0].step


def _ranks(job: Job, count: int, threads: int) -> list[Rank | None]:
    """Return the ranks that share a job's batch, without links; None for a process that is alone."""
    nobody: Any = None
    given = count, nobody, job.groups, *job.batch_shape, threads
    return [Rank(own, *given) if count > 1 else None for own in range(count)]


def _calibration(job: Job, step: CompiledStep, notes: list[str]) -> Calibration:
    """Return the stored calibration, or one that is made now from steps like this one.

    Errors   MemoryError if those steps might not fit
    """
    graph, known, advice = step.kernels.graph, load(), f"better: {called('bench')} --calibrate"
    works = [work for key in graph if (work := work_of(graph, key))]
    if known and all(known.knows(f"{step.dials.precision.name} {kind}") for kind, _ in works):
        return known
    start = perf_counter()
    found = of_job(job, step.dials.chunk, known)
    seconds = perf_counter() - start
    notes.append(f"kernels timed for {seconds:.1f} s just now, in steps of this model with few blocks ({advice})")
    return found


def _what_ifs(
    processes: Sequence[Process], costs: Calibration, place: Platform
) -> Iterator[tuple[str, tuple[Sequence[Process], Calibration, Platform]]]:
    """Yield names of what could be twice as fast, and a simulation's arguments."""
    work = added(demand.alone for own in processes for demand in own.demands.values())
    for layer in dict.fromkeys(
        layer for layer, _ in sorted(work, key=work.__getitem__, reverse=True) if work[layer, _]
    ):
        faster = [
            replace(own, demands={key: demand.faster(layer) for key, demand in own.demands.items()})
            for own in processes
        ]
        yield layer, (faster, costs, place)
    begin, node = costs.graph
    tasks = [(kernels, sync / 2, threaded / 2) for kernels, sync, threaded in costs.tasks]
    light = replace(costs, graph=(begin / 2, node / 2), tasks=tasks, lock=costs.lock / 2, call=costs.call / 2)
    yield "Dask and Python", (processes, light, place)
    if processes[0].threads > 1 or len(processes) > 1:
        roomy = [replace(own, demands={key: d.with_memory() for key, d in own.demands.items()}) for own in processes]
        yield "shared memory", (roomy, costs, place)
    yield (
        "twice the threads",
        (
            [replace(own, threads=2 * own.threads, pooled=True) for own in processes],
            costs,
            replace(place, cores=max(place.cores, 2 * processes[0].threads)),
        ),
    )
    if len(processes) > 1:
        quick = replace(costs, message=costs.message / 2, rate=2 * costs.rate)
        yield "messages", (processes, quick, replace(place, bandwidth=2 * place.bandwidth, latency=place.latency / 2))


def _name(kind: Kind) -> str:
    layer, phase = kind
    return layer if phase == "update" else f"{layer}.{phase}"
