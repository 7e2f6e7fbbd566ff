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
from daskgpt.config.stopping import finishing_first
from daskgpt.data.dataset import batch, validation_batches
from daskgpt.formats.run_model import StoredModel
from daskgpt.model.optimizer import learning_rate
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.finite import require_finite, require_finite_parameters
from daskgpt.training.inference import Inference
from daskgpt.training.job import Job, compile_kernels, describe
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.progress import Progress
from daskgpt.training.result import Result
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import Start, open_dataset, start_values
from daskgpt.training.step import State, TrainingStep
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
        rule = "the model's numbers must be those of the model to start from"
        origin.check_size(asdict(config), "fit", rule, "Take them from daskgpt.load.")
    dataset = open_dataset(data, config.vocabulary, origin)
    job = Job(config, data, optimizer or OptimizerConfig(), dataflow or DataflowConfig(), run, dataset)
    folder = RunFolder(run.out) if run.out else None
    compile_kernels(job.precision)
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        return run_job(job, scheduler, start_values(job, origin, parameters), folder, on_step, watchers, quiet)


def run_job(
    job: Job,
    scheduler: Scheduler,
    parameters: Mapping[str, np.ndarray],
    folder: RunFolder | None,
    on_step: Any = None,
    watchers: Sequence[Watcher] = (),
    quiet: bool = False,
) -> Result:
    """The loop itself. Ctrl-C or SIGTERM ends it after a step, and it keeps what it has learnt.

    Errors   KeyboardInterrupt at the second of them: nothing is saved then
    """
    progress = Progress(job.run.steps, quiet=quiet)
    with finishing_first(progress.say) as asked_to_stop:
        return _run(job, scheduler, parameters, folder, on_step, watchers, progress, asked_to_stop)


def _run(
    job: Job,
    scheduler: Scheduler,
    parameters: Mapping[str, np.ndarray],
    folder: RunFolder | None,
    on_step: Any,
    watchers: Sequence[Watcher],
    progress: Progress,
    asked_to_stop: Callable[[], bool],
) -> Result:
    losses: list[float] = []
    validation = math.nan
    steps = JobSteps(job, scheduler, progress.say)
    if folder:
        folder.create(job.resolved(scheduler, steps.chunk, steps.grain))
    progress.say(describe(job, scheduler, steps.described_chunks))
    if not steps.choice.open:  # else it is said when it is known
        progress.say(f"grain      {_tasks(steps.step)}")
    state = steps.initial(parameters)
    watching = [(watcher.begin(job, steps.step, scheduler), watcher) for watcher in watchers]
    start, settled = time.perf_counter(), not steps.open
    progress.begin()
    try:
        for latest, metrics in _steps(job, scheduler, steps, state, watching):
            state = latest
            losses.append(metrics["loss"])
            validation = metrics.get("validation_loss", validation)
            progress.step(metrics)
            if folder:
                if not settled:
                    # What was chosen with this step, over what stood there.
                    folder.configure(job.resolved(scheduler, steps.chunk, steps.grain))
                    settled = not steps.open
                folder.log(metrics)
            if on_step:
                on_step(metrics["step"], metrics)
            require_finite(job, scheduler, state, metrics)
            # Of steps that overlap there is a state after the last one only.
            if asked_to_stop() and state.step == len(losses) < job.run.steps:
                progress.say(f"stopped after {len(losses)} of {job.run.steps} steps")
                break
    finally:
        progress.close()
        if folder:
            folder.close()
    result = Result(job.config, state.parameters(scheduler), losses, validation, time.perf_counter() - start)
    require_finite_parameters(job, max(len(losses) - 1, 0), result.parameters)
    if folder:
        stored = StoredModel(result.config, result.parameters, job.tokens.encoding_name, job.data.sequence_length)
        result.model = folder.save(stored)
    for watcher in watchers:  # whose files may not get written: the model is safe by now
        watcher.end()
    return result


def _steps(
    job: Job, scheduler: Scheduler, steps: JobSteps, state: State, watching: Watching
) -> Iterator[tuple[State, dict[str, Any]]]:
    """State and metrics after each step."""
    validate = Inference(
        job.config, job.batch_shape, steps.chunk, state.layout, ("loss",), job.precision, groups=job.groups
    )
    size = {"batch_size": job.data.batch_size, "sequence_length": job.data.sequence_length}
    tokens = job.data.batch_size * job.data.sequence_length
    number = 0
    while number < job.run.steps:
        start = time.perf_counter()
        numbers = range(number, number + _together(job, steps, number, watching))
        batches = [batch(job.tokens.training, **size, seed=job.run.seed, step=n) for n in numbers]
        with ExitStack() as looking:
            if not steps.open:
                for first, watcher in watching:
                    looking.enter_context(watcher.watch(numbers) if number >= first else nullcontext())
            losses, state = steps.run(state, batches)
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


def _together(job: Job, steps: JobSteps, number: int, watching: Watching) -> int:
    """How many steps from this one on may overlap."""
    if job.dataflow.barrier != "none" or steps.open:
        return 1
    ends = [_next_validation(job, number), *(first for first, _ in watching if number < first)]
    return min(job.dataflow.window, min(ends) - number)


def _tasks(step: TrainingStep) -> str:
    """Size and number of a step's tasks, and what that means on a cluster."""
    text = f"{step.grain}, {step.runnable.tasks} tasks a step"
    return text if step.in_place else f"{text}, each costs a cluster 2 to 3 ms besides its kernels"


def validation_loss(job: Job, scheduler: Scheduler, inference: Inference, state: State) -> float:
    """Mean loss over fixed, evenly spread windows of the held-out text."""
    size = {"batch_size": job.data.batch_size, "sequence_length": job.data.sequence_length}
    batches = validation_batches(job.tokens.validation, **size, count=job.run.validation_batches)
    losses = [float(inference(scheduler, state, x, y)["loss"]) for x, y in batches]
    return sum(losses) / len(losses)
