"""A whole run of a recorded graph as one program, to be called again and again inside one task."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np

from daskgpt.graph.nodes import is_leaf, slices_of, value_of
from daskgpt.graph.program import Call, Program
from daskgpt.graph.recording import STATE, Runnable


class Repeated:
    """Runs a graph once a call, on data of its own, and writes over a state that it is given.

    It carries no arrays and no graph, so that it can be sent to where the state is.

    names   of the state's arrays, in their order
    """

    def __init__(self, runnable: Runnable) -> None:
        """runnable   one task, whose state is written over, and whose outputs have one chunk each"""
        ((key, node),) = ((key, node) for key, node in runnable.graph.items() if not is_leaf(node))
        program: Program = node.func
        (self.names,) = runnable.layout.packs
        assert runnable.recorded.in_place
        self.outputs: dict[str, int | None] = {}
        for name, (place,) in runnable.places.items():
            assert place.key == key
            self.outputs[name] = place.number
        inputs = {
            chunk: (name, index)
            for name, array in runnable.recorded.inputs.items()
            for chunk, index in slices_of(array).items()
        }
        self.program = program
        keys = [reference.key for reference in node.args]
        self.state = next(number for number, own in enumerate(keys) if own[0] == STATE)
        self.inputs = {number: inputs[own] for number, own in enumerate(keys) if own in inputs}
        constants = (runnable.graph.get(own) for own in keys)
        self.constants = {number: value_of(leaf) for number, leaf in enumerate(constants) if leaf is not None}

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls of one run."""
        return self.program.calls

    def __call__(self, state: tuple[Any, ...], values: Mapping[str, np.ndarray], run: int) -> dict[str, Any]:
        """One run: its outputs by name.

        values   whole inputs by name
        run      its place among the runs of a graph, for who records
        """
        program = copy(self.program)
        program.run = run
        arguments = {self.state: state, **self.constants}
        arguments |= {number: values[name][index] for number, (name, index) in self.inputs.items()}
        results = program(*(arguments[number] for number in range(len(arguments))))
        return {name: results if number is None else results[number] for name, number in self.outputs.items()}
