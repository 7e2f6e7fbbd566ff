"""What a run takes besides its steps: validations, logs, samples, checkpoints, recovery points, each in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("validation", "logs", "samples", "checkpoints", "recovery points")


class Besides:
    """Adds up for how long a run's steps have waited for something else, part by part.

    seconds   by the names of `PARTS`; what goes on beside steps, such as writing a checkpoint, is not among them
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Around what a part consists of."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start
