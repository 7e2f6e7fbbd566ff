"""When each kernel call ran, and in which thread: recorded by the programs of this process while somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from daskgpt.graph.nodes import Key


class Span(NamedTuple):
    """One call: the key of its (unmerged) task, its thread, seconds of time.perf_counter, bytes that it returned.

    run   the run of the graph that it belongs to
    """

    key: Key
    thread: int
    start: float
    end: float
    bytes: int = 0
    run: int = 0


class Recorder:
    """Holds the spans while recording; `spans` is None when nobody asks.

    meter       is told seconds of the kernels that a merged task has run, by layer and pass; None when nobody asks
    first_run   number of the run that a graph begins with, where the scheduler of this process runs it; programs that
                a cluster sends know their own
    """

    def __init__(self) -> None:
        self.spans: list[Span] | None = None
        self.meter: Callable[[Mapping[str, float]], None] | None = None
        self.first_run = 0


RECORDER = Recorder()


@contextmanager
def recorded_spans() -> Iterator[list[Span]]:
    """The spans of every call that programs of this process make inside the `with` statement."""
    before, RECORDER.spans = RECORDER.spans, []
    try:
        yield RECORDER.spans
    finally:
        RECORDER.spans = before


@contextmanager
def counting_from(first_run: int) -> Iterator[None]:
    """The number of the run that the programs of this process begin with, inside the `with` statement."""
    before, RECORDER.first_run = RECORDER.first_run, first_run
    try:
        yield
    finally:
        RECORDER.first_run = before


def bytes_of(result: Any) -> int:
    """Bytes of the arrays that a call returned; what is updated in place is not returned."""
    if isinstance(result, tuple):
        return sum(map(bytes_of, result))
    return getattr(result, "nbytes", 0)
