"""Dask's own report of a run on a cluster: task stream, profile and transfers, as a page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import performance_report

from daskgpt.config.errors import require
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.profiling.timeline import is_bare
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job


@documented
@dataclass(frozen=True)
class DaskReportConfig(Checked):
    """Dask's report of a run on a cluster."""

    performance_report: str = setting(
        "",
        "write Dask's performance report of a run on a cluster to FILE.html, in the run's folder if FILE names none",
        unit="file",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        path = Path(self.performance_report)
        if self.performance_report and path.suffix != ".html":
            rule = f"a report must be a page; got performance_report={path}"
            raise ValueError(f"train: {rule}. Give a name that ends with .html.")
        if self.performance_report and not (is_bare(str(path)) or os.access(path.parent, os.W_OK | os.X_OK)):
            rule = f"the report's folder must exist and be writable; got performance_report={path}"
            raise ValueError(f"train: {rule}. Make it, or name another.")


class DaskReportCallback:
    """A `training.trainer.Callback`: Dask's report of all steps.

    Errors   ValueError where no cluster runs them
    """

    def __init__(self, config: DaskReportConfig, job: Job) -> None:
        self.name = config.performance_report
        rule, advice = "Dask reports on clusters only", "Add --scheduler local, or take --timeline."
        require(job.scheduler not in ("sync", "threads"), "train", rule, {"scheduler": job.scheduler}, advice)

    def begin(self, job: Job, steps: Any, scheduler: Scheduler) -> int:
        if not isinstance(scheduler, ClusterScheduler):
            got = f"got scheduler={scheduler.description}"
            raise ValueError(f"train: Dask reports on clusters only; {got}. Take TimelineCallback.")
        self.path = Path(job.run.out if is_bare(self.name) else "") / self.name
        self.stack = ExitStack()
        with scheduler.client.as_current():
            self.stack.enter_context(performance_report(str(self.path), mode="inline"))
        self.client = scheduler.client
        return 0

    def watch(self, steps: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self) -> None:
        with self.client.as_current():
            self.stack.close()
        print(f"report written to {self.path}")
