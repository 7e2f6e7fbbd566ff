"""Decoders, which read tokens of texts and cache keys and values, so that earlier tokens are not computed again.

`Decoder` runs a model of built-in layers in one kernel (`kernels.decoding`). `EagerDecoder` runs any model: it calls
`model.transformer.transformer`, whose layers run their forward kernels at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np

from daskgpt.config.model import ModelConfig
from daskgpt.config.stopping import delayed_interrupts
from daskgpt.kernels.bfloat16.rounding import ceiling, to_bfloat16
from daskgpt.kernels.decoding.decode_step import ACTIVATIONS, APART, OUTSIDE, TENSORS, decode_step, stages
from daskgpt.kernels.decoding.products import GROUP
from daskgpt.kernels.rotary import angles_of
from daskgpt.kernels.simd.lanes import LANES
from daskgpt.model.layers import Layer
from daskgpt.model.parameters import check_finite, merged, tensors
from daskgpt.model.precision import precision_of
from daskgpt.model.transformer import logits
from daskgpt.schedulers.local import own_threads

# Rows of layers that the decoding kernel has, by field of the configuration.
DECODED = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rotary"),
    "attention": ("causal",),
    "activation": ACTIVATIONS,
}
HEADS = ("wte.weight", "lm_head.weight")  # tensors whose rows the vocabulary numbers
TABLES = {"tied": ("wpe.weight",), "untied": ("wpe.weight", "wte.weight")}  # of which a token reads a row
MOST_ROWS = 64  # rows of a step: tokens that are read together, so that each weight is read once for all of them
BYTES_A_THREAD = 1 << 23  # bytes of weights below which another thread would cost more time than it saves


class Weights:
    """Weights of a model for decoding: the caller's arrays in float32, or rounded copies of matrices in bfloat16.

    others     choices of the model that the decoding kernel does not support; empty if there are none
    bytes      size of the weights that a token reads: all but tables of which it reads a row

    Errors     ValueError naming the first tensor with a number that is not finite
    """

    def __init__(self, config: ModelConfig, parameters: Mapping[str, np.ndarray], precision: str) -> None:
        config, parameters = merged(config, parameters)
        self.config, self.halves, self.precision = config, precision == "bfloat16", precision_of(precision)
        choices = {name: getattr(config, name) for name in DECODED}
        self.others = ", ".join(f"{name}={row}" for name, row in choices.items() if row not in DECODED[name])
        self.arrays: dict[str, Any] = {}
        self.bytes = 0
        for name, tensor in tensors(config).items():
            value = np.ascontiguousarray(parameters[name], np.float32)
            check_finite("decoding", {name: value})  # kernels may turn a damaged NaN into a number (`lanes.exp`)
            half = self.halves and (tensor.multiplied or name in HEADS)
            if self.others:
                self.arrays[name] = self.precision.hold(tensor, value)
            else:
                self.arrays[name] = to_bfloat16(value) if half else value
            # Of a table that is no head, a token reads a row; of the head, all but those of the padded vocabulary.
            rows = config.vocabulary if name in HEADS else len(value)
            if name not in TABLES[config.head]:
                self.bytes += value[:rows].size * (2 if half else 4)


def decoder_of(weights: Weights, texts: int, capacity: int, threads: int = 0) -> Decoder | EagerDecoder:
    """Return a decoder of several texts, with a cache of `capacity` tokens per text.

    capacity   at most the positions of the model
    threads    0 = all cores, or fewer for a small model
    """
    assert capacity <= weights.config.positions, "a step indexes memory by position"
    if not weights.others:
        return Decoder(weights, texts, capacity, threads)
    _say_slower(weights.others)
    return EagerDecoder(weights, texts, capacity)


@cache
def _say_slower(others: str) -> None:
    print(f"decoding: {others}: every layer runs its own forward kernel, which is slower", file=sys.stderr)


class Decoder:
    """Cached keys and values of texts, and scratch memory, for any number of steps; see `decoder_of`."""

    most_rows = MOST_ROWS

    def __init__(self, weights: Weights, texts: int, capacity: int, threads: int) -> None:
        self.weights, config = weights, weights.config
        self.threads = threads or max(1, min(own_threads(), weights.bytes // BYTES_A_THREAD))
        self.pool = ThreadPoolExecutor(max(1, self.threads - 1))  # beside the calling thread
        size, heads, key_heads = config.head_channels, config.heads, config.key_heads
        self.capacity, width = ceiling(capacity, GROUP), ceiling(size, LANES)
        dtype = np.uint16 if weights.halves else np.float32
        self.keys = np.zeros((config.blocks, texts, key_heads, self.capacity * size), dtype)
        self.values = np.zeros((config.blocks, texts, key_heads, self.capacity * width), dtype)
        self.tensors = self._addresses(weights.arrays)
        self.counters = np.zeros(2 * stages(config.blocks) * APART, np.int64)
        gated, turned = config.activation == "swiglu", config.position == "rotary"
        # In the order of `sizes` in `decode_step`.
        hidden, numbers = config.hidden_channels, [config.channels, heads, key_heads, size]
        numbers += [hidden, config.vocabulary, self.capacity, width, weights.halves, config.norm == "layernorm"]
        self.sizes = np.array([*numbers, ACTIVATIONS.index(config.activation)], np.int64)

        def scratch(*shape: int) -> np.ndarray:
            return np.zeros((*shape[:-1], ceiling(shape[-1], LANES)), np.float32)

        rows = self.threads, MOST_ROWS
        self.normal = scratch(*rows, config.channels)
        self.gated, self.angles = scratch(*rows, hidden * gated), np.zeros((*rows, size * turned), np.float32)
        self.x, self.y = scratch(MOST_ROWS, config.channels), scratch(MOST_ROWS, heads * size)
        self.qkv = scratch(MOST_ROWS, max((heads + 2 * key_heads) * size, config.channels))
        self.hidden = scratch(MOST_ROWS, hidden * (2 if gated else 1))
        self.scores, self.row = scratch(self.threads, self.capacity), scratch(self.threads, width)

    def _addresses(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the addresses of tensors, a row per block; 0 for those that the model does not have."""
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        blocks = self.weights.config.blocks
        table = np.zeros((blocks + 1, len(TENSORS)), np.int64)
        for block in range(blocks):
            table[block, :-2] = [addresses.get(f"h.{block}.{name}", 0) for name in TENSORS[:-2]]
            table[block, -2:] = self.keys[block].ctypes.data, self.values[block].ctypes.data
        table[blocks, : len(OUTSIDE)] = [addresses.get(name, 0) for name in OUTSIDE]
        return table

    def read(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> np.ndarray:
        """Read tokens, and return the scores of the next token after some of them.

        rows     (text, position, token); positions of a text are consecutive, from the first that is not cached
        wanted   numbers of the rows to score, in order

        Shapes   -> logits (len(wanted), vocabulary) float32
        """
        parts = [self._step(rows, wanted, first) for first in range(0, len(rows), MOST_ROWS)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _step(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int], first: int) -> np.ndarray:
        part = np.array(rows[first : first + MOST_ROWS], np.int64)
        scored = np.array([number - first for number in wanted if 0 <= number - first < len(part)], np.int64)
        scores = np.empty((len(scored), self.weights.config.vocabulary), np.float32)
        n = len(part)
        self.counters[:] = 0
        self.counters[:: 2 * APART] = self.threads
        config, kept = self.weights.config, (self.tensors, self.sizes)
        by_thread, by_row = (self.normal, self.gated, self.angles), (self.qkv[:n], self.y[:n], self.hidden[:n])
        angles = angles_of(config.rope, config.head_channels // 2)
        numbers, last = (angles, config.norm_eps), (self.scores, self.row, scores, self.counters)
        share: Any = partial(decode_step, *kept, part, scored, *numbers, self.x[:n], *by_thread, *by_row, *last)
        # Threads wait for each other; if one were interrupted before it began, the others would wait forever.
        with delayed_interrupts() if self.threads > 1 else nullcontext():
            others = [self.pool.submit(share, thread, self.threads) for thread in range(1, self.threads)]
            share(0, self.threads)
            for other in others:
                other.result()
        return scores


class EagerDecoder:
    """Cached inputs of layers over whole sequences, for several texts and any number of steps of any model.

    In place of `model.tape.Tape`, it runs the forward kernel of each layer at once, on the new tokens of all texts. A
    layer over whole sequences gets each text from its beginning: its input is cached, and its output for earlier
    tokens, which cannot depend on later ones, is computed again and discarded.
    """

    most_rows, threads = 256, 1

    def __init__(self, weights: Weights, texts: int, capacity: int) -> None:
        self.weights, self.texts, self.capacity = weights, texts, capacity
        self.text_of = np.empty(0, np.int32)  # of each token
        self.kept: dict[str, np.ndarray] = {}  # by place: (texts, capacity, channels)

    def __call__(self, where: str, layer: Layer, *arguments: Any, **options: Any) -> np.ndarray:
        """Return the layer's first output."""
        kernel = self.weights.precision.kernel(layer.forward.kernel)
        outputs = kernel(*arguments, **{name: options[name] for name in layer.forward.options.split()})
        result: np.ndarray = outputs[0] if len(layer.outputs.split()) > 1 else outputs
        return result

    def over_sequences(
        self, where: str, layer: Layer, x: np.ndarray, *others: Any, positions: np.ndarray, **options: Any
    ) -> np.ndarray:
        """Return the layer's first output for the new tokens."""
        if where not in self.kept:
            self.kept[where] = np.zeros((self.texts, self.capacity, x.shape[2]), x.dtype)
        kept, parts = self.kept[where], []
        for text in dict.fromkeys(self.text_of.tolist()):
            places = positions[self.text_of == text]
            kept[text, places] = x[0, self.text_of == text]
            parts.append(self(where, layer, kept[text : text + 1, : places[-1] + 1], *others, **options)[:, places])
        return np.concatenate(parts, axis=1)

    def read(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> np.ndarray:
        """Read tokens, and return the scores of the next token after some of them, as `Decoder.read` does."""
        self.text_of, positions, tokens = np.array(rows, np.int32).T
        config, inputs = self.weights.config, {"tokens": tokens[None], "positions": positions}
        scores: np.ndarray = logits(self, config, self.weights.arrays, inputs, list(wanted))
        return scores[0, :, : config.vocabulary].copy()
