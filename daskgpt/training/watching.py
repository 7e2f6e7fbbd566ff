"""Who looks on while steps run: what the loop offers to instruments, which it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job


class Watcher(Protocol):
    """Looks on at some steps of one run."""

    def begin(self, job: Job, steps: Any, scheduler: Scheduler) -> int:
        """Called before the first step, with what runs them; the number of the first step that it wants to see."""
        ...

    def watch(self, steps: Sequence[int]) -> AbstractContextManager[None]:
        """Entered around steps that are handed to the scheduler together."""
        ...

    def end(self) -> None:
        """Called once the last step is done, before the run is written."""
        ...
