"""Single steps, run by hand: compiled with chosen dials, and submitted to a scheduler without an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskgpt.config.model import ModelConfig
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.distribute import Rank
from daskgpt.model.precision import FLOAT32, Precision
from daskgpt.model.step import Arrays, CompiledStep, Dials, Outcome, compile_step
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.engine import State

Batch = Sequence[np.ndarray]


def step_of(
    config: ModelConfig,
    batch_shape: tuple[int, int],
    chunk: tuple[int, int],
    optimizer: OptimizerConfig,
    precision: Precision = FLOAT32,
    rank: Rank | None = None,
    **dials: Any,
) -> CompiledStep:
    """Return a compiled step; dials: the fields of `Dials` but for chunk and precision."""
    return compile_step(config, batch_shape, optimizer, Dials(chunk, precision=precision, **dials), rank)


def state_of(step: CompiledStep, parameters: Arrays, number: int = 0) -> State:
    """Return the state before a step, with moments of zeros."""
    return State(step.layout, step.state(parameters), number)


def run_step(
    scheduler: Scheduler, step: CompiledStep, state: State, batch: Batch, steps: int, seed: int = 0
) -> tuple[Outcome, State]:
    """Run one step; return its outcome and the state after it. steps: length of the run; seed: of dropout"""
    (outcome,), state = run_window(scheduler, step, state, [batch], steps, seed)
    return outcome, state


def run_window(
    scheduler: Scheduler, step: CompiledStep, state: State, batches: Sequence[Batch], steps: int, seed: int = 0
) -> tuple[list[Outcome], State]:
    """Run overlapping steps as one graph; return their outcomes and the state after them."""
    inputs = [step.inputs(batch, number, steps, seed) for number, batch in enumerate(batches, state.step)]
    outputs, packs = scheduler.outputs(step, inputs, state.packs)
    return list(map(Outcome.of, outputs)), State(state.layout, packs, state.step + len(inputs))
