"""Recording: kernel calls of chosen steps, in this process or in the workers of a cluster, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import time

from daskgpt.instruments.timeline.events import Event, TaskGraph, Timeline, Window, Words
from daskgpt.schedulers.protocol import ProcessSpans, Scheduler
from daskgpt.training.step import TrainingStep


class StepRecorder:
    """Records the kernel calls of the steps that run inside `window`, and makes a timeline of them.

    Use one recorder at a time, for steps of one grain. It records from the first window on until `finish`; what ran
    between windows is left out then.
    """

    def __init__(self, step: TrainingStep, scheduler: Scheduler) -> None:
        self.step, self.scheduler = step, scheduler
        self.windows: list[Window] = []
        self.steps: dict[int, int] = {}  # number of a run -> step
        self._recording = ExitStack()
        self._processes: list[ProcessSpans] = []

    @contextmanager
    def window(self, steps: Sequence[int]) -> Iterator[None]:
        """Record these steps, which the scheduler gets together."""
        if not self.windows:
            self._processes = self._recording.enter_context(self.scheduler.record())
        first, start = self.scheduler.runs, time()
        yield
        self.steps |= {first + number: step for number, step in enumerate(steps)}
        self.windows.append(Window(tuple(steps), start, time()))

    def finish(self) -> Timeline:
        """The timeline of what was recorded. On a cluster, call it when the last step's updates are done."""
        self._recording.close()
        return timeline_of(self.step, self._processes, self.steps, self.windows, self._title())

    def _title(self) -> str:
        steps = [step for window in self.windows for step in window.steps]
        tokens = self.step.recorded.inputs["tokens"]
        size, chunk = (" x ".join(map(str, shape)) for shape in (tokens.shape, tokens.chunksize))
        return (
            f"Steps {steps[0]} to {steps[-1]}: barrier {self.step.barrier}, grain {self.step.grain}, "
            f"{size} tokens in chunks of {chunk}, {self.scheduler.description}"
        )


def timeline_of(
    step: TrainingStep,
    processes: Sequence[ProcessSpans],
    steps: Mapping[int, int],
    windows: Sequence[Window],
    title: str,
) -> Timeline:
    """Spans of all processes as events on one clock, which begins with the first window.

    steps   number of a run -> step, of the runs that are shown
    """
    words, start = Words(step.runnable), windows[0].start
    lanes: list[str] = []
    events: list[Event] = []
    for process in processes:
        threads = list(dict.fromkeys(span.thread for span in sorted(process.spans, key=lambda span: span.start)))
        numbers = {thread: len(lanes) + number for number, thread in enumerate(threads)}
        count = max(process.threads, len(threads))
        lanes += [lane_name(process.name, number, count) for number in range(count)]
        for span in process.spans:
            if span.run in steps:
                event = words.event(span, steps[span.run], numbers[span.thread], start - process.offset)
                events += [event] if event else []
    own = until_done(windows, events, start)
    return Timeline(
        title=title,
        lanes=tuple(lanes),
        events=tuple(sorted(events, key=lambda event: event.start)),
        windows=own,
        tasks=TaskGraph.of(step.runnable),
        readers=words.readers,
    )


def until_done(windows: Sequence[Window], events: Sequence[Event], start: float) -> tuple[Window, ...]:
    """The windows by the timeline's clock; the last one until its last event, which on a cluster comes after it."""
    own = [Window(window.steps, window.start - start, window.end - start) for window in windows]
    end = max((event.end for event in events), default=0.0)
    return (*own[:-1], Window(own[-1].steps, own[-1].start, max(own[-1].end, end)))


def lane_name(process: str, number: int, count: int) -> str:
    thread = f"thread {number + 1}"
    return ", ".join(filter(None, (process, thread if count > 1 or not process else "")))
