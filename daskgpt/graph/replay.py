"""Build a graph from dask arrays once, run it again and again with new data at its leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import dask.array as da
import numpy as np

from daskgpt.graph.nodes import Graph, Key, graph_of, keys_of, pieces


class Runs(Protocol):
    """What a scheduler offers a recording."""

    def run(self, graph: Graph, leaves: Mapping[Key, Any], keys: list[Key]) -> list[Any]:
        """Results of `keys`, left where they were made."""
        ...

    def fetch(self, results: list[Any]) -> list[np.ndarray]:
        """The results here, as arrays."""
        ...


class Recording:
    """The graph that leads from named leaf arrays to named outputs.

    Building and optimising the arrays of a step takes as long as running it, so it is done once. A leaf takes either an
    array, which is cut into the leaf's chunks, or the list of results that an output of an earlier run returned.
    """

    def __init__(self, leaves: Mapping[str, da.Array], outputs: Mapping[str, da.Array]) -> None:
        self.leaves, self.outputs = dict(leaves), dict(outputs)
        self.keys = {name: keys_of(array) for name, array in outputs.items()}
        self.graph = graph_of(outputs.values())

    def run(self, scheduler: Runs, values: Mapping[str, np.ndarray | list[Any]]) -> dict[str, list[Any]]:
        """One run; the results of each output, a list with one entry a chunk."""
        data: dict[Key, Any] = {}
        for name, value in values.items():
            leaf = self.leaves[name]
            data |= (
                pieces(leaf, value) if isinstance(value, np.ndarray) else dict(zip(keys_of(leaf), value, strict=True))
            )
        flat = [key for keys in self.keys.values() for key in keys]
        results = iter(scheduler.run(self.graph, data, flat))
        return {name: [next(results) for _ in keys] for name, keys in self.keys.items()}

    def assemble(self, scheduler: Runs, name: str, results: list[Any]) -> np.ndarray:
        """The whole array of an output from the results of its chunks."""
        array = self.outputs[name]
        whole = np.empty(array.shape, array.dtype)
        for piece, chunk in zip(pieces(array, whole).values(), scheduler.fetch(results)):
            piece[...] = chunk
        return whole
