"""Layers' kernels called as their rows say, on arrays of odd sizes, and independent formulas of layers."""

from collections.abc import Callable

import numpy as np
import reference_gpt2
from layer_check import random_arguments

from daskgpt.graph.calls import parse
from daskgpt.model import layers
from daskgpt.model.layers import Layer, Row

Arrays = dict[str, np.ndarray]
# Not multiples of a vector's length, so that loops have remainders; T is longer than a block of attention's queries.
SIZES = {"b": 2, "t": 37, "T": 37, "C": 48, "X": 144, "D": 16, "O": 70, "V": 72, "P": 41}
VOCABULARY = 67
OPTIONS = {"heads": 3, "key_heads": 3, "vocabulary": VOCABULARY, "place": 5, "rate": 0.3}
OPTIONS |= {"norm_eps": 0.01, "rope": (100.0, 4.0, 1.0, 4.0, 30.0)}
# Those of chunks take lists of arrays.
LAYERS = [layer for layer in layers.LAYERS if layer not in (layers.GATHER, layers.SPLIT)]


def arrays_of(layer: Layer, dtype: str = "float64") -> Arrays:
    return random_arguments(layer, np.random.default_rng(5), dtype, SIZES)


def result_of(row: Row, arrays: Arrays) -> np.ndarray | tuple[np.ndarray, ...]:
    """What a kernel makes of arrays by their names; a total starts as NaN, so that a sum that reads it shows."""
    given = [arrays[name] for name in row.arguments.split()]
    options = {name: OPTIONS[name] for name in row.options.split()}
    axes = parse(row.signature)[1][0]
    if not {"b", "t"} & set(axes):
        total = np.full([SIZES[axis] for axis in axes], np.nan, given[0].dtype)
        return row.kernel(*given, **options, total=total, accumulate=False)
    return row.kernel(*given, **options)


def results_of(layer: Layer, arrays: Arrays) -> Arrays:
    """Every output of a layer and every gradient, by name; the gradient of the first output is random."""
    outputs = result_of(layer.forward, arrays)
    results = dict(zip(layer.outputs.split(), outputs if isinstance(outputs, tuple) else (outputs,)))
    y = next(iter(results.values()))
    dy = np.random.default_rng(6).standard_normal(y.shape, np.float32)
    known = arrays | results | {"dy": np.asarray(dy, y.dtype)}
    return results | {f"d{name}": result_of(row, known) for name, row in layer.backward.items() if row}


def _losses(x: np.ndarray, wte: np.ndarray, targets: np.ndarray) -> np.ndarray:
    logits = x @ wte[:VOCABULARY].T
    return np.logaddexp.reduce(logits, -1) - np.take_along_axis(logits, targets[..., None].astype(int), -1)[..., 0]


def _turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Queries and keys as complex numbers, multiplied by those of their angles; values as they are."""
    heads = x.reshape(*x.shape[:2], OPTIONS["heads"] + 2 * OPTIONS["key_heads"], -1)
    half = heads.shape[-1] // 2
    base, factor, low, high, length = OPTIONS["rope"]
    frequencies = base ** -(np.arange(half) / half)
    left = np.interp(length * frequencies / (2 * np.pi), [low, high], [1 / factor, 1])
    assert {1 / factor, 1} < set(left)  # all three kinds
    angles = positions[:, None, None] * (frequencies * left)
    pairs = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)
    turned = np.concatenate([pairs.real, pairs.imag], -1)
    turned[:, :, -OPTIONS["key_heads"] :] = heads[:, :, -OPTIONS["key_heads"] :]
    return turned.reshape(x.shape)


def _normalized(x: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray) -> np.ndarray:
    """Heads of queries and keys of length one, but for their weights; values as they are."""
    heads, key_heads = OPTIONS["heads"], OPTIONS["key_heads"]
    q, k, v = np.split(x.reshape(*x.shape[:2], -1, q_norm.size), [heads, heads + key_heads], axis=2)
    q, k = (part / np.sqrt((part**2).mean(-1, keepdims=True) + OPTIONS["norm_eps"]) for part in (q, k))
    return np.concatenate([q * q_norm, k * k_norm, v], 2).reshape(x.shape)


# Of a layer's arguments.
FORMULAS: dict[str, tuple[Layer, Callable[..., np.ndarray]]] = {
    "embedding": (layers.EMBEDDING, lambda tokens, wte, positions, wpe: wte[tokens] + wpe[positions]),
    "layernorm": (layers.LAYERNORM, lambda x, weight, bias: reference_gpt2.layernorm(x, weight, bias)[0]),
    "rmsnorm": (
        layers.RMSNORM,
        lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + OPTIONS["norm_eps"]) * weight,
    ),
    "linear": (layers.LINEAR, lambda x, weight, bias: x @ weight.T + bias),
    "unembedding": (layers.UNEMBEDDING, lambda x, wte: x @ wte.T),
    "gelu": (layers.GELU, reference_gpt2.gelu),
    "swiglu": (layers.SWIGLU, lambda x: x[..., :72] / (1 + np.exp(-x[..., :72])) * x[..., 72:]),
    "relu2": (layers.RELU2, lambda x: np.maximum(x, 0) ** 2),
    "add": (layers.ADD, lambda x, y: x + y),
    "attention": (layers.ATTENTION, lambda qkv: reference_gpt2.attention(qkv, OPTIONS["heads"])[0]),
    "rotary": (layers.ROTARY, _turned),
    "qk_norm": (layers.QK_NORM, _normalized),
    "crossentropy": (layers.CROSSENTROPY, _losses),
    "mean": (layers.MEAN, lambda losses, shares: np.asarray((losses * shares).sum())),
}
