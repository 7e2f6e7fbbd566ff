"""How long the passes of a step take: kernels of a step now and then are recorded, and summed up by pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from daskgpt.graph.recording import Recorded
from daskgpt.graph.spans import Span
from daskgpt.model.origins import PHASES
from daskgpt.schedulers.protocol import ProcessSpans, Scheduler

EVERY = 10.0  # seconds between two recorded steps: recording costs a small step about a hundredth


def busy_by_pass(recorded: Recorded, spans: Iterable[Span]) -> dict[str, float]:
    """Seconds in which kernels of each pass of a recorded step ran."""
    busy = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        origin = recorded.origin(span.key)
        if origin is not None:
            busy[origin.phase] += span.end - span.start
    return busy


class PhaseTimes:
    """Records a step now and then, where that asks nobody else: on a cluster it would wait for every worker."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.at = -float("inf")
        self.found: list[ProcessSpans] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around steps that are handed over together: kernel calls are recorded if it is time to."""
        self.found = []
        if not self.scheduler.in_place or time.perf_counter() - self.at < EVERY:
            yield
            return
        self.at = time.perf_counter()
        with self.scheduler.record() as self.found:
            yield

    def news(self, recorded: Recorded, steps: int, seconds: float) -> dict[str, float]:
        """Seconds a step in which kernels of each pass ran, divided by the threads, and the share of the threads' time
        in which none did; empty where nothing was recorded.

        recorded, steps, seconds   the step, how many of them were watched, and how long they took in all
        """
        if not self.found:
            return {}
        threads = self.scheduler.threads
        busy = busy_by_pass(recorded, (span for process in self.found for span in process.spans))
        shares = {f"{name}_s": round(total / threads / steps, 6) for name, total in busy.items()}
        return {**shares, "idle": round(max(0.0, 1 - sum(busy.values()) / (threads * seconds)), 4)}
