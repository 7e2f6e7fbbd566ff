"""How long a task of ours takes before the first one of its name has run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distributed import SchedulerPlugin

from daskgpt.schedulers.forgetting import TAG
from daskgpt.schedulers.leaving import named

TYPICAL = 0.025  # seconds: what grain auto makes of a task; small models' take 1 ms, gpt2's some 100


class TypicalDurations(SchedulerPlugin):
    """Tells the scheduler what tasks of a new name will take. Its own guess is half a second, by which it would weigh
    moving a task's work against moving what it needs, until one has run.

    Dask's setting default-task-durations would have to be made where the scheduler is started, for names known there.
    """

    def __init__(self, client: Any) -> None:
        self.name = named(client, "durations")

    def update_graph(self, scheduler: Any, *, tasks: Iterable[Any], **_: Any) -> None:
        """Called for each graph that a client hands in, before its tasks go anywhere."""
        for key in tasks:
            task = scheduler.tasks[key]
            prefix, span = task.prefix, (task.annotations or {}).get("span")
            if span and span["name"][-1] == TAG and prefix.duration_average < 0 and prefix.max_exec_time < 0:
                prefix.duration_average = TYPICAL
