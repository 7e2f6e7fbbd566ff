"""GPT-2, as it is drawn: embedding, blocks of attention and feed-forward on a residual stream, cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping

import dask.array as da
import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.graph.nodes import from_numpy
from daskgpt.model import layers
from daskgpt.model.tape import Tape

Parameters = Mapping[str, da.Array]


def transformer(tape: Tape, config: GPT2Config, p: Parameters, tokens: da.Array) -> da.Array:
    """Activations after the last layernorm, (B, T, C) in the chunks of `tokens`."""
    positions = position_array(tape, tokens)
    x = tape("wte+wpe", layers.EMBEDDING, tokens, p["wte.weight"], positions, p["wpe.weight"])
    for number in range(config.blocks):
        x = block(tape, config, p, f"h.{number}", x, positions)
    return normalise(tape, p, "ln_f", x)


def block(tape: Tape, config: GPT2Config, p: Parameters, at: str, x: da.Array, positions: da.Array) -> da.Array:
    """One transformer block: x + attention(layernorm(x)), then x + feed_forward(layernorm(x))."""
    qkv = linear(tape, p, f"{at}.attn.c_attn", normalise(tape, p, f"{at}.ln_1", x))
    y = attend(tape, config, f"{at}.attn", qkv, positions)
    x = tape(f"{at}.attn", layers.ADD, x, linear(tape, p, f"{at}.attn.c_proj", y))
    hidden = linear(tape, p, f"{at}.mlp.c_fc", normalise(tape, p, f"{at}.ln_2", x))
    hidden = tape(f"{at}.mlp", layers.GELU, hidden)
    return tape(f"{at}.mlp", layers.ADD, x, linear(tape, p, f"{at}.mlp.c_proj", hidden))


def attend(tape: Tape, config: GPT2Config, at: str, qkv: da.Array, positions: da.Array) -> da.Array:
    """Attention over whole sequences: the one place where the token chunks of a sequence meet."""
    if qkv.numblocks[1] == 1:
        return tape(at, layers.ATTENTION, qkv, heads=config.heads)
    whole = tape(f"{at}.qkv", layers.GATHER, qkv, positions)
    return tape(f"{at}.y", layers.SPLIT, tape(at, layers.ATTENTION, whole, heads=config.heads), positions)


def normalise(tape: Tape, p: Parameters, at: str, x: da.Array) -> da.Array:
    return tape(at, layers.LAYERNORM, x, p[f"{at}.weight"], p[f"{at}.bias"])


def linear(tape: Tape, p: Parameters, at: str, x: da.Array) -> da.Array:
    return tape(at, layers.LINEAR, x, p[f"{at}.weight"], p[f"{at}.bias"])


def mean_loss(tape: Tape, config: GPT2Config, p: Parameters, tokens: da.Array, targets: da.Array) -> da.Array:
    """Mean cross-entropy of the next token over B*T, a 0-d array, in nats."""
    check_tokens(config, tokens, targets)
    x = transformer(tape, config, p, tokens)
    losses = tape("losses.0", layers.CROSSENTROPY, x, p["wte.weight"], targets, vocabulary=config.vocabulary)
    return tape("loss.0", layers.MEAN, losses, count=tokens.size)


def logits(tape: Tape, config: GPT2Config, p: Parameters, tokens: da.Array) -> da.Array:
    """Scores of every row of the padded vocabulary, (B, T, V) in the chunks of `tokens`."""
    return tape("logits.0", layers.UNEMBEDDING, transformer(tape, config, p, tokens), p["wte.weight"])


def position_array(tape: Tape, tokens: da.Array) -> da.Array:
    """0 .. T-1 in the token chunks: how a chunk knows where in the sequence it stands."""
    return from_numpy(f"positions-{tape.token}", np.arange(tokens.shape[1], dtype=np.int32), (tokens.chunks[1],))


def check_tokens(config: GPT2Config, tokens: da.Array, targets: da.Array) -> None:
    """Tokens and targets must be alike and fit the model's positions."""
    require(
        tokens.ndim == 2 and tokens.chunks == targets.chunks,
        "loss",
        "tokens and targets must be (B, T) in the same chunks",
        {"tokens": tokens.chunks, "targets": targets.chunks},
        "Rechunk one of them.",
    )
    require(
        tokens.shape[1] <= config.positions,
        "loss",
        "a sequence must not be longer than the model's positions",
        {"sequence_length": tokens.shape[1], "positions": config.positions},
        "Shorten the sequence or use a model with more positions.",
    )
