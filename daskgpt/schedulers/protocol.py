"""What every scheduler offers: all that the rest of the package knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, Protocol

from daskgpt.graph.program import Span
from daskgpt.graph.recording import GraphRun


@dataclass(frozen=True)
class ProcessSpans:
    """The kernel calls that one process recorded.

    name      "" for this process
    threads   in which it runs tasks
    offset    seconds that its perf_counter lacks to the time of day, which all processes share
    """

    name: str
    threads: int
    offset: float
    spans: list[Span]


class Scheduler(Protocol):
    """Runs submissions of recorded graphs.

    description  for people
    in_place     whether no task is ever run twice, so that tasks may write over arrays
    runs         how many runs it has been given: the number of the next one, by which spans are told apart
    """

    description: str
    in_place: bool
    runs: int

    @property
    def threads(self) -> int:
        """How many tasks can run at once."""
        ...

    def run(self, submission: GraphRun) -> list[Any]:
        """Handles of the results of its keys, which are left where they were made."""
        ...

    def fetch(self, handles: list[Any]) -> list[Any]:
        """The results here, waited for.

        Errors   schedulers.losses.LostResults where one is gone with the process that held it
        """
        ...

    def settle(self, handles: list[Any]) -> None:
        """Wait until these are made, and leave them where they are."""
        ...

    def settled(self, handles: list[Any]) -> bool:
        """Whether these are made, without waiting. Errors as of `fetch`."""
        ...

    def present(self, handles: list[Any]) -> list[bool]:
        """Whether each of these is still somewhere."""
        ...

    def copies(self, handles: list[Any]) -> list[list[Any]]:
        """Begin to copy results that are made: some copies of each, of which one outlives the loss of any process.
        Empty where there is one process only.
        """
        ...

    def addresses(self) -> set[str]:
        """Of the processes that take tasks now; "" is this one."""
        ...

    def admit(self, packed: bool) -> None:
        """From here on only processes that are equal to this one in versions and arithmetic run tasks.

        packed   whether products run in bfloat16

        Errors   RuntimeError naming one that is there and what of it differs
        """
        ...

    def leave_silent(self, seconds: float) -> None:
        """From here on a process that says nothing for so long counts as gone; 0 = as long as Dask itself waits."""
        ...

    def silent(self) -> set[str]:
        """Addresses of the processes that were left because they said nothing."""
        ...

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        """What a function returns in each process that runs tasks; with `here`, in this one anyhow."""
        ...

    def told(self, name: str) -> dict[str, Any]:
        """What processes that run tasks have said of themselves under a name with their last heartbeats, by their own
        names: nobody is asked, so that nobody is waited for. Empty where there is this process only.

        Errors   LostResults where the scheduler is gone
        """
        ...

    def tell(self, topic: str, message: Any) -> None:
        """Tell who coordinates the processes something, for whoever looks on there; nobody waits for it here."""
        ...

    def each(
        self, name: str, function: Callable[[Any], Any], items: Iterator[Any], take: Callable[[Any], None]
    ) -> None:
        """Call a function on each item in tasks, as they come, and give each result to `take` in this process, in the
        order of the items. No more of them are held than keep the threads busy.

        name     of the tasks, for the dashboard

        Errors   those of items, function and take; as of `fetch`
        """
        ...

    def record(self) -> AbstractContextManager[list[ProcessSpans]]:
        """Record every kernel call inside the `with` statement; the list is filled when it ends."""
        ...


def clock_offset() -> float:
    """What must be added to this process's perf_counter to get the time of day, in seconds."""
    return time() - perf_counter()
