"""Recordings of the kernel calls of some steps, in this process or on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from daskgpt.config.errors import number_of, require
from daskgpt.config.settings import Checked, setting
from daskgpt.profiling.timeline import Event, Lane, TaskGraph, Timeline, Window, events_of
from daskgpt.schedulers.protocol import ProcessSpans, clock_offset
from daskgpt.training.checkpoint import STATE
from daskgpt.training.engine import Engine
from daskgpt.training.job import Job


class ProcessEvents(NamedTuple):
    """The recording of one process: its events, whose lanes are numbers of its threads."""

    name: str
    threads: int
    events: list[Event]


class Recorder:
    """Records the kernel calls of the steps of an engine that run inside `window`, and makes a timeline of them.

    Use one recorder at a time, for steps of one grain. It records from the first window on; `finish` leaves
    out steps between windows.
    """

    def __init__(self, engine: Any) -> None:
        """engine   any `Engine`, whose first steps may still choose chunks and grain"""
        self.engine, self.scheduler, self.windows = engine, engine.scheduler, list[Window]()
        self._steps: dict[int, int] = {}  # number of a run -> step
        self._recording = ExitStack()
        self._processes: list[ProcessSpans] = []

    @contextmanager
    def window(self, steps: Sequence[int]) -> Iterator[None]:
        """Record steps that the scheduler gets together."""
        if not self.windows and not self.engine.ranks:
            self._processes = self._recording.enter_context(self.scheduler.record())
        first, start = self.scheduler.runs, time()
        self.engine.kept = True  # by ranks, which record their own calls
        try:
            yield
        finally:
            self.engine.kept = False
        self._steps |= {first + number: step for number, step in enumerate(steps)}
        self.windows.append(Window(tuple(steps), start, time()))

    def finish(self) -> Timeline:
        """Return the timeline; with ranks, without dependencies between tasks of different ones.

        On a cluster, call this once the updates of the last step are done.
        """
        self._recording.close()
        engine, start = self.engine, self.windows[0].start
        if engine.ranks:
            by_worker = self.scheduler.call_on(rank_events, engine.run_name, start)
            answers = sorted(by_worker.values(), key=lambda answer: answer[0].name)
            parts, tasks = [part for part, _ in answers], TaskGraph.of_ranks([graph for _, graph in answers])
        else:
            parts, tasks = [self._events_of(process) for process in self._processes], TaskGraph.of(engine.step)
        size, chunk = (" x ".join(map(str, shape)) for shape in (engine.job.batch_shape, engine.chunk))
        cut = f"shared by {number_of(len(engine.addresses), 'worker')}" if engine.ranks else f"in chunks of {chunk}"
        dials = f"barrier {engine.job.dataflow.barrier}, grain {engine.grain}"
        title = f"{dials}, {size} tokens {cut}, {self.scheduler.description}"
        return joined(title, self.windows, parts, tasks)

    def _events_of(self, process: ProcessSpans) -> ProcessEvents:
        spans = [(self._steps[span.run], span) for span in process.spans if span.run in self._steps]
        events = events_of(self.engine.step, spans, self.windows[0].start - process.offset)
        return ProcessEvents(process.name, process.threads, events)


def rank_events(run: str, start: float, dask_worker: Any) -> tuple[ProcessEvents, TaskGraph]:
    """Return the recording of a run on a worker, without events where it is idle for lack of a group of sequences;
    `start` of the timeline is a time of day.
    """
    from daskgpt.schedulers.dask_internals import thread_count
    from daskgpt.schedulers.links import ranks_of

    name, threads = f"worker {dask_worker.name}", thread_count(dask_worker)
    program = ranks_of(dask_worker).programs.get(run)
    if program is None:
        return ProcessEvents(name, threads, []), TaskGraph({}, {}, frozenset())
    step, spans, program.kept = program.engine.step, program.kept, []
    events = events_of(step, [(program.first + span.run, span) for span in spans], start - clock_offset())
    return ProcessEvents(name, threads, events), TaskGraph.of(step)


def joined(title: str, windows: Sequence[Window], parts: Sequence[ProcessEvents], tasks: TaskGraph) -> Timeline:
    """Return one timeline of all processes, whose clock begins with the first window.

    The last window ends with the last event, which on a cluster may come after the results of the window.
    """
    shown = [step for window in windows for step in window.steps]
    lanes: list[Lane] = []
    events: list[Event] = []
    for part in parts:
        events += [replace(event, lane=event.lane + len(lanes)) for event in part.events if event.step in shown]
        count = max([part.threads, *(event.lane + 1 for event in part.events)])
        lanes += [Lane(part.name, number + 1) for number in range(count)]
    start = windows[0].start
    *before, last = (Window(window.steps, window.start - start, window.end - start) for window in windows)
    last = replace(last, end=max([last.end, *(event.end for event in events)]))
    ordered = tuple(sorted(events, key=lambda event: event.start))
    return Timeline(
        f"Steps {shown[0] + 1:,} to {shown[-1] + 1:,}: {title}", tuple(lanes), ordered, (*before, last), tasks
    )


class TimelineConfig(Checked):
    """A timeline of the last steps."""

    timeline: str = setting(
        "",
        "write a timeline of the last steps to NAME.json and NAME.html in the run's folder",
        unit="name",
    )
    timeline_steps: int = setting(4, "how many steps a timeline shows", unit="steps", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, got = "a timeline must have a name without a folder", {"timeline": self.timeline}
        fine = self.timeline in ("", Path(self.timeline).name) and self.timeline != ".."
        require(fine, "timeline", rule, got, "Its files are written into the run's folder.")
        rule = "a timeline must not have the name of a checkpoint's file"
        require(Path(self.timeline).stem != Path(STATE).stem, "timeline", rule, got, "Name another.")


class TimelineCallback:
    """A `training.trainer.Callback`: records a run's last steps as a `Timeline`, which notebooks show.

    If the configuration has a name, files are written at the end, and a summary is printed.

    timeline   the recording, once the run has ended; None if no step was recorded
    """

    def __init__(self, config: TimelineConfig | None = None) -> None:
        self.config = config or TimelineConfig()
        self.timeline: Timeline | None = None

    def begin(self, job: Job, engine: Engine) -> int:
        self.recorder = Recorder(engine)
        rule, advice = "a run must have one timeline at most", "Take one with as many steps as the longest."
        require(engine.recorder is None, "timeline", rule, "a second one", advice)
        engine.recorder = self.recorder
        self.folder = Path(job.run.out)
        return max(job.steps - self.config.timeline_steps, 0)

    def watch(self, steps: Sequence[int]) -> AbstractContextManager[None]:
        return self.recorder.window(steps)

    def end(self) -> None:
        if not self.recorder.windows:
            why = "the run ended before, or had none after the one that chose the grain"
            print(f"timeline   no step was recorded: {why}")
            return
        self.timeline = self.recorder.finish()
        if name := self.config.timeline:
            from daskgpt.profiling.pages import write_timeline  # loads Bokeh

            trace, page = write_timeline(self.timeline, self.folder / name)
            print(f"\n{self.timeline.summary}\n\ntimeline written to {page} and {trace}")
