"""Recording: kernel calls of chosen steps, in this process or in the workers of a cluster, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import time

from daskgpt.graph.recording import Runs
from daskgpt.graph.spans import Span, recorded_spans
from daskgpt.instruments.timeline.events import Event, TaskGraph, Timeline, Window, Words
from daskgpt.schedulers.workers import RecordSpans, clock_offset, take_spans
from daskgpt.training.step import TrainingStep


@dataclass
class Process:
    """Where spans come from.

    offset   what its perf_counter lacks to the time of day, which all processes share
    steps    number of a run -> step
    """

    name: str
    threads: int
    offset: float
    spans: list[Span]
    steps: dict[int, int]


class StepRecorder:
    """Records the kernel calls of the steps that run inside `window`; nothing of other steps, and nothing else.

    Use one recorder at a time, for steps of one grain.
    """

    def __init__(self, step: TrainingStep, scheduler: Runs) -> None:
        self.step, self.scheduler = step, scheduler
        self.windows: list[Window] = []
        self.spans: list[Span] = []
        self.steps: dict[int, int] = {}

    @contextmanager
    def window(self, steps: Sequence[int]) -> Iterator[None]:
        """Record these steps, which the scheduler gets together."""
        client, start = getattr(self.scheduler, "client", None), time()
        if client is not None:
            if not self.windows:
                client.register_plugin(RecordSpans())
                start = time()
            first = getattr(self.scheduler, "runs", 0)
            yield
        else:
            first = steps[0]
            with recorded_spans(lambda number: first + number) as spans:
                yield
            self.spans += spans
        self.steps |= {first + number: step for number, step in enumerate(steps)}
        self.windows.append(Window(tuple(steps), start, time()))

    def finish(self) -> Timeline:
        """The timeline of what was recorded. On a cluster, call it when the last step's updates are done."""
        return timeline_of(self.step, self._processes(), self.windows, self._title())

    def _title(self) -> str:
        steps = [step for window in self.windows for step in window.steps]
        tokens = self.step.recording.inputs["tokens"]
        size, chunk = (" x ".join(map(str, shape)) for shape in (tokens.shape, tokens.chunksize))
        return (
            f"Steps {steps[0]} to {steps[-1]}: barrier {self.step.barrier}, grain {self.step.grain}, "
            f"{size} tokens in chunks of {chunk}, {getattr(self.scheduler, 'description', self.scheduler)}"
        )

    def _processes(self) -> list[Process]:
        client = getattr(self.scheduler, "client", None)
        if client is None:
            return [Process("", getattr(self.scheduler, "threads", 1), clock_offset(), self.spans, self.steps)]
        found = client.run(take_spans)
        client.unregister_worker_plugin(RecordSpans.name)
        threads, workers = client.nthreads(), client.scheduler_info(n_workers=-1)["workers"]
        return [
            Process(f"worker {workers[address]['name']}", threads[address], offset, spans, self.steps)
            for address, (offset, spans) in sorted(found.items(), key=lambda item: str(workers[item[0]]["name"]))
        ]


def timeline_of(step: TrainingStep, processes: Sequence[Process], windows: Sequence[Window], title: str) -> Timeline:
    """Spans of all processes as events on one clock, which begins with the first window."""
    words, start = Words(step.recording), windows[0].start
    lanes: list[str] = []
    events: list[Event] = []
    for process in processes:
        threads = list(dict.fromkeys(span.thread for span in sorted(process.spans, key=lambda span: span.start)))
        numbers = {thread: len(lanes) + number for number, thread in enumerate(threads)}
        count = max(process.threads, len(threads))
        lanes += [_lane(process.name, number, count) for number in range(count)]
        for span in process.spans:
            if span.run in process.steps:
                lane, zero = numbers[span.thread], start - process.offset
                event = words.event(span, process.steps[span.run], lane, zero)
                events += [event] if event else []
    return Timeline(
        title=title,
        lanes=tuple(lanes),
        events=tuple(sorted(events, key=lambda event: event.start)),
        windows=_until_done(windows, events, start),
        tasks=TaskGraph.of(step.recording, step.in_place),
        readers=words.readers,
    )


def _until_done(windows: Sequence[Window], events: Sequence[Event], start: float) -> tuple[Window, ...]:
    """The windows by the timeline's clock; the last one until its last event, which on a cluster comes after it."""
    own = [Window(window.steps, window.start - start, window.end - start) for window in windows]
    end = max((event.end for event in events), default=0.0)
    return (*own[:-1], Window(own[-1].steps, own[-1].start, max(own[-1].end, end)))


def _lane(process: str, number: int, count: int) -> str:
    thread = f"thread {number + 1}"
    return ", ".join(filter(None, (process, thread if count > 1 or not process else "")))
