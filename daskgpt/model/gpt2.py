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
Inputs = Mapping[str, da.Array]  # of a step: tokens, targets, positions ...


def transformer(tape: Tape, config: GPT2Config, p: Parameters, inputs: Inputs) -> da.Array:
    """Activations after the last layernorm, (B, T, C) in the chunks of the tokens."""
    tokens, positions = inputs["tokens"], inputs["positions"]
    x = tape("wte+wpe", layers.EMBEDDING, tokens, p["wte.weight"], positions, p["wpe.weight"])
    for number in range(config.blocks):
        x = block(tape, config, p, f"h.{number}", x, positions)
    return normalise(tape, config, p, "ln_f", x)


def block(tape: Tape, config: GPT2Config, p: Parameters, at: str, x: da.Array, positions: da.Array) -> da.Array:
    """One transformer block: x + attention(layernorm(x)), then x + feed_forward(layernorm(x))."""
    qkv = linear(tape, p, f"{at}.attn.c_attn", normalise(tape, config, p, f"{at}.ln_1", x))
    y = attend(tape, config, f"{at}.attn", qkv, positions)
    x = tape(f"{at}.attn", layers.ADD, x, linear(tape, p, f"{at}.attn.c_proj", y))
    hidden = linear(tape, p, f"{at}.mlp.c_fc", normalise(tape, config, p, f"{at}.ln_2", x))
    hidden = tape(f"{at}.mlp", layers.GELU, hidden)
    return tape(f"{at}.mlp", layers.ADD, x, linear(tape, p, f"{at}.mlp.c_proj", hidden))


def attend(tape: Tape, config: GPT2Config, at: str, qkv: da.Array, positions: da.Array) -> da.Array:
    """Attention over whole sequences: the one place where the token chunks of a sequence meet."""
    if qkv.numblocks[1] == 1:
        return tape(at, layers.ATTENTION, qkv, heads=config.heads)
    whole = tape(f"{at}.qkv", layers.GATHER, qkv, positions)
    return tape(f"{at}.y", layers.SPLIT, tape(at, layers.ATTENTION, whole, heads=config.heads), positions)


def normalise(tape: Tape, config: GPT2Config, p: Parameters, at: str, x: da.Array) -> da.Array:
    layer = layers.NORMS[config.norm]
    return tape(at, layer, x, *(p[f"{at}.{name}"] for name in layer.forward.arguments.split()[1:]))


def linear(tape: Tape, p: Parameters, at: str, x: da.Array) -> da.Array:
    return tape(at, layers.LINEAR, x, p[f"{at}.weight"], p[f"{at}.bias"])


def mean_loss(tape: Tape, config: GPT2Config, p: Parameters, inputs: Inputs) -> da.Array:
    """Mean cross-entropy of the next token over B*T, a 0-d array, in nats."""
    tokens, targets = inputs["tokens"], inputs["targets"]
    check_tokens(config, tokens, targets)
    x = transformer(tape, config, p, inputs)
    losses = tape("losses", layers.CROSSENTROPY, x, p["wte.weight"], targets, vocabulary=config.vocabulary)
    return tape("loss", layers.MEAN, losses, count=tokens.size)


def logits(tape: Tape, config: GPT2Config, p: Parameters, inputs: Inputs) -> da.Array:
    """Scores of every row of the padded vocabulary, (B, T, V) in the chunks of the tokens."""
    return tape("logits", layers.UNEMBEDDING, transformer(tape, config, p, inputs), p["wte.weight"])


def lazy_inputs(tape: Tape, tokens: da.Array, targets: da.Array | None = None) -> Inputs:
    """The inputs of somebody's own dask arrays."""
    positions = np.arange(tokens.shape[1], dtype=np.int32)
    inputs = {"tokens": tokens, "positions": from_numpy(f"positions-{tape.token}", positions, (tokens.chunks[1],))}
    return inputs | ({} if targets is None else {"targets": targets})


def check_tokens(config: GPT2Config, tokens: da.Array, targets: da.Array) -> None:
    """Tokens and targets must be alike and fit the model's positions."""
    rule = "tokens and targets must be (B, T) in the same chunks"
    got = {"tokens": tokens.chunks, "targets": targets.chunks}
    require(tokens.ndim == 2 and tokens.chunks == targets.chunks, "loss", rule, got, "Rechunk one of them.")
    rule, length = "a sequence must not be longer than the model's positions", tokens.shape[1]
    got = {"sequence_length": length, "positions": config.positions}
    advice = "Shorten the sequence or use a model with more positions."
    require(length <= config.positions, "loss", rule, got, advice)
