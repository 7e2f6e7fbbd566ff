"""The cost model: kinds and sizes of kernel calls, and the time expected of a step in chunks.

Automatic chunks, predictions (`profiling.calibrate`, `profiling.simulate`) and `benchmarks/limits.py` read it. A step's
operations, by which rates are computed, are those of `model.parameters.step_operations`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskgpt.config.model import ModelConfig
from daskgpt.graph.calls import ChunkSum, Exchange, KernelCall, RowSum, call_of
from daskgpt.graph.compiled import KernelGraph
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Graph, Key
from daskgpt.graph.program import Span
from daskgpt.graph.update_in_place import RowUpdate
from daskgpt.model.layers import ATTENTION
from daskgpt.model.parameters import attention_operations, step_operations
from daskgpt.model.tape import parts_of_heads

# A kernel call.

Sizes = dict[str, int]  # of axes, by their letters; n counts how often the kernel is called
SAME = {"gather": "embedding.backward"}  # what an owner sums for all ranks


def work_of(graph: Graph, key: Key) -> tuple[str, Sizes] | None:
    """Return the kind of a kernel call, which ends with its signature, and the sizes of its axes; None for tasks that
    call no kernel.
    """
    call: Any = call_of(graph[key])
    if call.origin is None or isinstance(call, Exchange):
        return None
    name = SAME.get(call.origin.kind, call.origin.kind)
    if isinstance(call, ChunkSum):
        call = RowSum(call, call.bands(), range(len(call.order.pieces)))
    if isinstance(call, RowSum):
        return _summed(f"{name} sum", [call.call], call.bands, call.pieces)
    if isinstance(call, RowUpdate) and call.sums:
        return _summed(f"{name} update", call.sums, call.bands, range(len(call.sums[0].order.pieces)))
    if isinstance(call, RowUpdate):
        axes, rows = "OC"[: 1 + len(call.columns)], call.rows.stop - call.rows.start
        return f"{name} update {axes}->{axes}", dict(zip("OC", (rows, *call.columns))) | {"n": len(call.bands)}
    if call.by_rows:
        (needed,) = graph[key].dependencies
        while isinstance(rows_of := call_of(graph[needed]), Exchange):  # the total of all ranks has the rows of each
            needed = next(one for one in graph[needed].dependencies if not isinstance(call_of(graph[one]), Exchange))
        return f"{name} rows O->O", {"O": math.prod(rows_of.shape), "n": 1}
    assert isinstance(call, KernelCall)
    index = dict(zip(call.axes, key[1:]))
    sizes = {axis: chunks[index[axis]] if axis in index else sum(chunks) for axis, chunks in call.chunks.items()}
    inputs = ",".join(filter(None, call.inputs))  # without numbers, of which some calls have one for each tensor
    kind = f"{inputs}->{','.join(call.outputs)}"
    if sizes.pop("h", None):  # kernels take the same time for some heads as for all heads of a smaller model
        kind = kind.replace(",h", "").replace("h", "")
        if not name.startswith(ATTENTION.name):  # gather and split have as many channels in inputs and outputs
            letter = "X" if name.startswith("gather") else "C"
            channels = (sizes.pop("X"), sizes.pop("C"))["h" in call.outputs[0]]
            kind, sizes[letter] = kind.replace("X", letter).replace("C", letter), channels
    return f"{name} {kind}", sizes | {"n": 1}


def _summed(name: str, sums: Sequence[ChunkSum], bands: Sequence[tuple[int, int]], pieces: range) -> tuple[str, Sizes]:
    """Return kind and sizes of some rows of sums over some pieces; their tokens are those of axis b."""
    sizes = {axis: sum(chunks) for call in sums for axis, chunks in call.chunks.items()}
    order, calls = sums[0].order, 0
    cuts = 1 + max(t for piece in order.pieces for _, t in piece)  # of the tokens of a sequence
    sequences = sum(order.sequences[b] for number in pieces for b, _ in order.pieces[number])
    for call in sums:
        for number in pieces:
            calls += len(call.order.cuts(number)) * (1 if call.order.together else len(call.order.pieces[number]))
    sizes |= {"b": sequences * sizes.get("t", 1) // cuts, "t": 1, "n": calls * len(bands)}
    if sums[0].outputs[0]:
        sizes[sums[0].outputs[0][0]] = bands[-1][1] - bands[0][0]
    inputs = ",".join(axes for call in sums for axes in call.inputs)
    return f"{name} {inputs}->{sums[0].outputs[0]}", sizes


def arrays_of(kind: str) -> tuple[list[str], list[str]]:
    """Return the axes of the arrays that calls of a kind read, and of those that they write."""
    inputs, outputs = (side.split(",") for side in kind.rpartition(" ")[2].split("->"))
    return inputs, outputs


def features(kind: str, sizes: Mapping[str, int]) -> list[float]:
    """Return the calls, numbers read, numbers written and pairs of numbers that meet, of a call."""
    inputs, outputs = arrays_of(kind)

    def numbers(arrays: Iterable[str]) -> int:
        return sum(math.prod(sizes[axis] for axis in axes) for axes in arrays)

    letters = set("".join([*inputs, *outputs]))
    # A layer of whole sequences reads each token for each other one; others multiply along all their axes.
    pairs = sizes["T"] * numbers(inputs[:1]) if "T" in letters else numbers(["".join(letters)])
    return [sizes["n"], numbers(inputs), numbers(outputs), pairs]


# A step in chunks. Before anything is measured, only ratios matter, which differ little between processors.

RATE = 100e9  # operations a second of one thread's products
ATTENTION_SLOWER = 6  # than products, by operation, forward and backward (tiny: 9 of 40 ms)
# Kernels of few rows spend more of their time on weights and calls: an eighth more with 64 rows, all kernels together
# (products alone: nothing at 3,072 x 768, a third at 512 x 128).
FEW_ROWS = 8
# Cut sequences cost gathering, and sums of few tokens (tiny: 5 % of a step with 32 tokens, 9 % with 16).
FEW_TOKENS = 1.6
TASK = 0.15e-3  # seconds that a task costs in addition to its kernels
TASK_THREADS = 4  # at most that share these costs: Python does most of the work between kernels, one thread at a time


@dataclass(frozen=True)
class Work:
    """Seconds on one thread of those kernels of a step that chunks divide: not gradients of weights, nor updates.

    tokens     of layers that work token by token, which any chunks divide
    attention  of attention, which chunks of sequences divide, and heads where sequences are cut
    """

    tokens: float
    attention: float

    @classmethod
    def expected(cls, config: ModelConfig, batch_shape: tuple[int, int]) -> Work:
        """Return the work by the operations of the products, forward and backward with respect to activations."""
        attention = attention_operations(config, *batch_shape)
        products = step_operations(config, *batch_shape) - attention
        return cls(products * 2 // 3 / RATE, attention * ATTENTION_SLOWER / RATE)

    @classmethod
    def measured(cls, kernels: KernelGraph, spans: Iterable[Span]) -> Work:
        """Return the work by the kernel calls of one step."""
        seconds: dict[str, float] = defaultdict(float)  # by layer
        for span in spans:
            if span.key in kernels.graph and chunk_of(kernels.graph, span.key, whole=False) is not None:
                origin = kernels.origin(span.key)
                seconds[origin.layer if origin else ""] += span.end - span.start
        attention = seconds.pop(ATTENTION.name, 0.0)
        return cls(sum(seconds.values()), attention)

    def seconds(self, heads: int, blocks: int, chunk: tuple[int, ...], cut: tuple[int, ...], threads: int) -> float:
        """Return the seconds of a step in chunks, except for work that chunks do not divide.

        heads      by how many attention can be divided
        chunk      sequences and tokens of a chunk
        cut        how many chunks the sequences of the batch are cut into, and the tokens of a sequence
        """
        sequences, parts = cut
        count, of_attention = sequences * parts, sequences
        if parts > 1:
            of_attention *= parts_of_heads(heads, sequences, threads)
        slower = 1 + FEW_ROWS / math.prod(chunk) + (FEW_TOKENS / chunk[1] if parts > 1 else 0)
        # Chunks of whole sequences can be a task each; others meet in every block, forward and backward.
        tasks = count if parts == 1 else (count + of_attention) * 2 * blocks
        kernels = self.tokens * slower * _longest(count, threads) + self.attention * _longest(of_attention, threads)
        return kernels + tasks * TASK / min(threads, TASK_THREADS)


def _longest(parts: int, threads: int) -> float:
    """Return the share of work in equal parts that the busiest thread does.

    Parts that are one task take whole rounds; those that are several tasks fill the last round with the work that is
    left. A step lies between the two.
    """
    rounds, filled = math.ceil(parts / threads) / parts, max(1 / threads, 1 / parts)
    return (rounds + filled) / 2
