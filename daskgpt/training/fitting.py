"""Training from Python: what `python -m daskgpt.train` does, from configurations to a result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from daskgpt.config.errors import nearest, require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, LocalConfig, OptimizerConfig, RunConfig
from daskgpt.model.parameters import check_config
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.schedulers.cluster import client_address
from daskgpt.training.job import Job, compile_kernels, require_memory
from daskgpt.training.loop import run_job
from daskgpt.training.result import Result
from daskgpt.training.resuming import Beginning, Resumed
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import Start, open_dataset, start_values
from daskgpt.training.watching import Watcher

Changes = Mapping[str, Any]  # of a configuration, by the names of its fields


def fit(
    config: GPT2Config | None = None,
    data: DataConfig | Changes | None = None,
    optimizer: OptimizerConfig | Changes | None = None,
    dataflow: DataflowConfig | Changes | None = None,
    run: RunConfig | Changes | None = None,
    *,
    local: LocalConfig | Changes | None = None,
    parameters: Mapping[str, np.ndarray] | None = None,
    resume: str | os.PathLike[str] = "",
    client: Any = None,
    on_step: Any = None,
    watchers: Sequence[Watcher] = (),
    quiet: bool = False,
) -> Result:
    """Train a model; what `python -m daskgpt.train` does, from Python. A run is written where `run.out` names a folder.

    local        replicas that make steps on their own, None for one model that makes all of them
    parameters   initial values, float32, None for those of `run.init` or random ones
    resume       a run folder to go on with, from its newest good checkpoint. Everything is the run's own then, but for
                 what is given: a mapping names what changes (`run={"steps": 4000}`), a configuration counts as a whole
    client       the `distributed.Client` of a cluster that runs the tasks, in place of `dataflow.scheduler`; it stays
                 open, and nothing of the run stays with it
    on_step      called with (step, metrics) after each step, for a live plot; where it returns True the run ends as
                 Ctrl-C ends it, with a checkpoint, and can be gone on with
    watchers     instruments that look on, such as `daskgpt.TimelineWatcher`
    quiet        whether nothing is printed: no header, no progress

    Errors       ValueError where the configurations do not fit each other or what is given may not change,
                 TypeError for a client that is none, FileNotFoundError for missing data or no run to go on with,
                 FileExistsError where `run.out` holds a run already, RuntimeError where a loss or a parameter does not
                 stay finite or another process trains the run, OSError where the last checkpoint cannot be written

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1, channels=32, positions=32)
    >>> data = {"data": daskgpt.__path__[0] + "/config/*.py", "sequence_length": 32}
    >>> result = daskgpt.fit(config, data, run={"steps": 20, "validation_batches": 2}, quiet=True)
    >>> len(result.losses), result.losses[-1] < result.losses[0]
    (20, True)
    """
    given = {"data": data, "optimizer": optimizer, "local": local, "dataflow": _on(client, dataflow), "run": run}
    folder: RunFolder | None
    if resume:
        rule, advice = "a run that is gone on with has its own parameters", "Leave parameters out, or resume."
        require(parameters is None, "fit", rule, {"resume": resume}, advice)
        resumed = Resumed(os.fspath(resume), {"model": _changes(config)} | {n: _changes(v) for n, v in given.items()})
        job, folder, beginning = resumed.job, resumed.folder, resumed.beginning()
    else:
        rule, advice = "a new run must have the size of a model", "Give daskgpt.preset, say."
        require(config is not None, "fit", rule, {"config": config}, advice)
        job, beginning = _new_job(check_config("fit", config), parameters, given)
        folder = RunFolder(job.run.out) if job.run.out else None
    try:
        compile_kernels(job.precision)
        with open_scheduler(job.dataflow.scheduler, job.dataflow.threads, client) as scheduler:
            return run_job(job, scheduler, beginning, folder, on_step, watchers, quiet)
    finally:
        if folder:
            folder.close()


def _new_job(
    config: GPT2Config, parameters: Mapping[str, np.ndarray] | None, given: Mapping[str, Any]
) -> tuple[Job, Beginning]:
    """The job of a new run, and with what it begins."""
    data: DataConfig = _configuration(DataConfig, given["data"])
    run: RunConfig = _configuration(RunConfig, given["run"])
    optimizer: OptimizerConfig = _configuration(OptimizerConfig, given["optimizer"])
    local: LocalConfig = _configuration(LocalConfig, given["local"])
    dataflow: DataflowConfig = _configuration(DataflowConfig, given["dataflow"])
    origin = Start.read(run.init) if run.init else None
    if origin:
        rule = "the model's numbers must be those of the model to start from"
        origin.check_size(asdict(config), "fit", rule, "Take them from daskgpt.load.")
    job = Job(config, data, optimizer, dataflow, run, open_dataset(data, config.vocabulary, origin), local)
    require_memory(job)
    return job, Beginning(start_values(job, origin, parameters))


def _configuration(kind: Any, given: Any) -> Any:
    """A whole configuration from one, from some of its fields, or from nothing.

    Errors   TypeError for another kind of object, ValueError for an unknown field
    """
    if given is None or isinstance(given, kind):
        return kind() if given is None else given
    rule, got = f"it must be a {kind.__name__} or a mapping of its fields", {"given": repr(given)[:40]}
    require(isinstance(given, Mapping), "fit", rule, got, f"Give daskgpt.{kind.__name__}(...).", TypeError)
    known = [f.name for f in fields(kind)]
    for name in given:
        rule = f"every field must be one of {kind.__name__}'s"
        require(name in known, "fit", rule, {"field": name}, nearest(str(name), known))
    return kind(**given)


def _on(client: Any, dataflow: DataflowConfig | Changes | None) -> DataflowConfig | Changes | None:
    """What is said of the dataflow, with the address of the client's scheduler."""
    if client is None:
        return dataflow
    address = client_address(client)
    if isinstance(dataflow, DataflowConfig):
        return replace(dataflow, scheduler=address)
    return {**(dataflow or {}), "scheduler": address}


def _changes(given: Any) -> Mapping[str, Any]:
    """What a configuration or a mapping gives anew."""
    return {} if given is None else given if isinstance(given, Mapping) else asdict(given)
