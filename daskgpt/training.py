"""The training loop: batches through a recorded step, metrics and the model into a run folder."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config import DataConfig, DataflowConfig, GPT2Config, OptimizerConfig, RunConfig, chunk_sizes, require
from daskgpt.data.dataset import Dataset, batch, load_dataset, validation_batches
from daskgpt.graph.replay import Runs
from daskgpt.graph.spans import recorded_spans
from daskgpt.kernels._jit import all_cached, compile_all
from daskgpt.kernels.matmul import outruns_float32, unit
from daskgpt.parameters import initial_parameters, parameter_count
from daskgpt.run_folder import RunFolder, load
from daskgpt.schedulers import open_scheduler
from daskgpt.step import MERGED_GRAINS, Batch, Inference, State, TrainingStep
from daskgpt.timeline import StepRecorder, check_timeline_path, describe_summary, summarise, write_timeline

LEAST_CHANNELS = 256  # from which on faster products gain more than rounding and packing cost


@dataclass
class Result:
    """What a run led to."""

    config: GPT2Config
    parameters: dict[str, np.ndarray]
    losses: list[float]
    validation_loss: float
    seconds: float
    model: Path | None = None


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked before anything is computed or written."""

    config: GPT2Config
    dataset: Dataset
    data: DataConfig
    optimizer: OptimizerConfig
    dataflow: DataflowConfig
    run: RunConfig
    chunk: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", chunk_sizes(self.data, self.dataflow))
        require(
            self.data.sequence_length <= self.config.positions,
            "train",
            "a sequence must not be longer than the model's positions",
            {"sequence_length": self.data.sequence_length, "positions": self.config.positions},
            "Shorten the sequence or give more --positions.",
        )
        require(
            self.dataflow.precision != "float64",
            "train",
            "a run must compute in float32 or bfloat16",
            {"precision": self.dataflow.precision},
            "float64 is for daskgpt.verify.",
        )
        require(
            self.dataset.vocabulary <= self.config.vocabulary,
            "train",
            "the model must know every token id of the encoding",
            {
                "encoding": self.dataset.encoding_name,
                "ids": self.dataset.vocabulary,
                "vocabulary": self.config.vocabulary,
            },
            "Leave --vocabulary to the encoding.",
        )

    def resolved(self) -> dict[str, Any]:
        """Every configuration with nothing left to default or detection, by name."""
        batch_chunk, sequence_chunk = self.chunk
        return {
            "model": self.config,
            "data": replace(self.data, encoding=self.dataset.encoding_name),
            "optimizer": self.optimizer,
            "dataflow": replace(
                self.dataflow, batch_chunk=batch_chunk, sequence_chunk=sequence_chunk, precision=self.precision
            ),
            "run": self.run,
        }

    @property
    def precision(self) -> str:
        """The operands of matrix products, with auto resolved."""
        return choose_precision(self.dataflow.precision, self.config.channels)[0]

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.data.batch_size, self.data.sequence_length


def train(
    config: GPT2Config,
    data: DataConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    dataflow: DataflowConfig | None = None,
    run: RunConfig | None = None,
    *,
    parameters: Mapping[str, np.ndarray] | None = None,
    on_step: Any = None,
    write: bool = False,
) -> Result:
    """Train a model; what `python -m daskgpt.train` does, from Python.

    parameters   initial values, None for those of `run.init` or random ones
    on_step      called with (step, metrics) after each step, for a live plot
    write        whether a run folder is written

    Errors       ValueError where the configurations do not fit each other, FileNotFoundError for missing data
    """
    data, run = data or DataConfig(), run or RunConfig()
    plan = Plan(config, open_dataset(data), data, optimizer or OptimizerConfig(), dataflow or DataflowConfig(), run)
    folder = RunFolder(run.out) if write else None
    compile_kernels(plan.precision)
    with open_scheduler(plan.dataflow.scheduler, plan.dataflow.threads) as scheduler:
        return run_plan(plan, scheduler, start_values(plan, parameters), folder, on_step)


def open_dataset(data: DataConfig) -> Dataset:
    """The tokens that a configuration names."""
    return load_dataset(
        data.data,
        None if data.encoding == "auto" else data.encoding,
        validation_fraction=data.validation_fraction,
        sequence_length=data.sequence_length,
    )


def start_values(plan: Plan, parameters: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
    """Initial parameters: those given, those of the model file of `--init`, or random ones."""
    if parameters is not None:
        return {name: value.copy() for name, value in parameters.items()}  # the run may write over its own
    if plan.run.init:
        return load(plan.run.init)[1]
    return initial_parameters(plan.config, plan.run.seed)


def compile_kernels(precision: str = "float32") -> None:
    """Compile what Numba has not cached yet, and say so: the first start on a machine takes longer."""
    bfloat16 = precision == "bfloat16"
    if not all_cached(np.float32, bfloat16):
        print("compiling kernels (first start on this machine, about half a minute) ...", file=sys.stderr, flush=True)
    compile_all(np.float32, bfloat16)


def run_plan(
    plan: Plan, scheduler: Runs, parameters: Mapping[str, np.ndarray], folder: RunFolder | None, on_step: Any = None
) -> Result:
    """The loop itself. Stopped by Ctrl-C, it keeps what it has learnt."""
    if plan.run.timeline:
        check_timeline_path(plan.run.timeline)
    if folder:
        folder.create(plan.resolved())
    losses: list[float] = []
    validation = math.nan
    step = training_step(plan, scheduler)
    state = step.initial(parameters)
    recorder = StepRecorder(step, scheduler) if plan.run.timeline else None
    start = time.perf_counter()
    bar = tqdm(total=plan.run.steps, unit="step", dynamic_ncols=True, smoothing=0.05)
    try:
        for latest, metrics in _steps(plan, scheduler, step, state, recorder):
            state = latest
            losses.append(metrics["loss"])
            validation = metrics.get("validation_loss", validation)
            bar.update()
            bar.set_postfix_str(_progress(metrics, validation))
            if folder:
                folder.log(metrics)
            if on_step:
                on_step(metrics["step"], metrics)
    except KeyboardInterrupt:
        bar.write(f"stopped after {len(losses)} of {plan.run.steps} steps")
    bar.close()
    result = Result(plan.config, state.parameters(scheduler), losses, validation, time.perf_counter() - start)
    if recorder:
        show_timeline(plan.run.timeline, recorder)
    if folder:
        result.model = folder.save(result.config, result.parameters)
    return result


def _steps(
    plan: Plan, scheduler: Runs, step: TrainingStep, state: State, recorder: StepRecorder | None
) -> Iterator[tuple[State, dict[str, Any]]]:
    """State and metrics after each step."""
    validate = Inference(plan.config, plan.batch_shape, plan.chunk, state.layout, ("loss",), plan.precision)
    size = {"batch_size": plan.data.batch_size, "sequence_length": plan.data.sequence_length}
    tokens = plan.data.batch_size * plan.data.sequence_length
    number = 0
    while number < plan.run.steps:
        start = time.perf_counter()
        numbers = range(number, number + _together(plan, step, number))
        batches = [batch(plan.dataset.training, **size, seed=plan.run.seed, step=n) for n in numbers]
        recorded = recorder and number >= _first_recorded(plan) and not _to_be_measured(plan, step)
        with recorder.window(numbers) if recorder and recorded else nullcontext():
            losses, state = run_steps(plan, scheduler, step, state, batches)
        rate = round(tokens * len(losses) / (time.perf_counter() - start), 1)
        for number, loss in zip(numbers, losses):
            metrics = {"step": number, "loss": loss, "tokens_per_s": rate}
            if number + 1 == _next_validation(plan, number):
                metrics["validation_loss"] = validation_loss(plan, scheduler, validate, state)
            yield state, metrics
        number += 1


def _next_validation(plan: Plan, number: int) -> int:
    """How many steps will have been made at the next validation."""
    every = plan.run.validate_every or plan.run.steps
    return min((number // every + 1) * every, plan.run.steps)


def _together(plan: Plan, step: TrainingStep, number: int) -> int:
    """How many steps from this one on may overlap."""
    if plan.dataflow.barrier != "none" or _to_be_measured(plan, step):
        return 1
    ends = [_next_validation(plan, number)]
    if plan.run.timeline and number < _first_recorded(plan):
        ends.append(_first_recorded(plan))
    return min(plan.dataflow.window, min(ends) - number)


def _first_recorded(plan: Plan) -> int:
    """The first step of a timeline."""
    return max(plan.run.steps - plan.run.timeline_steps, 0)


def choose_precision(wanted: str, channels: int) -> tuple[str, str]:
    """The precision to compute with, and why.

    Errors   ValueError or RuntimeError where DASKGPT_MATMUL names a unit that is unknown or missing
    """
    if wanted == "float32":
        return wanted, "products in float32"
    name = unit().name.lower()
    if wanted == "bfloat16":
        return wanted, f"operands of products rounded to bfloat16, multiplied by {name}, sums in float32"
    if not outruns_float32(unit()):
        return "float32", f"auto: products of bfloat16 ({name}) would not be faster on this processor"
    if channels < LEAST_CHANNELS:
        return "float32", f"auto: with {channels} channels (below {LEAST_CHANNELS}) bfloat16 would gain little"
    return "bfloat16", f"auto: {name} multiplies it faster than float32"


def training_step(plan: Plan, scheduler: Runs) -> TrainingStep:
    """The step of a plan. With grain auto it starts with the finest one that may be chosen, to be measured."""
    grain, barrier = plan.dataflow.grain, plan.dataflow.barrier
    if grain == "auto":
        # A cluster's task costs milliseconds, whatever the kernels do: there the tasks are large from the start.
        # Fork-join means a wait after each layer, which a task of several layers would hide.
        if barrier == "layer":
            grain = "kernel"
        else:
            grain = MERGED_GRAINS[0] if scheduler.in_place else "block"
    return TrainingStep(
        plan.config,
        plan.batch_shape,
        plan.chunk,
        plan.optimizer,
        precision=plan.precision,
        grain=grain,
        barrier=barrier,
        in_place=scheduler.in_place,
    )


def _to_be_measured(plan: Plan, step: TrainingStep) -> bool:
    return plan.dataflow.grain == "auto" and step.in_place and plan.dataflow.barrier != "layer" and not step.measured


def run_steps(
    plan: Plan, scheduler: Runs, step: TrainingStep, state: State, batches: Sequence[Batch]
) -> tuple[list[float], State]:
    """Some steps; with grain auto, the first one is measured and decides how the tasks of the others are merged."""
    if _to_be_measured(plan, step):
        with recorded_spans() as spans:
            loss, state = step(scheduler, state, *batches[0], plan.run.steps)
        tqdm.write(f"grain      {step.choose_grain(spans, scheduler.threads)}")
        return [loss], state
    if scheduler.in_place and len(batches) > 1:
        return step.window(scheduler, state, batches, plan.run.steps)
    submitted = []
    for own in batches:
        handles, state = step.submit(scheduler, state, own, plan.run.steps)
        submitted.append(handles)
    return [step.loss(scheduler, handles) for handles in submitted], state


def validation_loss(plan: Plan, scheduler: Runs, inference: Inference, state: State) -> float:
    """Mean loss over fixed, evenly spread windows of the held-out text."""
    size = {"batch_size": plan.data.batch_size, "sequence_length": plan.data.sequence_length}
    batches = validation_batches(plan.dataset.validation, **size, count=plan.run.validation_batches)
    losses = [float(inference(scheduler, state, x, y)["loss"]) for x, y in batches]
    return sum(losses) / len(losses)


def show_timeline(path: str, recorder: StepRecorder) -> None:
    """Write the timeline of what was recorded, and print its summary."""
    if not recorder.windows:
        print(
            "timeline   no step was recorded: the run ended before, or had no step after the one that chose the grain"
        )
        return
    timeline = recorder.finish()
    trace, page = write_timeline(timeline, path)
    print(f"\n{describe_summary(summarise(timeline))}\n\ntimeline written to {page} and {trace}")


def _progress(metrics: dict[str, Any], validation: float) -> str:
    text = f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:,.0f} tokens/s"
    return text if math.isnan(validation) else f"{text}, validation {validation:.3f}"


def describe(plan: Plan, scheduler: Runs) -> str:
    """What will be run, for the terminal."""
    c, (b, t) = plan.config, plan.chunk
    batch_size, length = plan.batch_shape
    return "\n".join(
        (
            f"model      {parameter_count(c):,} parameters: {c.blocks} blocks, {c.heads} heads, {c.channels} channels, "
            f"vocabulary {c.vocabulary}, positions {c.positions}",
            f"data       {plan.dataset.description}",
            f"batch      {batch_size} x {length} tokens, {batch_size * length // (b * t)} chunks of {b} x {t}",
            f"precision  {': '.join(choose_precision(plan.dataflow.precision, c.channels))}",
            f"scheduler  {getattr(scheduler, 'description', scheduler)}",
        )
    )
