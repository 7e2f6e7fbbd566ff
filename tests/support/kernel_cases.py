"""Cases for the tests of kernels: every layer's kernels with an independent float64 formula."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference_gpt2

from daskgpt.kernels import add, attention, crossentropy, embedding, gelu, layernorm, linear, rmsnorm

Arrays = dict[str, np.ndarray]
# Not multiples of a vector's length, so that loops have remainders; T is longer than a block of attention's queries.
B, T, C, HEADS, OUTPUTS, VOCABULARY, PADDED, POSITIONS = 2, 37, 48, 3, 70, 67, 72, 41


def summed(kernel: Callable[..., np.ndarray], like: np.ndarray, *arguments: Any) -> np.ndarray:
    """A summing kernel's sum; the total starts as NaN, so a sum that reads it shows."""
    return kernel(*arguments, total=np.full(like.shape, np.nan, like.dtype), accumulate=False)


@dataclass(frozen=True)
class Case:
    """One layer: `forward` and `reference` take all arrays; a gradient takes dy and all arrays."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    forward: Callable[[Arrays], np.ndarray]
    reference: Callable[[Arrays], np.ndarray]
    gradients: dict[str, Callable[[np.ndarray, Arrays], np.ndarray]]
    indices: dict[str, int] = field(default_factory=dict)

    def arrays(self, dtype: str = "float64") -> Arrays:
        random = np.random.default_rng(5)
        made = {name: random.normal(size=shape).astype(dtype) for name, shape in self.shapes.items()}
        for name, end in self.indices.items():
            made[name] = random.integers(0, end, self.shapes[name]).astype(np.int32)
        return made

    def dy(self, y: np.ndarray) -> np.ndarray:
        return np.random.default_rng(6).normal(size=y.shape).astype(y.dtype)

    def __str__(self) -> str:
        return self.name


def _losses(a: Arrays) -> np.ndarray:
    logits = a["x"] @ a["wte"][:VOCABULARY].T
    return np.logaddexp.reduce(logits, -1) - np.take_along_axis(logits, a["targets"][..., None].astype(int), -1)[..., 0]


def _attention_backward(dy: np.ndarray, a: Arrays) -> np.ndarray:
    return attention.backward(dy, a["qkv"], *attention.forward(a["qkv"], heads=HEADS), heads=HEADS)


def _dlogits(a: Arrays) -> np.ndarray:
    return crossentropy.forward(a["x"], a["wte"], a["targets"], VOCABULARY)[1]


CASES = (
    Case(
        "embedding",
        {"tokens": (B, T), "wte": (PADDED, C), "positions": (T,), "wpe": (POSITIONS, C)},
        lambda a: embedding.forward(a["tokens"], a["wte"], a["positions"], a["wpe"]),
        lambda a: a["wte"][a["tokens"]] + a["wpe"][a["positions"]],
        {
            "wte": lambda dy, a: summed(embedding.backward_wte, a["wte"], dy, a["tokens"]),
            "wpe": lambda dy, a: summed(embedding.backward_wpe, a["wpe"], dy, a["positions"]),
        },
        {"tokens": VOCABULARY, "positions": POSITIONS},
    ),
    Case(
        "layernorm",
        {"x": (B, T, C), "weight": (C,), "bias": (C,)},
        lambda a: layernorm.forward(a["x"], a["weight"], a["bias"]),
        lambda a: reference_gpt2.layernorm(a["x"], a["weight"], a["bias"])[0],
        {
            "x": lambda dy, a: layernorm.backward_x(dy, a["x"], a["weight"]),
            "weight": lambda dy, a: summed(layernorm.backward_weight, a["weight"], dy, a["x"]),
            "bias": lambda dy, a: summed(linear.backward_bias, a["bias"], dy),
        },
    ),
    Case(
        "rmsnorm",
        {"x": (B, T, C), "weight": (C,)},
        lambda a: rmsnorm.forward(a["x"], a["weight"]),
        lambda a: a["x"] / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + 1e-5) * a["weight"],
        {
            "x": lambda dy, a: rmsnorm.backward_x(dy, a["x"], a["weight"]),
            "weight": lambda dy, a: summed(rmsnorm.backward_weight, a["weight"], dy, a["x"]),
        },
    ),
    Case(
        "linear",
        {"x": (B, T, C), "weight": (OUTPUTS, C), "bias": (OUTPUTS,)},
        lambda a: linear.forward(a["x"], a["weight"], a["bias"]),
        lambda a: a["x"] @ a["weight"].T + a["bias"],
        {
            "x": lambda dy, a: linear.backward_x(dy, a["weight"]),
            "weight": lambda dy, a: summed(linear.backward_weight, a["weight"], dy, a["x"]),
            "bias": lambda dy, a: summed(linear.backward_bias, a["bias"], dy),
        },
    ),
    Case(
        "unembedding",
        {"x": (B, T, C), "wte": (PADDED, C)},
        lambda a: linear.forward(a["x"], a["wte"]),
        lambda a: a["x"] @ a["wte"].T,
        {
            "x": lambda dy, a: linear.backward_x(dy, a["wte"]),
            "wte": lambda dy, a: summed(linear.backward_weight, a["wte"], dy, a["x"]),
        },
    ),
    Case(
        "gelu",
        {"x": (B, T, C)},
        lambda a: gelu.forward(a["x"]),
        lambda a: reference_gpt2.gelu(a["x"]),
        {"x": lambda dy, a: gelu.backward(dy, a["x"])},
    ),
    Case("add", {"x": (B, T, C), "y": (B, T, C)}, lambda a: add.forward(a["x"], a["y"]), lambda a: a["x"] + a["y"], {}),
    Case(
        "attention",
        {"qkv": (B, T, 3 * C)},
        lambda a: attention.forward(a["qkv"], heads=HEADS)[0],
        lambda a: reference_gpt2.attention(a["qkv"], HEADS)[0],
        {"qkv": _attention_backward},
    ),
    Case(
        "crossentropy",
        {"x": (B, T, C), "wte": (PADDED, C), "targets": (B, T)},
        lambda a: crossentropy.forward(a["x"], a["wte"], a["targets"], VOCABULARY)[0],
        _losses,
        {
            "x": lambda dy, a: crossentropy.backward_x(dy, _dlogits(a), a["wte"]),
            "wte": lambda dy, a: summed(crossentropy.backward_wte, a["wte"], dy, _dlogits(a), a["x"]),
        },
        {"targets": VOCABULARY},
    ),
    Case(
        "mean",
        {"losses": (B, T), "shares": (B, T)},
        lambda a: summed(crossentropy.mean_forward, a["losses"].max(), a["losses"], a["shares"]),
        lambda a: np.asarray((a["losses"] * a["shares"]).sum()),
        {"losses": lambda dy, a: crossentropy.mean_backward(dy, a["losses"], a["shares"])},
    ),
)
GRADIENTS = [(case, name) for case in CASES for name in case.gradients]
