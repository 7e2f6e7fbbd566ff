"""When each kernel call ran, and in which thread: recorded by the programs of this process while somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from daskgpt.graph.nodes import Key

RunOf = Callable[[int], int]


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

    run_of   a program's place among the runs of one graph -> the number of its run
    """

    def __init__(self) -> None:
        self.spans: list[Span] | None = None
        self.run_of: RunOf = _same


def _same(number: int) -> int:
    return number


RECORDER = Recorder()


@contextmanager
def recorded_spans(run_of: RunOf = _same) -> Iterator[list[Span]]:
    """The spans of every call that programs of this process make inside the `with` block."""
    before = RECORDER.spans, RECORDER.run_of
    spans: list[Span] = []
    RECORDER.spans, RECORDER.run_of = spans, run_of
    try:
        yield spans
    finally:
        RECORDER.spans, RECORDER.run_of = before


def bytes_of(result: Any) -> int:
    """Bytes of the arrays that a call returned; what is updated in place is not returned."""
    if isinstance(result, tuple):
        return sum(map(bytes_of, result))
    return getattr(result, "nbytes", 0)
