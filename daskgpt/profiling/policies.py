"""Scheduling policies: which ready task a thread takes next, for the simulation and for Dask's schedulers of this
process. No policy changes a bit of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import fmean
from time import perf_counter
from typing import Any, cast

from dask.callbacks import Callback

from daskgpt.config.errors import require
from daskgpt.graph.nodes import Graph, Key
from daskgpt.graph.program import calls_of


@dataclass(frozen=True)
class ReadyTask:
    """A task that could run now.

    kind     layer and pass of its first kernel call: `linear.forward`; empty for a barrier
    number   number of tasks that became ready before it
    seconds  its duration, as it was measured before or is predicted; the mean of the others where it is unknown
    path     seconds of the longest chain of tasks that begins with it and ends with the graph
    """

    key: Key
    kind: str
    number: int
    seconds: float
    path: float


Policy = Callable[[Sequence[ReadyTask]], Sequence[ReadyTask]]  # ready tasks -> the same in the order to run them
POLICY: ContextVar[Policy | None] = ContextVar("policy", default=None)


def first_in_first_out(ready: Sequence[ReadyTask]) -> Sequence[ReadyTask]:
    """Return ready tasks, those that have waited longest first: breadth first through the graph."""
    return sorted(ready, key=lambda task: task.number)


def depth_first(ready: Sequence[ReadyTask]) -> Sequence[ReadyTask]:
    """Return ready tasks, those that became ready last first, as Dask itself does: results are used soon."""
    return sorted(ready, key=lambda task: -task.number)


def critical_path_first(ready: Sequence[ReadyTask]) -> Sequence[ReadyTask]:
    """Return ready tasks, those with the longest chain of tasks behind them first (HLF, or upward rank in HEFT)."""
    return sorted(ready, key=lambda task: (-task.path, task.number))


@contextmanager
def scheduling(policy: Policy) -> Iterator[None]:
    """Let Dask's schedulers of this process, and predictions of them, take ready tasks by a policy.

    Durations of tasks are measured, so that a policy knows them from the second run of a graph on. Ranks of a cluster
    are other processes, which keep Dask's own order.

    policy   function that returns ready tasks in the order in which they are to run; see `ReadyTask`

    >>> import daskgpt
    >>> config, batch = daskgpt.preset("tiny", blocks=1), {"batch_size": 4, "sequence_length": 32}
    >>> with daskgpt.scheduling(lambda ready: sorted(ready, key=lambda task: -task.path)):
    ...     found = daskgpt.plan(config, batch, threads=2)
    """
    seconds, starts = dict[Key, float](), dict[Key, float]()

    def begin(graph: Graph, state: dict[str, Any]) -> None:
        state["ready"] = ready_list(state["ready"], graph, seconds)

    def started(key: Key, *_: Any) -> None:
        starts[key] = perf_counter()

    def ended(key: Key, *_: Any) -> None:
        seconds[key] = perf_counter() - starts[key]

    token = POLICY.set(policy)
    try:
        with Callback(start_state=begin, pretask=started, posttask=ended):
            yield
    finally:
        POLICY.reset(token)


def ready_list(keys: list[Key], graph: Graph, seconds: Mapping[Key, float]) -> list[Key]:
    """Return Dask's list of ready tasks in a form from which the policy decides what is taken; the list itself without
    a policy.

    seconds   of tasks, where they are known
    """
    policy = POLICY.get()
    return keys if policy is None else ReadyList(keys, policy, graph, seconds)


class ReadyList(list[Key]):
    """A list of ready tasks whose `pop` returns the first one in a policy's order."""

    def __init__(self, keys: Iterable[Key], policy: Policy, graph: Graph, seconds: Mapping[Key, float]) -> None:
        super().__init__()
        self.policy, self.tasks, self.described = policy, graph, dict[Key, ReadyTask]()
        self.seconds, self.mean = seconds, fmean(seconds.values()) if seconds else 1.0
        self.paths = self._paths()
        for key in keys:
            self.append(key)

    def _paths(self) -> dict[Key, float]:
        needs = {key: node.dependencies & self.tasks.keys() for key, node in self.tasks.items()}
        order = list(TopologicalSorter(needs).static_order())
        paths = dict.fromkeys(order, 0.0)  # of what comes after a task, until its own seconds are added
        for key in reversed(order):
            paths[key] += self.seconds.get(key, self.mean)
            for need in needs[key]:
                paths[need] = max(paths[need], paths[key])
        return paths

    def append(self, key: Key) -> None:
        super().append(key)
        calls = calls_of(self.tasks[key])
        seconds, path = self.seconds.get(key, self.mean), self.paths[key]
        self.described[key] = ReadyTask(key, calls[0].kind if calls else "", len(self.described), seconds, path)

    def pop(self, *_: Any) -> Key:
        ready = [self.described[key] for key in self]
        chosen: Any = next(iter(self.policy(ready.copy()) or ()), None)
        rule, advice = "a policy must return the ready tasks in an order", "Return a sorted list, say."
        require(chosen in ready, "scheduling", rule, {"first": chosen}, advice, TypeError)
        self.remove(chosen.key)
        return cast(Key, chosen.key)
