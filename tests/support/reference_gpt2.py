"""GPT-2 in plain NumPy float64, written after the textbook: forward, and every derivative by hand.

An independent program to compare with: it shares nothing with the package but the tensors' published names, keeps
every intermediate result (the attention matrix and the logits too), and knows neither chunks nor tasks.

Sources  Radford et al. 2019 (the model); Vaswani et al. 2017 (attention); Ba et al. 2016 (layernorm); Hendrycks and
         Gimpel 2016 (GELU, its tanh form)
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = dict[str, Array]
EPSILON = 1e-5  # of layernorm


@dataclass(frozen=True)
class Expected:
    """Logits (B, T, V) of the whole padded vocabulary, mean loss in nats, a gradient a tensor; float64."""

    logits: Array
    loss: float
    gradients: Arrays


def expected(
    parameters: Arrays,
    tokens: Array,
    targets: Array,
    heads: int,
    vocabulary: int,
    factors: Arrays | None = None,
    counted: Array | None = None,
) -> Expected:
    """Return the results of a model for a batch.

    factors      of dropout, by the place: "wte+wpe", "h.0.attn" (of probabilities), "h.0.attn.c_proj", ...
    counted      which targets count in the mean, (B, T); None = all
    vocabulary   ids that can occur: rows of wte from there on are padding, without probability

    Shapes       tokens, targets (B, T); matrices are (out, in)
    """
    p = {name: value.astype(np.float64) for name, value in parameters.items()}
    length = tokens.shape[1]
    f = defaultdict(lambda: np.float64(1), factors or {})
    x = (p["wte.weight"][tokens] + p["wpe.weight"][:length]) * f["wte+wpe"]
    kept = []
    while f"h.{len(kept)}.ln_1.weight" in p:
        x, saved = _block(p, f, f"h.{len(kept)}", x, heads)
        kept.append(saved)
    last, normed = layernorm(x, p["ln_f.weight"], p["ln_f.bias"])
    logits = last @ p["wte.weight"].T

    shifted = logits[..., :vocabulary] - logits[..., :vocabulary].max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    chosen = targets[..., None].astype(int)
    counted = np.ones(tokens.shape, bool) if counted is None else counted
    loss = -np.take_along_axis(log_probabilities, chosen, -1)[counted].mean()

    # Back from the loss: probabilities minus the one that was right, shared by all tokens.
    d_logits = np.zeros_like(logits)
    d_logits[..., :vocabulary] = np.exp(log_probabilities)
    np.put_along_axis(d_logits, chosen, np.take_along_axis(d_logits, chosen, -1) - 1, -1)
    d_logits *= counted[..., None] / counted.sum()
    g: Arrays = {"wte.weight": np.einsum("btv,btc->vc", d_logits, last)}
    dx = _layernorm_backward(g, "ln_f", d_logits @ p["wte.weight"], normed, p["ln_f.weight"])
    for number in reversed(range(len(kept))):
        dx = _block_backward(g, p, f, f"h.{number}", dx, kept[number])
    dx = dx * f["wte+wpe"]
    np.add.at(g["wte.weight"], tokens, dx)
    g["wpe.weight"] = np.zeros_like(p["wpe.weight"])
    g["wpe.weight"][:length] = dx.sum(0)
    return Expected(logits, float(loss), g)


def _block(p: Arrays, f: Arrays, at: str, x: Array, heads: int) -> tuple[Array, dict[str, Any]]:
    s: dict[str, Any] = {}
    s["y1"], s["normed1"] = layernorm(x, p[f"{at}.ln_1.weight"], p[f"{at}.ln_1.bias"])
    qkv = s["y1"] @ p[f"{at}.attn.c_attn.weight"].T + p[f"{at}.attn.c_attn.bias"]
    s["mixed"], _, s["attention"] = attention(qkv, heads, f[f"{at}.attn"])
    y = s["mixed"] @ p[f"{at}.attn.c_proj.weight"].T + p[f"{at}.attn.c_proj.bias"]
    x = x + y * f[f"{at}.attn.c_proj"]
    s["y2"], s["normed2"] = layernorm(x, p[f"{at}.ln_2.weight"], p[f"{at}.ln_2.bias"])
    s["hidden"] = s["y2"] @ p[f"{at}.mlp.c_fc.weight"].T + p[f"{at}.mlp.c_fc.bias"]
    s["active"] = gelu(s["hidden"])
    y = s["active"] @ p[f"{at}.mlp.c_proj.weight"].T + p[f"{at}.mlp.c_proj.bias"]
    return x + y * f[f"{at}.mlp.c_proj"], s


def _block_backward(g: Arrays, p: Arrays, f: Arrays, at: str, dx: Array, s: dict[str, Any]) -> Array:
    """The gradient of the block's input; those of its tensors go into g."""
    d_active = _linear_backward(g, p, f"{at}.mlp.c_proj", dx * f[f"{at}.mlp.c_proj"], s["active"])
    d_y2 = _linear_backward(g, p, f"{at}.mlp.c_fc", d_active * _gelu_slope(s["hidden"]), s["y2"])
    dx = dx + _layernorm_backward(g, f"{at}.ln_2", d_y2, s["normed2"], p[f"{at}.ln_2.weight"])
    d_mixed = _linear_backward(g, p, f"{at}.attn.c_proj", dx * f[f"{at}.attn.c_proj"], s["mixed"])
    d_y1 = _linear_backward(g, p, f"{at}.attn.c_attn", attention_backward(d_mixed, s["attention"]), s["y1"])
    return dx + _layernorm_backward(g, f"{at}.ln_1", d_y1, s["normed1"], p[f"{at}.ln_1.weight"])


def _linear_backward(g: Arrays, p: Arrays, name: str, dy: Array, x: Array) -> Array:
    g[f"{name}.weight"] = np.einsum("bto,btc->oc", dy, x)
    g[f"{name}.bias"] = dy.sum((0, 1))
    return dy @ p[f"{name}.weight"]


def layernorm(x: Array, weight: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    centred = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return centred * rstd * weight + bias, (centred * rstd, rstd)


def _layernorm_backward(g: Arrays, name: str, dy: Array, normed: tuple[Array, ...], weight: Array) -> Array:
    unit, rstd = normed
    g[f"{name}.weight"], g[f"{name}.bias"] = (dy * unit).sum((0, 1)), dy.sum((0, 1))
    d_unit = dy * weight
    along = (d_unit * unit).mean(-1, keepdims=True)
    return rstd * (d_unit - d_unit.mean(-1, keepdims=True) - unit * along)


def attention(qkv: Array, heads: int, factors: Array | int = 1) -> tuple[Array, Array, tuple[Any, ...]]:
    """y, the logarithm of each row's sum of exponentials, and what the gradient needs, in the dtype of qkv.

    factors   of dropout, (B, NH, T, T) or 1
    """
    batch, length, width = qkv.shape
    # (3, B, heads, T, head size)
    q, k, v = qkv.reshape(batch, length, 3, heads, width // 3 // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
    scores = np.where(np.arange(length)[:, None] >= np.arange(length), scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    mixed = (weights * factors @ v).transpose(0, 2, 1, 3)
    return mixed.reshape(batch, length, -1), (largest + np.log(total))[..., 0], (q, k, v, weights, factors)


def attention_backward(dy: Array, kept: tuple[Any, ...]) -> Array:
    """The gradient of queries, keys and values."""
    q, k, v, weights, factors = kept
    batch, heads, length, _ = q.shape
    d_mixed = dy.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
    d_weights = d_mixed @ v.swapaxes(2, 3) * factors
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    d_q, d_k, d_v = d_scores @ k, d_scores.swapaxes(2, 3) @ q, (weights * factors).swapaxes(2, 3) @ d_mixed
    return np.stack([d_q, d_k, d_v]).transpose(1, 3, 0, 2, 4).reshape(batch, length, -1)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gelu_slope(x: Array) -> Array:
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    d_inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2) * d_inner
