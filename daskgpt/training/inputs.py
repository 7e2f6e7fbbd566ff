"""What a step is given besides the state: a table, from which leaves of the graph and their values derive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import dask.array as da
import numpy as np

from daskgpt.graph.nodes import array_of
from daskgpt.model.tape import Tape


@dataclass(frozen=True)
class Moment:
    """One step, of which its inputs are made.

    tokens, targets   (B, T) int32; targets are None where nothing needs them
    hyper             what the optimizer is told, float64 (S,)
    streams           keys of the random numbers of each sequence, int64 (B,), see `kernels.dropout`; None where there
                      are none
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None
    hyper: np.ndarray | None = None
    streams: np.ndarray | None = None

    def of(self, first: int, last: int) -> Moment:
        """The same of some sequences."""
        targets, streams = (None if each is None else each[first:last] for each in (self.targets, self.streams))
        return replace(self, tokens=self.tokens[first:last], targets=targets, streams=streams)


@dataclass(frozen=True)
class Input:
    """One row.

    axes    a letter an axis: b and t are cut into the chunks of the batch, others are whole
    value   the whole array of a step, None where that step has none (nothing must read it then)
    """

    name: str
    axes: str
    dtype: np.typing.DTypeLike
    value: Callable[[Moment], np.ndarray | None]


INPUTS: tuple[Input, ...] = (
    Input("tokens", "bt", np.int32, lambda moment: moment.tokens),
    Input("targets", "bt", np.int32, lambda moment: moment.targets),
    # How a chunk knows where in the sequence it stands.
    Input("positions", "t", np.int32, lambda moment: np.arange(moment.tokens.shape[1], dtype=np.int32)),
    Input("streams", "b", np.int64, lambda moment: moment.streams),
    Input("hyper", "S", np.float64, lambda moment: moment.hyper),
)


def input_leaves(
    tape: Tape, batch_shape: tuple[int, int], chunk: tuple[int, int], hyper_size: int = 0
) -> dict[str, da.Array]:
    """Dask arrays without data for every row, cut into chunks."""
    cut = {axis: (part,) * (whole // part) for axis, part, whole in zip("bt", chunk, batch_shape)}
    chunks = cut | {"S": (hyper_size,)}
    leaves = {}
    for row in INPUTS:
        own = tuple(chunks[axis] for axis in row.axes)
        leaves[row.name] = array_of(f"{row.name}-{tape.token}", tuple(map(sum, own)), own, row.dtype)
    return leaves


def input_values(moment: Moment) -> Mapping[str, np.ndarray]:
    """The arrays of a step, of the rows that it has."""
    values = {row.name: row.value(moment) for row in INPUTS}
    return {name: value for name, value in values.items() if value is not None}
