"""The tape, which records calls of layers and replays them backward for the gradients."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np

from daskgpt.graph.calls import Origin, apply, parse
from daskgpt.graph.nodes import from_numpy
from daskgpt.graph.sum_order import ONE_GROUP, Groups
from daskgpt.model import layers
from daskgpt.model.layers import ADD, PASS, Layer, Row
from daskgpt.model.precision import FLOAT32, Precision


@dataclass(frozen=True)
class Record:
    """One call of a layer: its place in the model, and its arrays by their names in the table.

    new_axes   sizes of the axes of its output that no argument has
    """

    where: str
    layer: Layer
    arrays: dict[str, da.Array]
    options: dict[str, Any]
    new_axes: Mapping[str, int]


class Tape:
    """Record of the layers that were called on dask arrays.

    Every task has an `Origin`. Keys are `layer.pass-where-token`: the token distinguishes the keys of two tapes on a
    cluster, where equal keys mean equal results.
    """

    def __init__(self, precision: Precision = FLOAT32, groups: Groups = ONE_GROUP, threads: int = 1) -> None:
        """Start an empty tape.

        precision   precision whose kernels replace those of the table
        groups      groups of the batch that the sequences of this tape belong to
        threads     number of tasks that can run at once
        """
        self.token = uuid4().hex[:8]
        self.precision, self.groups, self.threads = precision, groups, threads
        self.records: list[Record] = []
        self.recomputed: dict[str, da.Array] = {}

    def __call__(self, where: str, layer: Layer, *arguments: da.Array, **options: Any) -> da.Array:
        """Call a layer, record it for `backward`, and return its first output."""
        arrays = dict(zip(layer.forward.arguments.split(), arguments, strict=True))
        origin, new_axes = Origin(layer.name, "forward", where), _new_axes(layer, arguments, options)
        results = self._apply(origin, layer.forward, arguments, options, new_axes=new_axes)
        arrays |= dict(zip(layer.outputs.split(), results, strict=True))
        self.records.append(Record(where, layer, arrays, options, new_axes))
        return results[0]

    def over_sequences(
        self, where: str, layer: Layer, x: da.Array, *others: da.Array, positions: da.Array, **options: Any
    ) -> da.Array:
        """Call a layer that mixes the tokens of a sequence, and return its first output.

        The chunks of its first argument are gathered before it, and its output is cut into the same chunks. Attention
        is divided by heads where its chunks of sequences alone would leave threads idle.
        """
        if x.numblocks[1] == 1:
            return self(where, layer, x, *others, **options)
        gather, split, given = layers.GATHER, layers.SPLIT, [positions]
        of_x, of_y = dict[str, Any](), dict[str, Any]()
        # Only what is known to compute each head from its own queries, keys and values.
        heads, key_heads = (options["heads"], options["key_heads"]) if layer is layers.ATTENTION else (1, 1)
        if (parts := parts_of_heads(key_heads, x.numblocks[0], self.threads)) > 1:
            of_x, of_y = ({"divided": d, "parts": parts} for d in ((heads, key_heads, key_heads), (heads,)))
            options |= {"heads": heads // parts, "key_heads": key_heads // parts}
            numbers = np.arange(parts, dtype=np.int32)
            given.append(from_numpy(f"parts-{self.token}-{parts}", numbers, ((1,) * parts,)))
            gather, layer, split = layers.BY_HEADS
        whole = self(f"{where}.{layer.forward.arguments.split()[0]}", gather, x, *given, **of_x)
        y = self(where, layer, whole, *others, **options)
        return self(f"{where}.{layer.outputs.split()[0]}", split, y, *given, **of_y)

    def backward(self, y: da.Array, dy: da.Array, constants: Container[str] = ()) -> dict[str, da.Array]:
        """Return the gradient of sum(y * dy) with respect to every input array, by the array's name.

        constants   names of arrays that need none

        A sum over the chunks starts from an earlier gradient of the same array; other gradients of one array (where the
        residual stream forks) are added.
        """
        gradients = {y.name: dy}
        for record in reversed(self.records):
            arriving = gradients.pop(record.arrays[record.layer.outputs.split()[0]].name, None)
            if arriving is None:  # y does not depend on it
                continue
            for argument, row in record.layer.backward.items():
                if record.arrays[argument].name not in constants:
                    self._arrive(gradients, record, argument, row, arriving)
        return gradients

    def _arrive(
        self, gradients: dict[str, da.Array], record: Record, argument: str, row: Row | None, dy: da.Array
    ) -> None:
        array = record.arrays[argument]
        before, dx, summed = gradients.get(array.name), dy, False
        if row is not PASS:
            inputs, (output,) = parse(row.signature)
            given, sizes = row.arguments.split(), dict(zip(output, array.shape))
            after = dy, inputs[given.index("dy")]
            arrays = {name: self._again(array, after) for name, array in record.arrays.items() if name in given}
            summed = not {"b", "t"} & set(output)
            (dx,) = self._apply(
                Origin(record.layer.name, "backward", record.where, argument),
                row,
                [(arrays | {"dy": dy})[name] for name in given],
                record.options,
                new_axes={axis: sizes[axis] for axis in set(output) - set("".join(inputs)) - set("btT")},
                start=before if summed else None,
                at_once=self.precision.at_once.get(row.kernel, 1),
            )
        if before is not None and not summed:
            (dx,) = self._apply(Origin(ADD.name, "backward", record.where, argument), ADD.forward, [before, dx], {})
        gradients[array.name] = dx

    def _again(self, array: da.Array, after: tuple[da.Array, str]) -> da.Array:
        """Return an array; the first output of a cheap layer is computed again once the gradient is available."""
        if array.name in self.recomputed:
            return self.recomputed[array.name]
        cheap = (record for record in self.records if record.layer.cheap)
        record = next((r for r in cheap if r.arrays[r.layer.outputs.split()[0]].name == array.name), None)
        if record is None:
            return array
        row = record.layer.forward
        arguments = [self._again(record.arrays[name], after) for name in row.arguments.split()]
        origin = Origin(record.layer.name, "backward", record.where, again=True)
        again, *_ = self._apply(origin, row, arguments, record.options, new_axes=record.new_axes, after=after)
        self.recomputed[array.name] = again
        return again

    def _apply(
        self, origin: Origin, row: Row, arrays: Sequence[da.Array], options: dict[str, Any], **places: Any
    ) -> tuple[da.Array, ...]:
        return apply(
            origin.name(self.token),
            self.precision.kernel(row.kernel),
            row.signature,
            arrays,
            options={name: options[name] for name in row.options.split()},
            origin=origin,
            groups=self.groups,
            **places,
        )


def parts_of_heads(key_heads: int, sequences: int, threads: int) -> int:
    """Return into how many equal parts heads are divided, for the threads to end soonest: the fewest such parts.

    sequences   number of chunks of sequences, each of which is divided
    """
    possible = (parts for parts in range(1, key_heads + 1) if key_heads % parts == 0)
    return min(possible, key=lambda parts: math.ceil(sequences * parts / threads) / parts)


def _new_axes(layer: Layer, arguments: Sequence[da.Array], options: dict[str, Any]) -> Mapping[str, int]:
    """Return the sizes of the axes of the output that no argument has."""
    axes = parse(layer.forward.signature)[0]
    sizes = {axis: size for a, letters in zip(arguments, axes) for axis, size in zip(letters, a.shape)}
    return layer.new_axes(sizes, options)
