"""The same steps under several dataflows, in turns: their times, how they use the threads, and their timelines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import html_table, text_table
from daskgpt.config.run import DataConfig, DataflowConfig
from daskgpt.profiling import machine
from daskgpt.profiling.measure import Steps
from daskgpt.profiling.plan import job_from
from daskgpt.profiling.statistics import Spread
from daskgpt.profiling.timeline import Summary, Timeline, summarise, svg_legend, svg_strips
from daskgpt.schedulers.connect import open_scheduler
from daskgpt.training.job import compile_kernels

WARMUP = 4  # steps before the first turn
HEAD = ("", "ms", "speedup", "effic.", "overlap", "idle")  # narrow enough for a phone


@dataclass(frozen=True)
class Execution:
    """Steps under one dataflow.

    seconds   a step, one value a turn
    losses    of all steps that were made, in their order
    timeline  of some further steps
    """

    threads: int
    seconds: Spread
    losses: tuple[float, ...]
    timeline: Timeline

    @cached_property
    def summary(self) -> Summary:
        """Times of kernels, tasks and threads in the timeline."""
        return summarise(self.timeline)

    @property
    def overlap(self) -> float:
        """Share of the time in which two or more different layers ran at once."""
        return self.summary.overlap

    @property
    def idle(self) -> float:
        """Share of the threads' time in which no kernel ran."""
        return 1 - self.summary.kernel_share


class Executions(dict[str, Execution]):
    """Name -> execution. The first one is what the others' speedup is measured by.

    others   cores that other programs kept busy before
    """

    def __init__(self, found: Mapping[str, Execution], others: float = 0.0) -> None:
        super().__init__(found)
        self.others = others

    @property
    def first(self) -> Execution:
        return next(iter(self.values()))

    def speedup(self, name: str) -> float:
        """Return how many times as fast as the first, by medians."""
        return self.first.seconds.median / self[name].seconds.median

    def efficiency(self, name: str) -> float:
        """Return the speedup by how many times as many threads it has."""
        return self.speedup(name) * self.first.threads / self[name].threads

    def rows(self) -> list[list[str]]:
        """Return a table of text, whose columns are those of HEAD."""
        return [
            [name, run.seconds.text("", 1, 1e3), f"{self.speedup(name):.2f}"]
            + [f"{share:.0%}" for share in (self.efficiency(name), run.overlap, run.idle)]
            for name, run in self.items()
        ]

    def __repr__(self) -> str:
        return "\n".join(filter(None, (text_table([HEAD, *self.rows()]), self.note)))

    @property
    def note(self) -> str:
        """Say that the machine was busy, "" where it was not."""
        if self.others <= machine.BUSY:
            return ""
        return f"note: other programs kept {self.others:.1f} cores busy; these are times of a share of the machine"

    def _repr_html_(self) -> str:
        """Return the table, and the timelines one below the other on one time scale: a strip a thread."""
        runs = list(self.values())
        title = f"Turns: {runs[0].seconds.n}; medians a step (and middle halves), speedup over {next(iter(self))}"
        end = max(window.end for run in runs for window in run.timeline.windows)
        lanes = "".join(
            f'<div style="margin-top: 8px">{escape(name)}: {run.seconds.text("", 1, 1e3)} ms a step</div>'
            f"{svg_strips(run.timeline, end=end, named=False)}"
            for name, run in self.items()
        )
        longest = max(runs, key=lambda run: len({event.layer for event in run.timeline.events}))
        legend = f'<div style="margin-top: 8px; font-size: 12px">{svg_legend(longest.timeline)}</div>'
        rows = [[row[0], row[1].partition(" ")[0], *row[2:]] for row in self.rows()]
        return html_table(title, rows, head=HEAD, numbers=True) + f"<div>{escape(self.note)}</div>" + lanes + legend


def measure(
    config: GPT2Config,
    data: DataConfig | Mapping[str, Any] | None = None,
    dataflows: Mapping[str, DataflowConfig | Mapping[str, Any]] | None = None,
    *,
    turns: int = 5,
    steps: int = 4,
    seed: int = 0,
) -> Executions:
    """Time training steps on random tokens under several dataflows, and record some further ones of each.

    They take turns, so that noise hits all alike.

    dataflows  by name, the first one being what the others are compared with
    turns      how often each has its turn
    steps      of a turn, and of the recorded ones; more where a window has more

    Errors     ValueError where configurations do not fit each other, or there is no dataflow, turn or step

    >>> import daskgpt
    >>> small = daskgpt.preset("tiny", blocks=1, channels=32)
    >>> models = {"sequential": {"scheduler": "sync", "grain": "block"}, "threads": {"threads": 2, "grain": "block"}}
    >>> found = daskgpt.measure(small, {"batch_size": 4}, models, turns=1)
    >>> list(found), found["sequential"].losses == found["threads"].losses
    (['sequential', 'threads'], True)
    """
    known = dataflows or {"default": {}}
    require(turns >= 1, "measure", "turns must be at least 1", {"turns": turns}, "Give 1 or more.")
    require(steps >= 1, "measure", "steps must be at least 1", {"steps": steps}, "Give 1 or more.")
    shared = {"data": data, "optimizer": {"schedule": "constant"}, "run": {"seed": seed}}
    jobs = {name: job_from(config, dataflow=own, **shared) for name, own in known.items()}
    for job in jobs.values():
        compile_kernels(job.precision)
    others = machine.busy_cores()
    with ExitStack() as stack:
        runs: dict[str, Steps] = {}
        for name, job in jobs.items():
            scheduler = stack.enter_context(open_scheduler(job.dataflow.scheduler, job.dataflow.threads))
            runs[name] = Steps(job, scheduler, seed)
            runs[name].run(WARMUP)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, own in runs.items():
                taken = own.run(steps)
                seconds[name].append(sum(taken) / len(taken))
        found = {
            name: Execution(run.scheduler.threads, Spread.of(seconds[name]), tuple(run.losses), run.timeline(steps))
            for name, run in runs.items()
        }
        return Executions(found, others)
