"""A plan in Python: tasks and memory of a step that nobody has run, for people and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import html_table, html_text
from daskgpt.config.run import DataConfig, DataflowConfig, LocalConfig, OptimizerConfig, RunConfig
from daskgpt.instruments.memory import Prediction, describe_prediction, predict
from daskgpt.training.job import Job
from daskgpt.training.stand_ins import CLASSES


@dataclass(frozen=True, repr=False)
class Plan:
    """What a step will take; `str` is what `daskgpt.train --plan` prints.

    job     what would be trained
    found   its step: tasks, bytes held and made, bytes at the peak, see `memory.Prediction`
    """

    job: Job
    found: Prediction

    def __repr__(self) -> str:
        return describe_prediction(self.job, self.found)

    def _repr_html_(self) -> str:
        found = self.found
        rows = [[kind, *(f"{part[kind] / 1e6:,.1f}" for part in (found.made, found.at_peak))] for kind in CLASSES]
        rows.append(["all together", "", f"{found.peak / 1e6:,.1f}"])
        title = f"A step of {found.tasks:,} tasks, grain {found.grain}"
        lines = str(self).splitlines()
        above = next(number for number, line in enumerate(lines) if "held or made" in line)
        lines[above : above + len(CLASSES) + 2] = []  # the table, as text
        return html_table(title, rows, head=["MB", "held or made", "at the peak"], numbers=True) + html_text(
            "\n".join(lines)
        )


def plan(
    config: GPT2Config,
    data: DataConfig | Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    dataflow: DataflowConfig | Mapping[str, Any] | None = None,
    *,
    local: LocalConfig | Mapping[str, Any] | None = None,
    workers: int = 0,
) -> Plan:
    """What a step will take, without running it; what `python -m daskgpt.train --plan` does, from Python.

    workers   of a cluster that share the step, each of one thread; 0 for the scheduler that dataflow names

    Errors    ValueError where the configurations do not fit each other

    >>> import daskgpt
    >>> found = daskgpt.plan(daskgpt.preset("tiny"), {"batch_size": 4}, dataflow={"grain": "block"})
    >>> found.found.grain, found.found.peak > 3 * 834_432 * 4
    ('block', True)
    """
    given = {DataConfig: data, OptimizerConfig: optimizer, DataflowConfig: dataflow, LocalConfig: local}
    made: dict[Any, Any] = {
        kind: kind(**own) if isinstance(own, Mapping) else own or kind() for kind, own in given.items()
    }
    job = Job(
        config, made[DataConfig], made[OptimizerConfig], made[DataflowConfig], RunConfig(), local=made[LocalConfig]
    )
    if workers:
        rule, advice = "workers must come without local_steps", "Leave one out."
        require(not job.local.local_steps, "plan", rule, {"local_steps": job.local.local_steps}, advice)
        job = replace(job, dataflow=replace(job.dataflow, scheduler="local", threads=workers))
    return Plan(job, predict(job, workers))
