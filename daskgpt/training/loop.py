"""The training loop: batches through a recorded step, metrics and the model into a run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.data.dataset import batch, validation_batches
from daskgpt.graph.recording import Runs
from daskgpt.graph.spans import recorded_spans
from daskgpt.model.optimizer import learning_rate
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.finite import require_finite, require_finite_parameters
from daskgpt.training.inference import Inference
from daskgpt.training.job import Job, compile_kernels, describe
from daskgpt.training.progress import Progress
from daskgpt.training.result import Result
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import Start, open_dataset, start_values
from daskgpt.training.step import MERGED_GRAINS, Batch, State, TrainingStep
from daskgpt.training.watching import Watcher

Watching = Sequence[tuple[int, Watcher]]  # with the first step that each wants to see


def fit(
    config: GPT2Config,
    data: DataConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    dataflow: DataflowConfig | None = None,
    run: RunConfig | None = None,
    *,
    parameters: Mapping[str, np.ndarray] | None = None,
    on_step: Any = None,
    watchers: Sequence[Watcher] = (),
    quiet: bool = False,
) -> Result:
    """Train a model; what `python -m daskgpt.train` does, from Python. A run is written where `run.out` names a folder.

    parameters   initial values, None for those of `run.init` or random ones
    on_step      called with (step, metrics) after each step, for a live plot
    watchers     instruments that look on, such as `daskgpt.TimelineWatcher`
    quiet        whether nothing is printed: no header, no progress

    Errors       ValueError where the configurations do not fit each other, FileNotFoundError for missing data,
                 FileExistsError where `run.out` holds a run already, RuntimeError where a loss or a parameter does
                 not stay finite
    """
    data, run = data or DataConfig(), run or RunConfig()
    origin = Start.read(run.init) if run.init else None
    if origin:
        rule = "fit: the model's numbers must be those of the model to start from"
        origin.check_size(asdict(config), rule, "Take them from daskgpt.load.")
    dataset = open_dataset(data, config.vocabulary, origin)
    job = Job(config, dataset, data, optimizer or OptimizerConfig(), dataflow or DataflowConfig(), run)
    folder = RunFolder(run.out) if run.out else None
    compile_kernels(job.precision)
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        return run_job(job, scheduler, start_values(job, origin, parameters), folder, on_step, watchers, quiet)


def run_job(
    job: Job,
    scheduler: Runs,
    parameters: Mapping[str, np.ndarray],
    folder: RunFolder | None,
    on_step: Any = None,
    watchers: Sequence[Watcher] = (),
    quiet: bool = False,
) -> Result:
    """The loop itself. Stopped by Ctrl-C, it keeps what it has learnt."""
    losses: list[float] = []
    validation = math.nan
    step = training_step(job, scheduler)
    if folder:
        folder.create(job.resolved(scheduler, "auto" if _to_be_measured(job, step) else step.grain))
    progress = Progress(job.run.steps, quiet=quiet)
    progress.say(describe(job, scheduler))
    state = step.initial(parameters)
    watching = [(watcher.begin(job, step, scheduler), watcher) for watcher in watchers]
    start = time.perf_counter()
    progress.begin()
    try:
        for latest, metrics in _steps(job, scheduler, step, state, watching, progress.say):
            state = latest
            losses.append(metrics["loss"])
            validation = metrics.get("validation_loss", validation)
            progress.step(metrics)
            if folder:
                if metrics["step"] == 0:
                    folder.configure(job.resolved(scheduler, step.grain))  # chosen by now, and written over auto
                folder.log(metrics)
            if on_step:
                on_step(metrics["step"], metrics)
            require_finite(job, scheduler, state, metrics)
    except KeyboardInterrupt:
        progress.say(f"stopped after {len(losses)} of {job.run.steps} steps")
    finally:
        progress.close()
        if folder:
            folder.close()
    result = Result(job.config, state.parameters(scheduler), losses, validation, time.perf_counter() - start)
    require_finite_parameters(job, max(len(losses) - 1, 0), result.parameters)
    for watcher in watchers:
        watcher.end()
    if folder:
        result.model = folder.save(result.config, result.parameters)
    return result


def _steps(
    job: Job, scheduler: Runs, step: TrainingStep, state: State, watching: Watching, say: Callable[[str], None]
) -> Iterator[tuple[State, dict[str, Any]]]:
    """State and metrics after each step."""
    validate = Inference(job.config, job.batch_shape, job.chunk, state.layout, ("loss",), job.precision)
    size = {"batch_size": job.data.batch_size, "sequence_length": job.data.sequence_length}
    tokens = job.data.batch_size * job.data.sequence_length
    number = 0
    while number < job.run.steps:
        start = time.perf_counter()
        numbers = range(number, number + _together(job, step, number, watching))
        batches = [batch(job.dataset.training, **size, seed=job.run.seed, step=n) for n in numbers]
        with ExitStack() as looking:
            if not _to_be_measured(job, step):
                for first, watcher in watching:
                    looking.enter_context(watcher.watch(numbers) if number >= first else nullcontext())
            losses, state = run_steps(job, scheduler, step, state, batches, say)
        rate = round(tokens * len(losses) / (time.perf_counter() - start), 1)
        for number, loss in zip(numbers, losses):
            metrics = {"step": number, "loss": loss, "tokens_per_s": rate}
            metrics["learning_rate"] = learning_rate(job.optimizer, number, job.run.steps)
            if number + 1 == _next_validation(job, number):
                metrics["validation_loss"] = validation_loss(job, scheduler, validate, state)
            yield state, metrics
        number += 1


def _next_validation(job: Job, number: int) -> int:
    """How many steps will have been made at the next validation."""
    every = job.run.validate_every or job.run.steps
    return min((number // every + 1) * every, job.run.steps)


def _together(job: Job, step: TrainingStep, number: int, watching: Watching) -> int:
    """How many steps from this one on may overlap."""
    if job.dataflow.barrier != "none" or _to_be_measured(job, step):
        return 1
    ends = [_next_validation(job, number), *(first for first, _ in watching if number < first)]
    return min(job.dataflow.window, min(ends) - number)


def training_step(job: Job, scheduler: Runs) -> TrainingStep:
    """The step of a job. With grain auto it starts with the finest one that may be chosen, to be measured."""
    grain, barrier = job.dataflow.grain, job.dataflow.barrier
    if grain == "auto":
        # A cluster's task costs milliseconds, whatever the kernels do: there the tasks are large from the start.
        # Fork-join means a wait after each layer, which a task of several layers would hide.
        if barrier == "layer":
            grain = "kernel"
        else:
            grain = MERGED_GRAINS[0] if scheduler.in_place else "block"
    return TrainingStep(
        job.config,
        job.batch_shape,
        job.chunk,
        job.optimizer,
        precision=job.precision,
        grain=grain,
        barrier=barrier,
        in_place=scheduler.in_place,
    )


def _to_be_measured(job: Job, step: TrainingStep) -> bool:
    return job.dataflow.grain == "auto" and step.in_place and job.dataflow.barrier != "layer" and not step.measured


def run_steps(
    job: Job,
    scheduler: Runs,
    step: TrainingStep,
    state: State,
    batches: Sequence[Batch],
    say: Callable[[str], None] = print,
) -> tuple[list[float], State]:
    """Some steps; with grain auto, the first one is measured and decides how the tasks of the others are merged."""
    if _to_be_measured(job, step):
        with recorded_spans() as spans:
            loss, state = step(scheduler, state, *batches[0], job.run.steps)
        say(f"grain      {step.choose_grain(spans, scheduler.threads)}")
        return [loss], state
    if scheduler.in_place and len(batches) > 1:
        return step.window(scheduler, state, batches, job.run.steps)
    submitted = []
    for own in batches:
        handles, state = step.submit(scheduler, state, own, job.run.steps)
        submitted.append(handles)
    return [step.loss(scheduler, handles) for handles in submitted], state


def validation_loss(job: Job, scheduler: Runs, inference: Inference, state: State) -> float:
    """Mean loss over fixed, evenly spread windows of the held-out text."""
    size = {"batch_size": job.data.batch_size, "sequence_length": job.data.sequence_length}
    batches = validation_batches(job.dataset.validation, **size, count=job.run.validation_batches)
    losses = [float(inference(scheduler, state, x, y)["loss"]) for x, y in batches]
    return sum(losses) / len(losses)
