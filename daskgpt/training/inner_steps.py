"""What tasks of local steps run: some steps of one replica, the parts of what comes of them, and the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from daskgpt.config.run import LocalConfig
from daskgpt.graph.program import Call
from daskgpt.graph.recording import Layout
from daskgpt.graph.repeated import Repeated
from daskgpt.kernels.floating_point import flush_to_zero
from daskgpt.kernels.optimizers import nesterov
from daskgpt.model.parameters import Tensor
from daskgpt.model.precision import Precision, copy_of, values_of
from daskgpt.training.inputs import Moment, input_values
from daskgpt.training.step import Outcome


class InnerSteps:
    """Some steps of one replica, which returns what they tell and how long they took; its weights; its moments.

    The moments are written over, and so are weights that are the replica's own.
    """

    run = 0

    def __init__(
        self,
        step: Repeated,
        given: Layout,
        moments: Sequence[Moment],
        *,
        copied: tuple[str, ...],
    ) -> None:
        """given     names of what the task is called with
        moments   what each step is given, of the replica's sequences only
        copied    kinds of arrays that it works on copies of
        """
        self.step, self.given, self.moments, self.copied = step, given, moments, copied

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls of each step."""
        return self.step.calls

    def __call__(self, *packs: tuple[Any, ...]) -> tuple[tuple[list[Outcome], float], tuple[Any, ...], tuple[Any, ...]]:
        begin = perf_counter()
        values = self.given.unpack(packs)
        state = tuple(
            copy_of(values[name]) if name.startswith(self.copied) else values[name] for name in self.step.names
        )
        outcomes = [
            Outcome.of(self.step(state, input_values(moment), self.run + number))
            for number, moment in enumerate(self.moments)
        ]
        named = dict(zip(self.step.names, state))
        weights = tuple(value for name, value in named.items() if name.startswith("weight."))
        moments = tuple(value for name, value in named.items() if not name.startswith("weight."))
        return (outcomes, perf_counter() - begin), weights, moments


class Shard:
    """Takes the values of some weights, which are sent to who makes their outer step."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)

    def __call__(self, result: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        return tuple(values_of(result[1][place]) for place in self.places)


class OuterStep:
    """The outer step of some tensors: new weights as a step holds them, and the new momentum."""

    def __init__(self, tensors: Sequence[Tensor], precision: Precision, local: LocalConfig) -> None:
        self.tensors, self.precision = tuple(tensors), precision
        self.options = {"rate": local.outer_learning_rate, "beta": local.outer_momentum}

    def __call__(
        self, weights: tuple[Any, ...], momenta: tuple[np.ndarray, ...], *ends: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """ends   of each replica, by its number"""
        made = []
        with flush_to_zero():
            for tensor, start, momentum, *own in zip(self.tensors, weights, momenta, *ends):
                new, kept = nesterov(values_of(start), momentum, own, **self.options)
                made.append((self.precision.hold(tensor, new), kept))
        return tuple(new for new, _ in made), tuple(kept for _, kept in made)
