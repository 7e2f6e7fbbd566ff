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
EMBEDDED = "wte+wpe"
DROPPED = ("attn", "attn.c_proj", "mlp.c_proj")  # where dropout is in a block, in an order that seeds depend on


def transformer(tape: Tape, config: GPT2Config, p: Parameters, inputs: Inputs, rate: float = 0.0) -> da.Array:
    """Activations after the last layernorm, (B, T, C) in the chunks of the tokens.

    rate   share that dropout takes of the embeddings, of attention's probabilities, and of what is added to the
           embeddings; where it is not 0, the inputs have `streams`
    """
    tokens, positions = inputs["tokens"], inputs["positions"]
    x = tape(EMBEDDED, layers.EMBEDDING, tokens, p["wte.weight"], positions, p["wpe.weight"])
    x = drop(tape, EMBEDDED, x, inputs, rate)
    for number in range(config.blocks):
        x = block(tape, config, p, f"h.{number}", x, inputs, rate)
    return normalise(tape, config, p, "ln_f", x)


def block(
    tape: Tape, config: GPT2Config, p: Parameters, at: str, x: da.Array, inputs: Inputs, rate: float = 0.0
) -> da.Array:
    """One transformer block: x + attention(layernorm(x)), then x + feed_forward(layernorm(x))."""
    qkv = linear(tape, p, f"{at}.attn.c_attn", normalise(tape, config, p, f"{at}.ln_1", x))
    y = attend(tape, config, f"{at}.attn", qkv, inputs, rate)
    y = linear(tape, p, f"{at}.attn.c_proj", y)
    x = tape(f"{at}.attn", layers.ADD, x, drop(tape, f"{at}.attn.c_proj", y, inputs, rate))
    hidden = linear(tape, p, f"{at}.mlp.c_fc", normalise(tape, config, p, f"{at}.ln_2", x))
    hidden = tape(f"{at}.mlp", layers.GELU, hidden)
    y = linear(tape, p, f"{at}.mlp.c_proj", hidden)
    return tape(f"{at}.mlp", layers.ADD, x, drop(tape, f"{at}.mlp.c_proj", y, inputs, rate))


def drop(tape: Tape, at: str, x: da.Array, inputs: Inputs, rate: float) -> da.Array:
    """x after dropout; x itself where nothing is dropped."""
    if not rate:
        return x
    return tape(at, layers.DROPOUT, x, inputs["streams"], inputs["positions"], place=place_of(at), rate=rate)


def place_of(at: str) -> int:
    """The number by which what is dropped at a place of the model differs from what is dropped at others."""
    if at == EMBEDDED:
        return 0
    _, block_number, part = at.split(".", 2)
    return 1 + len(DROPPED) * int(block_number) + DROPPED.index(part)


def attend(tape: Tape, config: GPT2Config, at: str, qkv: da.Array, inputs: Inputs, rate: float = 0.0) -> da.Array:
    """Attention over whole sequences: the one place where the token chunks of a sequence meet."""

    def attention(whole: da.Array) -> da.Array:
        if not rate:
            return tape(at, layers.ATTENTION, whole, heads=config.heads)
        options = {"heads": config.heads, "place": place_of(at), "rate": rate}
        return tape(at, layers.DROPPED_ATTENTION, whole, inputs["streams"], **options)

    if qkv.numblocks[1] == 1:
        return attention(qkv)
    whole = tape(f"{at}.qkv", layers.GATHER, qkv, inputs["positions"])
    return tape(f"{at}.y", layers.SPLIT, attention(whole), inputs["positions"])


def normalise(tape: Tape, config: GPT2Config, p: Parameters, at: str, x: da.Array) -> da.Array:
    layer = layers.NORMS[config.norm]
    return tape(at, layer, x, *(p[f"{at}.{name}"] for name in layer.forward.arguments.split()[1:]))


def linear(tape: Tape, p: Parameters, at: str, x: da.Array) -> da.Array:
    return tape(at, layers.LINEAR, x, p[f"{at}.weight"], p[f"{at}.bias"])


def mean_loss(
    tape: Tape, config: GPT2Config, p: Parameters, inputs: Inputs, rate: float = 0.0, count: int = 0
) -> da.Array:
    """Mean cross-entropy of the next token over B*T, a 0-d array, in nats.

    rate    of dropout, see `transformer`
    count   of tokens that it is the mean over, where these are some of a batch; 0 = these
    """
    tokens, targets = inputs["tokens"], inputs["targets"]
    check_tokens(config, tokens, targets)
    x = transformer(tape, config, p, inputs, rate)
    losses = tape("losses", layers.CROSSENTROPY, x, p["wte.weight"], targets, vocabulary=config.vocabulary)
    return tape("loss", layers.MEAN, losses, count=count or tokens.size)


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
