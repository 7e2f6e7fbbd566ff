"""When each kernel call ran, and in which thread: recorded by the programs of this process while somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from daskgpt.graph.nodes import Key


class Span(NamedTuple):
    """One call: the key of its (unmerged) task, its thread, and seconds of time.perf_counter."""

    key: Key
    thread: int
    start: float
    end: float


class Recorder:
    """Holds the spans while recording; `spans` is None when nobody asks."""

    def __init__(self) -> None:
        self.spans: list[Span] | None = None


RECORDER = Recorder()


@contextmanager
def recorded_spans() -> Iterator[list[Span]]:
    """The spans of every call that programs of this process make inside the `with` block."""
    before, RECORDER.spans = RECORDER.spans, []
    try:
        yield RECORDER.spans
    finally:
        RECORDER.spans = before
