"""What a run tells its cluster's scheduler of its steps, for whoever looks on there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from daskgpt.schedulers.protocol import Scheduler

TOPIC = "daskgpt"  # of the events
EVERY = 0.25  # seconds: a step may be shorter than what telling takes
FIELDS = ("step", "loss", "validation_loss", "tokens_per_s", "lost_steps")  # that somebody looks at


class Telling:
    """Gathers records of steps and tells them together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.records, self.at = scheduler, list[dict[str, Any]](), 0.0

    def note(self, record: Mapping[str, Any]) -> None:
        """A step's metrics."""
        if self.scheduler.in_place:
            return
        self.records.append({name: record[name] for name in FIELDS if name in record})
        if time.monotonic() - self.at > EVERY:
            self.flush()

    def flush(self) -> None:
        """What has not been told yet."""
        if self.records:
            self.scheduler.tell(TOPIC, self.records)
            self.records, self.at = [], time.monotonic()
