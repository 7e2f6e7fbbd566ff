"""The timeline of a training run's last steps, for `daskgpt.fit` and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.instruments.timeline.events import Timeline
from daskgpt.instruments.timeline.recorder import StepRecorder
from daskgpt.instruments.timeline.summary import describe_summary, summarise
from daskgpt.instruments.timeline.writing import check_timeline_path, is_bare, write_timeline
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job


@documented
@dataclass(frozen=True)
class TimelineConfig(Checked):
    """A timeline of the last steps."""

    timeline: str = setting(
        "",
        "write what the last steps ran when to FILE.json and FILE.html, in the run's folder if FILE names none",
        unit="file",
    )
    timeline_steps: int = setting(4, "how many steps a timeline shows", unit="steps", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeline:
            check_timeline_path(self.timeline)


def require_shared_steps(job: Job) -> None:
    """Errors   ValueError for local steps, of which each replica has its own, and where nobody knows the last ones"""
    rule, advice = "a timeline is of steps that all threads share", "Leave out --timeline or --local-steps."
    require(not job.local.local_steps, "train", rule, {"local_steps": job.local.local_steps}, advice)
    rule, advice = "a timeline of the last steps needs a run of so many steps", "Leave out --timeline or --minutes."
    require(not job.run.minutes, "train", rule, {"minutes": job.run.minutes}, advice)


class TimelineWatcher:
    """A `training.watching.Watcher`: records a run's last steps as a `Timeline`, which notebooks show.

    Where the configuration names a file, the timeline is written there and its summary printed.

    timeline   what was recorded, once the run has ended; None where no step was
    """

    def __init__(self, config: TimelineConfig | None = None) -> None:
        self.config = config or TimelineConfig()
        self.timeline: Timeline | None = None

    def begin(self, job: Job, steps: Any, scheduler: Scheduler) -> int:
        require_shared_steps(job)
        self.recorder: Any
        if job.dataflow.engine == "ranks" and not scheduler.in_place:
            from daskgpt.instruments.timeline.ranks import RankRecorder  # which needs `distributed`

            self.recorder = RankRecorder(steps)
        else:
            self.recorder = StepRecorder(steps.step, scheduler)
        self.path = Path(job.run.out if is_bare(self.config.timeline) else "") / self.config.timeline
        return max(job.steps - self.config.timeline_steps, 0)

    def watch(self, steps: Sequence[int]) -> AbstractContextManager[None]:
        recording: AbstractContextManager[None] = self.recorder.window(steps)
        return recording

    def end(self) -> None:
        if not self.recorder.windows:
            print(
                "timeline   no step was recorded: the run ended before, or had no step after the one that chose the "
                "grain"
            )
            return
        self.timeline = self.recorder.finish()
        if self.config.timeline:
            trace, page = write_timeline(self.timeline, self.path)
            print(f"\n{describe_summary(summarise(self.timeline))}\n\ntimeline written to {page} and {trace}")
