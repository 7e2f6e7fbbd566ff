"""A training step as a recorded graph, and the state that passes from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.grain import GRAINS
from daskgpt.graph.inplace import InPlace, update_in_place
from daskgpt.graph.nodes import Graph, Key, array_of, from_numpy
from daskgpt.graph.recording import Layout, Recording, Runs
from daskgpt.graph.spans import Span
from daskgpt.kernels.adamw import adamw_inplace
from daskgpt.kernels.bfloat16.rounded_layers import TrainedWeight
from daskgpt.model.gpt2 import mean_loss
from daskgpt.model.layers import FUSED_UPDATES
from daskgpt.model.optimizer import hyper_parameters, update
from daskgpt.model.parameters import parameter_shapes
from daskgpt.model.tape import Tape
from daskgpt.training.grouping import groups_of, layer_of, memory_edges, phase_of, stage_of, title, update_groups

Lazy = dict[str, da.Array]


Batch = tuple[np.ndarray, np.ndarray]


# Mean seconds of a task from which on little is lost between tasks: each costs the threaded scheduler 0.1 to 0.2 ms,
# most are shorter than the mean, and a thread may wait for the last one. (gpt2, 4 x 64 tokens, on two cores: 6 % of
# the threads' time with tasks of 18 ms, 2.5 % with 100 ms.)
LONG_ENOUGH = 25e-3


# Tasks of single kernels are for looking at: merging those of one chunk costs no parallelism, and separate ones are
# ordered so that about a quarter more memory is held.
MERGED_GRAINS = GRAINS[GRAINS.index("segment") :]


def dtype_of(precision: str) -> np.dtype:
    """The dtype of parameters and activations; bfloat16 is what products round to."""
    return np.dtype("float64" if precision == "float64" else "float32")


def held(parameters: Mapping[str, np.ndarray], precision: str) -> dict[str, Any]:
    """Parameters as a step holds them: at bfloat16, the matrices that are multiplied with packed copies."""
    if precision != "bfloat16":
        return {name: np.asarray(value, dtype_of(precision)) for name, value in parameters.items()}
    return {
        name: TrainedWeight.of(value) if value.ndim == 2 and name != "wpe.weight" else value
        for name, value in parameters.items()
    }


@dataclass
class State:
    """Parameters and their moments, packed as `layout` says, where the scheduler keeps them.

    Names are "weight.NAME", "m.NAME" and "v.NAME"; a state for inference has weights only.
    """

    layout: Layout
    packs: list[Any]
    step: int = 0

    @classmethod
    def of_weights(cls, parameters: Mapping[str, np.ndarray], precision: str = "float32") -> State:
        """Parameters alone, for inference."""
        weights = {f"weight.{name}": value for name, value in held(parameters, precision).items()}
        layout = Layout((tuple(weights),))
        return cls(layout, layout.pack(weights))

    def parameters(self, scheduler: Runs) -> dict[str, np.ndarray]:
        """The parameters as arrays here, in the order of the table."""
        values = self.layout.unpack(scheduler.fetch(self.packs))
        weights = {name.removeprefix("weight."): value for name, value in values.items() if name.startswith("weight.")}
        return {name: value.values if isinstance(value, TrainedWeight) else value for name, value in weights.items()}


class TrainingStep:
    """Forward, backward and AdamW of one batch, recorded once."""

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        chunk: tuple[int, int],
        optimizer: OptimizerConfig,
        precision: str = "float32",
        grain: str = "block",
        barrier: str = "step",
        in_place: bool = False,
    ) -> None:
        """barrier   where everybody waits: after each layer, each phase (forward, backward, update) or the step
        in_place  whether the state's arrays are written over: for schedulers that never compute a task again
        """
        self.optimizer, self.precision, self.barrier, self.in_place = optimizer, precision, barrier, in_place
        self.phases = barrier in ("layer", "phase")
        self.measured = False
        self.chunks = math.prod(whole // part for whole, part in zip(batch_shape, chunk))
        # From here on activations take more memory than weights do, and tasks wait so that it is given back in time.
        self.large = math.prod(batch_shape) > config.channels
        tape = Tape(precision)
        tokens, targets = batch_leaves(tape, batch_shape, chunk)
        weights, m, v = (parameter_leaves(tape, config, kind, precision) for kind in ("weight", "m", "v"))
        hyper = array_of(f"hyper-{tape.token}", (3,), ((3,),), np.float64)
        loss = mean_loss(tape, config, weights, tokens, targets)
        updated = update(weights, gradients_of(tape, weights, loss), m, v, hyper, optimizer, tape)
        state: Lazy = {}
        new: Lazy = {}
        for name, result in updated.items():
            state |= {f"weight.{name}": weights[name], f"m.{name}": m[name], f"v.{name}": v[name]}
            new |= {f"weight.{name}": result.weight, f"m.{name}": result.m, f"v.{name}": result.v}
        self.recording = Recording(
            {"tokens": tokens, "targets": targets, "hyper": hyper},
            {"loss": loss},
            state,
            new,
            title_of=title,
            in_place=self._in_place(math.prod(batch_shape), tape) if in_place else None,
        )
        self.set_grain(grain)

    def _in_place(self, summed: int, tape: Tape) -> Callable[[Graph], InPlace]:
        kernel = tape.replaced.get(adamw_inplace, adamw_inplace)

        def rewrite(graph: Graph) -> InPlace:
            updates = [key for key in graph if layer_of(key) == "adamw" and len(key) == 1]
            return update_in_place(graph, updates, kernel, summed, not self.phases, FUSED_UPDATES)

        return rewrite

    def set_grain(self, grain: str) -> None:
        """Merge the step's tasks to another size; the state and every bit of the results stay the same.

        Out of place the packs of the state change with the grain: set it before the first step.
        """
        graph = self.recording.unmerged
        waits = memory_edges(graph) if self.large and grain != "chunk" and self.in_place and not self.phases else {}
        self.recording.merge(groups_of(graph, grain, update_groups(grain), self.phases), waits)
        if self.phases:
            self.recording.wait_between(stage_of if self.barrier == "layer" else phase_of, tokens=not self.in_place)
        self.grain = grain

    def choose_grain(self, spans: Sequence[Span], threads: int) -> str:
        """Set the finest merged grain whose tasks last long enough, from kernel times of a step; return the finding.

        Where there are more threads than chunks, updates have to run beside the backward pass: no chunk is one task.
        """
        self.measured = True
        seconds: dict[Key, float] = {}
        for span in spans:
            seconds[span.key] = seconds.get(span.key, 0.0) + span.end - span.start
        graph, means = self.recording.unmerged, {}
        for grain in MERGED_GRAINS if self.chunks >= threads else MERGED_GRAINS[:-1]:
            group_of = groups_of(graph, grain, update_groups(grain), self.phases)
            tasks = len({group_of(key) or key for key in seconds})
            means[grain] = sum(seconds.values()) / tasks
        enough = [grain for grain, mean in means.items() if mean >= LONG_ENOUGH]
        self.set_grain(enough[0] if enough else list(means)[-1])
        return (
            f"{self.grain}, tasks of {means[self.grain] * 1e3:.1f} ms ("
            + ", ".join(f"{grain} {mean * 1e3:.1f}" for grain, mean in means.items())
            + ")"
        )

    def initial(self, parameters: Mapping[str, np.ndarray]) -> State:
        """Zero moments beside the parameters. In place they are written over: keep a copy if they are needed."""
        values: dict[str, Any] = {f"weight.{name}": value for name, value in held(parameters, self.precision).items()}
        for moment in ("m", "v"):
            values |= {f"{moment}.{name}": np.zeros_like(value) for name, value in parameters.items()}
        return State(self.recording.layout, self.recording.layout.pack(values))

    def __call__(
        self, scheduler: Runs, state: State, tokens: np.ndarray, targets: np.ndarray, steps: int
    ) -> tuple[float, State]:
        """Loss before the update, and the new state; `steps` is the length of the run (for the learning rate)."""
        handles, state = self.submit(scheduler, state, (tokens, targets), steps)
        return self.loss(scheduler, handles), state

    def submit(self, scheduler: Runs, state: State, batch: Batch, steps: int) -> tuple[list[Any], State]:
        """Start a step: handles of its loss, and the state after it. A cluster goes on by itself."""
        handles, packs = self.recording.run(scheduler, self._values(batch, state.step, steps), state.packs)
        return handles, State(state.layout, packs, state.step + 1)

    def window(self, scheduler: Runs, state: State, batches: Sequence[Batch], steps: int) -> tuple[list[float], State]:
        """Several steps that overlap as one graph, with the same results: their losses, and the state after them."""
        values = [self._values(batch, state.step + number, steps) for number, batch in enumerate(batches)]
        handles = self.recording.run_window(scheduler, values, state.packs)
        losses = [self.loss(scheduler, own) for own in handles]
        return losses, State(state.layout, state.packs, state.step + len(batches))

    def loss(self, scheduler: Runs, handles: list[Any]) -> float:
        """The loss of a submitted step, waited for."""
        return float(self.recording.output(scheduler, handles)["loss"])

    def _values(self, batch: Batch, step: int, steps: int) -> dict[str, np.ndarray]:
        tokens, targets = batch
        return {"tokens": tokens, "targets": targets, "hyper": hyper_parameters(self.optimizer, step, steps)}


def gradients_of(tape: Tape, weights: Lazy, loss: da.Array) -> Lazy:
    one = from_numpy(f"one-{tape.token}", np.ones((), loss.dtype), ())
    gradients = tape.backward(loss, one)
    return {name: gradients[weight.name] for name, weight in weights.items()}


def batch_leaves(tape: Tape, shape: tuple[int, int], chunk: tuple[int, int]) -> tuple[da.Array, da.Array]:
    chunks = tuple((part,) * (whole // part) for part, whole in zip(chunk, shape))
    tokens, targets = (array_of(f"{name}-{tape.token}", shape, chunks, np.int32) for name in ("tokens", "targets"))
    return tokens, targets


def parameter_leaves(tape: Tape, config: GPT2Config, kind: str, precision: str) -> Lazy:
    dtype = dtype_of(precision)
    return {
        name: array_of(f"{kind}.{name}-{tape.token}", shape, tuple((size,) for size in shape), dtype)
        for name, shape in parameter_shapes(config).items()
    }
