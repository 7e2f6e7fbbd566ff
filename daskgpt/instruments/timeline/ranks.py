"""Recording on a cluster whose workers share each batch: the kernel calls of every rank, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from time import time
from typing import Any

from daskgpt.graph.nodes import Key
from daskgpt.instruments.timeline.events import Event, TaskGraph, Timeline, Window, Words
from daskgpt.instruments.timeline.recorder import lane_name, until_done
from daskgpt.schedulers.links import ranks_of
from daskgpt.schedulers.membership import members
from daskgpt.schedulers.protocol import clock_offset
from daskgpt.training.rank_steps import RankSteps


@dataclass(frozen=True)
class RankEvents:
    """What one rank has recorded: its events, whose lanes are numbers of its threads, and the graph of its step."""

    threads: int
    events: list[Event]
    tasks: TaskGraph
    readers: dict[Key, list[Key]]


def events_on(run: str, start: float, dask_worker: Any) -> RankEvents | None:
    """What a worker has recorded of a run; start: of the timeline, as the time of day."""
    program = ranks_of(dask_worker).programs.get(run)
    if program is None:
        return None
    runnable = program.steps.step.runnable
    words, spans = Words(runnable), sorted(program.kept, key=lambda span: span.start)
    program.kept = []
    lanes = {thread: number for number, thread in enumerate(dict.fromkeys(span.thread for span in spans))}
    made = (words.event(s, program.first + s.run, lanes[s.thread], start - clock_offset()) for s in spans)
    threads = max(dask_worker.state.nthreads, len(lanes))
    return RankEvents(threads, [event for event in made if event], TaskGraph.of(runnable), words.readers)


class RankRecorder:
    """Records the kernel calls of the steps that run inside `window`, as `StepRecorder` does."""

    def __init__(self, steps: RankSteps) -> None:
        self.steps, self.windows = steps, list[Window]()

    @contextmanager
    def window(self, steps: Sequence[int]) -> Iterator[None]:
        """Record these steps, which are one window of the ranks."""
        start, self.steps.kept = time(), True
        try:
            yield
        finally:
            self.steps.kept = False
        self.windows.append(Window(tuple(steps), start, time()))

    def finish(self) -> Timeline:
        """The timeline of what was recorded."""
        steps, start = self.steps, self.windows[0].start
        client = steps.scheduler.client
        found = client.run(events_on, steps.run_name, start, workers=steps.addresses)
        names = {address: f"worker {worker['name']}" for address, worker in members(client).items()}
        lanes: list[str] = []
        events: list[Event] = []
        parts = [(address, part) for address, part in found.items() if part is not None]
        for address, part in parts:
            events += [replace(event, lane=event.lane + len(lanes)) for event in part.events]
            lanes += [lane_name(names.get(address, address), number, part.threads) for number in range(part.threads)]
        shown = {step for window in self.windows for step in window.steps}
        events = sorted((event for event in events if event.step in shown), key=lambda event: event.start)
        return Timeline(
            title=self._title(),
            lanes=tuple(lanes),
            events=tuple(events),
            windows=until_done(self.windows, events, start),
            tasks=_together([part.tasks for _, part in parts]),
            readers={key: readers for _, part in parts for key, readers in part.readers.items()},
        )

    def _title(self) -> str:
        job, shown = self.steps.job, [step for window in self.windows for step in window.steps]
        size = " x ".join(map(str, job.batch_shape))
        return (
            f"Steps {shown[0]} to {shown[-1]}: barrier {job.dataflow.barrier}, {size} tokens shared by "
            f"{len(self.steps.addresses)} workers, {self.steps.scheduler.description}"
        )


def _together(graphs: Sequence[TaskGraph]) -> TaskGraph:
    """The tasks of all ranks; what they wait for of each other is not in it."""
    return TaskGraph(
        order=tuple(chain.from_iterable(graph.order for graph in graphs)),
        needs={key: needs for graph in graphs for key, needs in graph.needs.items()},
        earlier={key: tasks for graph in graphs for key, tasks in graph.earlier.items()},
        awaited=frozenset(chain.from_iterable(graph.awaited for graph in graphs)),
    )
