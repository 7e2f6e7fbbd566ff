"""The model: embedding, blocks of attention and feed-forward on a residual stream, cross-entropy.

Training, validation, generation and evaluation all derive from `transformer` and `block`. The configuration chooses the
rows of `model.layers` (GPT-2's by default), and `model.parameters` has the tensors that exist then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.model import ModelConfig
from daskgpt.graph.nodes import from_numpy
from daskgpt.model import layers
from daskgpt.model.layers import Layer, chosen
from daskgpt.model.tape import Tape

Parameters = Mapping[str, Any]
Inputs = Mapping[str, Any]  # names of a step's inputs: tokens, targets, positions ...
EMBEDDED = "wte+wpe"
DROPPED = ("attn", "attn.c_proj", "mlp.c_proj")  # places of dropout in a block, in an order that seeds depend on


@dataclass(frozen=True)
class Forward:
    """A forward pass, which calls layers at their places in the model and looks up their other arguments.

    tape     object that calls a layer: `model.tape.Tape` records the call, `generation.decoder.EagerDecoder` runs it
    inputs   inputs of a batch, with `streams` unless the rate is 0
    rate     share of the embeddings, attention's probabilities and the blocks' outputs that dropout sets to 0
    """

    tape: Any
    config: ModelConfig
    parameters: Parameters
    inputs: Inputs
    rate: float = 0.0

    def __call__(self, at: str, layer: Layer, *arrays: Any, **options: Any) -> Any:
        """Return the layer's first output at a place of the model.

        Arguments beyond `arrays` are looked up by their names among the inputs, the parameters of that place (`weight`
        is `AT.weight`, `q_norm` is `AT.q_norm.weight`) and those of the model (`wte` is `wte.weight`). Options are
        `rate`, `place`, or fields of the configuration.
        """
        whole = layer.forward.signature.startswith("bT")
        if self.rate and whole:
            rule, advice = "with dropout a layer of whole sequences must have a row `dropped`", "Train without dropout."
            require(layer.dropped is not None, at, rule, {"layer": layer.name}, advice)
            layer = layer.dropped or layer
        row = layer.forward
        arrays += tuple(self._argument(at, layer, name) for name in row.arguments.split()[len(arrays) :])
        texts = [row.options, *(gradient.options for gradient in layer.backward.values() if gradient)]
        names = set(" ".join(texts).split()) - options.keys()
        options |= {name: self._option(at, name) for name in sorted(names)}
        if whole:  # the only place where the tokens of a sequence are mixed
            return self.tape.over_sequences(at, layer, *arrays, positions=self.inputs["positions"], **options)
        return self.tape(at, layer, *arrays, **options)

    def _argument(self, at: str, layer: Layer, name: str) -> Any:
        if name in self.inputs:
            return self.inputs[name]
        for key in (f"{at}.{name}", f"{at}.{name}.weight", f"{name}.weight"):
            if key in self.parameters:
                return self.parameters[key]
        rule = f"an argument of {layer.name} must be an input or a parameter"
        advice = "Name arguments after the parameters of their place, or after the inputs of a step."
        raise refusal(ValueError, at, rule, {"argument": name}, advice)

    def _option(self, at: str, name: str) -> Any:
        if name == "rate":
            return self.rate
        if name == "place" and at.endswith((EMBEDDED, *DROPPED)):
            return place_of(at)
        rule = "an option must be rate, place where something is dropped, or a field of the configuration"
        require(hasattr(self.config, name), at, rule, {"option": name}, "Put constants into the kernel.")
        return getattr(self.config, name)

    def normalize(self, at: str, x: Any) -> Any:
        """Return x normalized."""
        return self(at, chosen(self.config, "norm"), x)

    def linear(self, at: str, x: Any) -> Any:
        """Return x after a linear layer, with its bias and its adapter if the model has them."""
        y = self(at, layers.LINEAR if f"{at}.bias" in self.parameters else layers.UNBIASED, x)
        if not self.config.lora:
            return y
        low = self(f"{at}.lora_a", layers.UNBIASED, x)
        return self(f"{at}.lora", layers.ADD, y, self(f"{at}.lora_b", layers.UNBIASED, low))

    def drop(self, at: str, x: Any) -> Any:
        """Return x after dropout; x itself if nothing is dropped."""
        return self(at, layers.DROPOUT, x) if self.rate else x


def transformer(forward: Forward) -> Any:
    """Return the activations after the last normalization, (B, T, C) in the chunks of the tokens."""
    embedding = layers.EMBEDDING if forward.config.position == "learned" else layers.TOKEN_EMBEDDING
    x = forward.drop(EMBEDDED, forward(EMBEDDED, embedding))
    for number in range(forward.config.blocks):
        x = block(forward, f"h.{number}", x)
    return forward.normalize("ln_f", x)


def block(forward: Forward, at: str, x: Any) -> Any:
    """Return x after a transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""
    config = forward.config
    qkv = forward.linear(f"{at}.attn.c_attn", forward.normalize(f"{at}.ln_1", x))
    if config.qk_norm != "none":
        qkv = forward(f"{at}.attn", layers.QK_NORM, qkv)
    if config.position != "learned":
        qkv = forward(f"{at}.attn", chosen(config, "position"), qkv)
    y = forward.linear(f"{at}.attn.c_proj", forward(f"{at}.attn", chosen(config, "attention"), qkv))
    x = forward(f"{at}.attn", layers.ADD, x, forward.drop(f"{at}.attn.c_proj", y))
    hidden = forward.linear(f"{at}.mlp.c_fc", forward.normalize(f"{at}.ln_2", x))
    y = forward.linear(f"{at}.mlp.c_proj", forward(f"{at}.mlp", chosen(config, "activation"), hidden))
    return forward(f"{at}.mlp", layers.ADD, x, forward.drop(f"{at}.mlp.c_proj", y))


def place_of(at: str) -> int:
    """Return the number of a place in the model, which distinguishes its random numbers."""
    if at == EMBEDDED:
        return 0
    _, block_number, part = at.split(".", 2)
    return 1 + len(DROPPED) * int(block_number) + DROPPED.index(part)


def mean_loss(tape: Tape, config: ModelConfig, p: Parameters, inputs: Inputs, rate: float = 0.0) -> da.Array:
    """Return the mean cross-entropy of the next token, a 0-d array, in nats: the sum of all losses times `shares`.

    rate    rate of dropout, see `Forward`
    """
    check_tokens(config, inputs["tokens"], inputs["targets"])
    forward = Forward(tape, config, p, inputs, rate)
    head = layers.CROSSENTROPY if config.head == "tied" else layers.UNTIED_CROSSENTROPY
    losses = forward("losses", head, transformer(forward))
    return forward("loss", layers.MEAN, losses)


def logits(tape: Any, config: ModelConfig, p: Parameters, inputs: Inputs, rows: Any = slice(None)) -> Any:
    """Return the scores of every row of the padded vocabulary, (B, T, V) in the chunks of the tokens.

    rows   the tokens that are scored
    """
    forward = Forward(tape, config, p, inputs)
    head = layers.UNEMBEDDING if config.head == "tied" else layers.UNTIED_UNEMBEDDING
    return forward("logits", head, transformer(forward)[:, rows])


def lazy_inputs(tape: Tape, tokens: da.Array, targets: da.Array) -> Inputs:
    """Return the inputs of a step from dask arrays of tokens and targets."""
    positions = np.arange(tokens.shape[1], dtype=np.int32)
    shares = np.full(tokens.shape, 1 / tokens.size)
    inputs = {"tokens": tokens, "targets": targets, "shares": from_numpy(f"shares-{tape.token}", shares, tokens.chunks)}
    return inputs | {"positions": from_numpy(f"positions-{tape.token}", positions, (tokens.chunks[1],))}


def check_tokens(config: ModelConfig, tokens: da.Array, targets: da.Array) -> None:
    """Check that tokens and targets have the same chunks and fit the model's positions."""
    rule = "tokens and targets must be (B, T), not empty, in the same chunks"
    got = {"tokens": tokens.chunks, "targets": targets.chunks}
    fits = tokens.ndim == 2 and tokens.size > 0 and tokens.chunks == targets.chunks
    require(fits, "loss", rule, got, "Rechunk one of them.")
    rule, length = "a sequence must not be longer than the model's positions", tokens.shape[1]
    got = {"sequence_length": length, "positions": config.positions}
    advice = "Shorten the sequence or use a model with more positions."
    require(length <= config.positions, "loss", rule, got, advice)
