"""What Dask keeps of tasks that are done, for as long as a cluster lives, and what of it is dropped here.

A training step needs the state that the step before left, that one the one before it, and so on: whatever keeps a
finished task because of its neighbours keeps all steps. The plugins only let go of what nobody can reach any more.
"""

from __future__ import annotations

from typing import Any

import dask
from distributed import SchedulerPlugin, WorkerPlugin, span

from daskgpt.graph.recording import FIRST
from daskgpt.schedulers.leaving import named

TAG = "daskgpt"


def span_annotation() -> dict[str, Any]:
    """The annotation of every task of one run: without it Dask opens a span of its own for each step, for ever."""
    with span(TAG):
        return {"span": dask.get_annotations()["span"]}


class ForgetGroups(SchedulerPlugin):
    """Drops the groups of forgotten tasks from our spans, from Dask's list of computations and from other groups.

    A group is the tasks of one name, in which a run has its number. Of those that are gone a span keeps the first and
    the last, which say from when to when it lasted.
    """

    def __init__(self, client: Any) -> None:
        self.name = named(client, "forget-groups")

    def update_graph(self, scheduler: Any, **_: Any) -> None:
        """Called for each graph that a client hands in."""
        known = scheduler.task_groups
        for own in scheduler.extensions["spans"].spans.values():
            if own.name[-1] != TAG:
                continue
            gone = {group for group in own.groups if known.get(group.name) is not group}
            ran = [group for group in gone if group.start]
            kept = {min(ran, key=lambda group: group.start), max(ran, key=lambda group: group.stop)} if ran else set()
            own.groups -= gone - kept
            if own.metadata:  # that each graph was one
                del own.metadata["collections"][1:]
            for computation in scheduler.computations:
                computation.groups -= gone
            for group in own.groups:
                group.dependencies -= gone


class ForgetOrigins(SchedulerPlugin):
    """Lets the scheduler forget how the state of a run was made.

    It keeps a released task that could be computed again as long as a result hangs on it: all steps from the first one
    on, which a lost worker would make it compute again. A run goes back to its recovery point instead. What has lost a
    dependency is forgotten with its release, and whatever was made of it has lost one then; so that is said of the
    first state's tasks.
    """

    def __init__(self, client: Any) -> None:
        self.name = named(client, "forget-origins")

    async def start(self, scheduler: Any) -> None:
        self.tasks = scheduler.tasks

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if finish == "memory" and str(key[0]).startswith(FIRST):
            self.tasks[key].has_lost_dependencies = True


class ForgetDependencies(WorkerPlugin):
    """Lets a worker forget what its results were made of.

    A worker keeps a released task while another depends on it, finished or not. The scheduler says again what a task
    needs whenever it has to be computed once more.
    """

    def __init__(self, client: Any) -> None:
        self.name = named(client, "forget-dependencies")

    def setup(self, worker: Any) -> None:
        self.tasks = worker.state.tasks

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if finish == "memory" and (task := self.tasks.get(key)):
            for dependency in task.dependencies:
                dependency.dependents.discard(task)
                dependency.waiters.discard(task)
            task.dependencies.clear()
