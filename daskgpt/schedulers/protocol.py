"""The interface of schedulers, which is all that the rest of the package uses of them, and the errors of clusters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.graph.compiled import CompiledGraph, Submission
from daskgpt.graph.program import Span

METRIC = "daskgpt"  # in the heartbeats of workers that are ready for tasks
TOPIC = "daskgpt"  # of the events of a run, on the scheduler


@dataclass(frozen=True)
class ProcessSpans:
    """The kernel calls that one process recorded.

    name      "" for this process
    threads   in which it runs tasks
    offset    from its perf_counter to the time of day, which all processes share [s]
    """

    name: str
    threads: int
    offset: float
    spans: list[Span]


class WorkerLost(RuntimeError):
    """Results of a run were lost with the worker that held them. A run continues from its copies of them.

    where, rule, got   as of `config.errors.refusal`
    """

    def __init__(self, where: str, rule: str, got: str) -> None:
        super().__init__(str(refusal(RuntimeError, where, rule, got, "Start again.")))  # a run gives its own advice
        self.where, self.rule, self.got = where, rule, got


class ClusterLost(WorkerLost):
    """The cluster is lost: the scheduler is gone, or no worker came in time."""


class Scheduler(ABC):
    """Runs submissions of recorded graphs. Methods that are not abstract fit a scheduler of this process.

    description  for the header of a run
    in_place     whether no task is ever run twice, so that tasks may update arrays in place
    threads      number of tasks that can run at once
    runs         number of the next run, which distinguishes spans
    """

    description: str
    in_place: bool
    threads: int
    runs = 0

    @abstractmethod
    def run(self, submission: Submission) -> list[Any]:
        """Submit a graph; return handles of its results, which stay where they are made."""

    @abstractmethod
    def fetch(self, handles: list[Any]) -> list[Any]:
        """Wait for results and return them.

        Errors   WorkerLost if one was lost with the process that held it
        """

    def outputs(
        self, compiled: CompiledGraph, values: Sequence[Mapping[str, np.ndarray]], packs: Sequence[Any]
    ) -> tuple[list[dict[str, np.ndarray]], list[Any]]:
        """Run a compiled graph on a state, once for each of some inputs, as one graph.

        Return the outputs of each run, and the packs of the new state.

        Errors   as of `fetch`
        """
        results = self.run(compiled.submission(values, packs))
        count = len(compiled.output_keys)
        fetched = self.fetch(results[: len(values) * count])
        new = results[len(fetched) :] if compiled.kernels.results else []
        outputs = [compiled.output(fetched[run * count : (run + 1) * count]) for run in range(len(values))]
        return outputs, [*new, *packs[len(new) :]]

    def submit(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of values or handles where tasks run; return a handle of the result.

        name   begins the key of the task
        """
        return function(*arguments)

    def held(self, value: Any) -> Any:
        """Return a handle of a value that stays where tasks run."""
        return value

    def wait_for(self, handles: list[Any]) -> None:  # noqa: B027
        """Wait until results are made, and leave them where they are."""

    def admit(self, packed: bool) -> None:  # noqa: B027
        """Let only processes run tasks that are equal to this one in versions and arithmetic, from here on.

        packed    whether products run in bfloat16

        Errors   RuntimeError naming a process and what differs
        """

    def memory_limits(self) -> list[int]:
        """Return the bytes that each process of a cluster may use, 0 for no limit; empty if there is only this one."""
        return []

    def attend(  # noqa: B027
        self, say: Callable[[str], None], stop_requested: Callable[[], bool], seconds: float, minutes: float
    ) -> None:
        """Watch the processes of a run from here on: name those that take no tasks, and do not wait for them.

        say              prints a line
        stop_requested   returns whether the run shall end; no wait continues then
        seconds          without a heartbeat after which a process counts as lost; 0 = Dask's own limit
        minutes          to wait for a process that takes tasks

        Errors   ClusterLost if there is none
        """

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        """Call a function in each process that runs tasks, with `here` also in this one; return the results."""
        return [function(*arguments)]

    def publish(self, topic: str, message: Any) -> None:  # noqa: B027
        """Publish an event on the scheduler, without waiting."""

    @abstractmethod
    def compute(self, bag: Any, take: Callable[[Any], object]) -> None:
        """Compute a Dask bag; call `take` in this process with the results of each partition.

        Errors   those of the tasks and of `take`; as of `fetch`
        """

    @abstractmethod
    def record(self) -> AbstractContextManager[list[ProcessSpans]]:
        """Record every kernel call inside the `with` statement; the list is filled when it ends."""


def clock_offset() -> float:
    """Return the offset from this process's perf_counter to the time of day, in seconds."""
    return max(time() - perf_counter() for _ in range(5))  # less where a reading was interrupted
