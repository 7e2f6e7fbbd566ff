"""A training step and a loss as recorded graphs, and the state that passes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config import GPT2Config, OptimizerConfig
from daskgpt.graph.nodes import array_of, from_numpy
from daskgpt.graph.replay import Recording, Runs
from daskgpt.model import logits, mean_loss, transformer
from daskgpt.optimizer import hyper_parameters, update
from daskgpt.parameters import parameter_shapes
from daskgpt.tape import Tape

Lazy = dict[str, da.Array]


@dataclass
class State:
    """Parameters and moments, where the scheduler keeps them, and how many steps they have seen.

    `values` maps "weight.NAME", "m.NAME", "v.NAME" to a whole array, or to results that a scheduler holds.
    """

    values: dict[str, np.ndarray | list[Any]]
    step: int = 0

    @classmethod
    def initial(cls, parameters: Mapping[str, np.ndarray]) -> State:
        """Zero moments beside the parameters."""
        values: dict[str, np.ndarray | list[Any]] = {f"weight.{name}": value for name, value in parameters.items()}
        for moment in ("m", "v"):
            values |= {f"{moment}.{name}": np.zeros_like(value) for name, value in parameters.items()}
        return cls(values)

    def parameters(self, scheduler: Runs) -> dict[str, np.ndarray]:
        """The parameters as arrays here."""
        held = {name[7:]: value for name, value in self.values.items() if name.startswith("weight.")}
        return {
            name: value if isinstance(value, np.ndarray) else scheduler.fetch(value)[0] for name, value in held.items()
        }


class TrainingStep:
    """Forward, backward and AdamW of one batch, recorded once."""

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        optimizer: OptimizerConfig,
        dtype: np.typing.DTypeLike = np.float32,
    ) -> None:
        self.optimizer = optimizer
        tape = Tape()
        tokens, targets = _batch_leaves(tape, batch_shape, chunk)
        weights, m, v = (_parameter_leaves(tape, config, kind, dtype) for kind in ("weight", "m", "v"))
        hyper = array_of(f"hyper-{tape.token}", (3,), ((3,),), np.float64)
        loss = mean_loss(tape, config, weights, tokens, targets)
        gradients = _gradients(tape, weights, loss)
        updated = update(weights, gradients, m, v, hyper, optimizer, tape.token)
        leaves = {"tokens": tokens, "targets": targets, "hyper": hyper}
        outputs = {"loss": loss}
        for name, new in updated.items():
            leaves |= {f"weight.{name}": weights[name], f"m.{name}": m[name], f"v.{name}": v[name]}
            outputs |= {f"weight.{name}": new.weight, f"m.{name}": new.m, f"v.{name}": new.v}
        self.recording = Recording(leaves, outputs)

    def __call__(
        self, scheduler: Runs, state: State, tokens: np.ndarray, targets: np.ndarray, steps: int
    ) -> tuple[float, State]:
        """Loss before the update, and the new state; `steps` is the length of the run (for the learning rate)."""
        hyper = hyper_parameters(self.optimizer, state.step, steps)
        values = state.values | {"tokens": tokens, "targets": targets, "hyper": hyper}
        results = self.recording.run(scheduler, values)
        loss = float(scheduler.fetch(results.pop("loss"))[0])
        return loss, State(dict(results), state.step + 1)


class Inference:
    """A forward pass recorded once; its output is the mean "loss", the "logits" or the last "activations"."""

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        output: str,
        dtype: np.typing.DTypeLike = np.float32,
    ) -> None:
        tape = Tape()
        tokens, targets = _batch_leaves(tape, batch_shape, chunk)
        weights = _parameter_leaves(tape, config, "weight", dtype)
        self.output = output
        leaves = {"tokens": tokens} | {f"weight.{name}": weight for name, weight in weights.items()}
        if output == "loss":
            leaves["targets"] = targets
            result = mean_loss(tape, config, weights, tokens, targets)
        else:
            result = (logits if output == "logits" else transformer)(tape, config, weights, tokens)
        self.recording = Recording(leaves, {output: result})

    def __call__(
        self, scheduler: Runs, values: Mapping[str, np.ndarray | list[Any]], **batch: np.ndarray
    ) -> np.ndarray:
        """The output for the parameters among `values` and the batch (tokens=, targets=)."""
        leaves = {name: values[name] for name in self.recording.leaves if name in values} | batch
        results = self.recording.run(scheduler, leaves)
        return self.recording.assemble(scheduler, self.output, results[self.output])


class Gradients:
    """Loss and gradients of a batch, recorded once."""

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        dtype: np.typing.DTypeLike = np.float32,
    ) -> None:
        tape = Tape()
        tokens, targets = _batch_leaves(tape, batch_shape, chunk)
        weights = _parameter_leaves(tape, config, "weight", dtype)
        loss = mean_loss(tape, config, weights, tokens, targets)
        leaves = {"tokens": tokens, "targets": targets}
        leaves |= {f"weight.{name}": weight for name, weight in weights.items()}
        self.recording = Recording(leaves, {"loss": loss} | _gradients(tape, weights, loss))

    def __call__(
        self, scheduler: Runs, values: Mapping[str, np.ndarray | list[Any]], **batch: np.ndarray
    ) -> dict[str, np.ndarray]:
        """ "loss" and the gradient of every parameter, by name."""
        results = self.recording.run(scheduler, dict(values) | batch)
        return {name: self.recording.assemble(scheduler, name, held) for name, held in results.items()}


def loss_and_gradients(
    config: GPT2Config, parameters: Mapping[str, np.ndarray | da.Array], tokens: da.Array, targets: da.Array
) -> tuple[da.Array, Lazy]:
    """Mean cross-entropy and its gradient with respect to every parameter, as lazy dask arrays.

    Shapes   tokens, targets (B, T) int32, alike in chunks; their chunks are those of every activation
    Dtype    that of the parameters, float32 or float64
    Errors   ValueError where shapes or chunks do not fit the model
    """
    tape = Tape()
    weights = {
        name: value.rechunk(-1)
        if isinstance(value, da.Array)
        else from_numpy(f"weight.{name}-{tape.token}", value, tuple((size,) for size in value.shape))
        for name, value in parameters.items()
    }
    loss = mean_loss(tape, config, weights, tokens, targets)
    return loss, _gradients(tape, weights, loss)


def _gradients(tape: Tape, weights: Lazy, loss: da.Array) -> Lazy:
    one = from_numpy(f"one-{tape.token}", np.ones((), loss.dtype), ())
    gradients = tape.backward(loss, one)
    return {name: gradients[weight.name] for name, weight in weights.items()}


def _batch_leaves(tape: Tape, shape: tuple[int, int], chunk: tuple[int, int]) -> tuple[da.Array, da.Array]:
    chunks = tuple((part,) * (whole // part) for part, whole in zip(chunk, shape))
    tokens, targets = (array_of(f"{name}-{tape.token}", shape, chunks, np.int32) for name in ("tokens", "targets"))
    return tokens, targets


def _parameter_leaves(tape: Tape, config: GPT2Config, kind: str, dtype: np.typing.DTypeLike) -> Lazy:
    return {
        name: array_of(f"{kind}.{name}-{tape.token}", shape, tuple((size,) for size in shape), dtype)
        for name, shape in parameter_shapes(config).items()
    }
