"""Run a recorded step without data: each kernel call is replaced by one that returns arrays with only a size.

Dask runs the step's own tasks one by one. The stand-ins are counted while they live, and Dask and the tasks drop them
when they would drop the real arrays. Each call knows the sizes of its results, so a new layer needs nothing here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import dask.local
import numpy as np

from daskgpt.graph.calls import KernelCall
from daskgpt.graph.nodes import Key, is_leaf, task
from daskgpt.graph.program import Call, Program, Values
from daskgpt.graph.recording import GraphRun
from daskgpt.model.parameters import tensors
from daskgpt.schedulers.local import LocalScheduler
from daskgpt.training.step import TrainingStep

CLASSES = ("parameters", "gradients", "optimizer", "activations")


class Account:
    """Bytes of the arrays that stand-ins stand for, by class."""

    def __init__(self) -> None:
        self.alive, self.made, self.at_peak = Counter[str](), Counter[str](), Counter[str]()

    def add(self, name: str, size: int) -> None:
        self.made[name] += size
        self.alive[name] += size
        if self.alive.total() > self.at_peak.total():
            self.at_peak = self.alive.copy()

    def remove(self, name: str, size: int) -> None:
        self.alive[name] -= size


class StandIn:
    """An array without data; the account counts its bytes as long as it is referenced."""

    def __init__(self, account: Account, name: str, nbytes: int) -> None:
        self.account, self.name, self.nbytes = account, name, nbytes
        account.add(name, nbytes)

    def __del__(self) -> None:
        self.account.remove(self.name, self.nbytes)


class Message:
    """A stand-in for a message between ranks, which is not counted; each of its items is the same."""

    nbytes = 0

    def __getitem__(self, place: int) -> Message:
        return self


class Trial(LocalScheduler):
    """Dask's synchronous scheduler, which runs a recorded step with stand-ins, one task after another.

    account   of all arrays
    results   bytes of what each task returned
    """

    def __init__(self, step: TrainingStep, window: int = 1) -> None:
        """Try one step, or several that overlap."""
        super().__init__(dask.local.get_sync, "nothing is run")
        self.step, self.precision, self.tensors = step, step.precision, tensors(step.config)
        self.moments = step.row.state(self.tensors)
        self.account = Account()
        self.results: dict[Key, int] = {}
        values = {n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in step.recorded.inputs.items()}
        packs = step.runnable.layout.pack({name: self._state(name) for name in step.recorded.state})
        if window > 1:
            self.run(step.runnable.window_submission([values] * window, packs))
        else:
            self.run(step.runnable.submission(values, packs))

    @property
    def peak(self) -> int:
        """The peak of the bytes of all arrays."""
        return self.account.at_peak.total()

    def run(self, submission: GraphRun) -> list[Any]:
        without_data = {
            key: node if is_leaf(node) else task(key, self._without_data(key, node.func), node.args)
            for key, node in submission.graph.items()
        }
        return super().run(submission._replace(graph=without_data))

    def _state(self, name: str) -> StandIn:
        """Return a tensor of the state by its name there, KIND.NAME."""
        kind, _, parameter = name.partition(".")
        if kind == "weight":
            return StandIn(self.account, "parameters", self.precision.held_bytes(self.tensors[parameter]))
        shape = self.moments[name].shape
        rows = sum(len(range(*own.indices(shape[0]))) for own in self.step.owned_rows(parameter))
        return self.arrays("optimizer", 1, (rows, *shape[1:]), self.precision.dtype)[0]

    def _without_data(self, key: Key, program: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(program, Program):  # a barrier
            return program
        without_data = copy(program)
        without_data.calls = tuple(replace(call, function=self._stand_in(call)) for call in program.calls)

        def run(*arguments: Any) -> Any:
            result = without_data(*arguments)
            self.results[key] = sum(value.nbytes for value in _stand_ins(result))
            return result

        return run

    def _stand_in(self, call: Call) -> Callable[..., Any]:
        """Return a function that returns stand-ins for the arrays of a call."""
        function: Any = call.function
        return partial(getattr(function, "__self__", function).stand_in, self, call.key)

    def arrays(self, kind: str, count: int, shape: tuple[int, ...], dtype: np.dtype) -> list[StandIn]:
        """See `graph.calls.Memory`."""
        return [StandIn(self.account, kind, math.prod(shape) * dtype.itemsize) for _ in range(count)]

    def updated(self, parameter: str) -> list[Any]:
        """See `graph.calls.Memory`."""
        kinds = ["weight", *self.step.row.of(self.tensors[parameter]).moments]
        return [self._state(f"{kind}.{parameter}") for kind in kinds]

    def message(self) -> Any:
        """See `graph.calls.Memory`."""
        return Message()


def most_bytes(step: TrainingStep) -> int:
    """Return the bytes of everything that a step holds or makes, as if nothing were dropped: a quick upper bound."""
    made = [
        result
        for key, node in step.recorded.unmerged.items()
        if isinstance(call := getattr(node, "func", None), KernelCall)
        for result in call.results(key)
    ]
    known = tensors(step.config)
    values, moments = (
        sum(math.prod(tensor.shape) for tensor in own) * step.precision.dtype.itemsize
        for own in (known.values(), step.row.state(known).values())
    )
    held = sum(step.precision.held_bytes(tensor) for tensor in known.values()) + moments
    # In place no call returns a gradient, but if it is summed separately, it is made nevertheless.
    return held + values + sum(math.prod(result.shape) * result.dtype.itemsize for result in made)


def _stand_ins(values: Any) -> list[Any]:
    """Yield all arrays in nested sequences, each once."""
    if isinstance(values, Values):
        return _stand_ins(values.values)
    if isinstance(values, list | tuple):
        return list({id(array): array for value in values for array in _stand_ins(value)}.values())
    return [] if values is None else [values]


def rounded(size: int) -> str:
    """Return bytes as text, in MB or GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
