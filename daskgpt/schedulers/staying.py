"""Tasks and data that stay where a run has put them: what Dask would move or drop without knowing the next step."""

from __future__ import annotations

from typing import Any

from distributed import SchedulerPlugin

from daskgpt.graph.recording import AHEAD
from daskgpt.schedulers.forgetting import TAG
from daskgpt.schedulers.leaving import named


class StayAtHome(SchedulerPlugin):
    """Keeps tasks of ours that have a home from being stolen while a worker that they may run on is there, and weights
    on the worker that has updated them.

    Stealing weighs one task against its inputs. It does not see that the next step wants them where they were: a
    sum or an update of gpt2 that is moved brings a hundred megabytes with it, and its results go back the same way.
    Dask's memory manager leaves one of several replicas, whichever it likes. Where a worker has fetched weights it
    would take them from their owner, whose next step fetches them back. So the fetched replica goes at once: the task
    that fetched it has the same array for its result.
    """

    def __init__(self, client: Any) -> None:
        self.name = named(client, "stay-at-home")

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *_: Any, stimulus_id: str, **__: Any) -> None:
        """Called after those of Dask's own plugins: a task that a worker has been given can be stolen by now."""
        task = self.scheduler.tasks.get(key)
        if finish not in ("processing", "memory") or task is None or not _is_ours(task):
            return
        if finish == "processing":
            stealing = self.scheduler.extensions.get("stealing")
            if stealing and (task.worker_restrictions or set()) & self.scheduler.workers.keys():
                stealing.remove_key_from_stealable(task)
        elif task.prefix.name == AHEAD:
            for fetched in task.dependencies:
                self._drop(fetched, task.who_has, stimulus_id)

    def _drop(self, fetched: Any, holders: Any, stimulus_id: str) -> None:
        """Drop the replicas of what was fetched: not at its home (where two homes are one worker, nothing was fetched),
        nor where a task is about to read it, which would not find it (the worker does not look).
        """
        read_by = {reader.processing_on for reader in fetched.waiters or ()}
        for worker in (holders & fetched.who_has) - read_by:
            if len(fetched.who_has) > 1 and worker.address not in (fetched.worker_restrictions or ()):
                self.scheduler.request_remove_replicas(worker.address, [fetched.key], stimulus_id=stimulus_id)


def _is_ours(task: Any) -> bool:
    span: Any = (task.annotations or {}).get("span")
    return bool(span) and span["name"][-1] == TAG
