"""TABLE 2: the layers as data: one forward kernel, and one backward kernel per argument, with signatures.

A signature lists the axes of each array, one letter per axis. *Lower case = cut into chunks, upper case = whole*:
b t h (sequences, tokens, parts of the heads), T C X D O V P H (DESIGN.md, "Glossary"). Two rules follow from them:

    an output without b and t    is a sum over the batch, sequence by sequence (weight gradients, the mean loss)
    an output T where inputs     gathers the chunks of t: the kernel gets a list of them
    have t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.model import ModelConfig
from daskgpt.config.settings import row_of
from daskgpt.kernels import attention, crossentropy, dropout, elementwise, embedding, linear, norms, rotary

Sizes = Mapping[str, int]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A kernel with the axes of its arrays, the names of these arrays, and the names of its options."""

    kernel: Callable[..., Any]
    signature: str
    arguments: str
    options: str = ""


@dataclass(frozen=True)
class Layer:
    """One layer: `outputs` names the results of forward; the first goes to the next layer, the others to backward.

    backward   argument -> row of its gradient, whose arrays are among "dy", the arguments of forward and its outputs;
               PASS if the gradient is dy itself. Arguments that are left out have no gradient.
    new_axes   sizes of axes that occur in an output but in no argument
    cheap      whether the first output is computed again in backward instead of being kept
    dropped    the layer that replaces this one in training with dropout, if that is another one
    widens     for an activation: channels of its input per channel of its output
    """

    name: str
    forward: Row
    outputs: str = "y"
    backward: Mapping[str, Row | None] = field(default_factory=dict)
    new_axes: Callable[[Sizes, Options], Sizes] = field(default=lambda sizes, options: {})
    cheap: bool = False
    dropped: Layer | None = None
    widens: int = 1

    def __post_init__(self) -> None:
        """Errors   TypeError for the name of a message, or rows whose signatures and names do not fit each other"""
        fits, rule = self.name.partition(".")[0] not in ("send", "receive"), "its name must not be that of messages"
        require(fits, "layer", rule, {"name": self.name}, "Give it another one.", TypeError)
        inputs, results = self.forward.arguments.split(), self.outputs.split()
        gradients = [(row, {"dy", *inputs, *results}, 1) for row in self.backward.values() if row]
        for row, allowed, count in [(self.forward, {*inputs}, len(results)), *gradients]:
            names, counts = row.arguments.split(), [len(side.split(",")) for side in row.signature.split("->")]
            fits = counts == [len(names), count] and {*names} <= allowed and ("dy" in allowed) == ("dy" in names)
            rule = "a row must have axes for each argument and result, and a gradient read dy and, besides, only these"
            got = {"signature": row.signature, "arguments": row.arguments}
            require(fits, f"layer {self.name}", rule, got, "Compare it with daskgpt.model.layers.", TypeError)
        rule, got = "gradients must be those of arguments", {"backward": ", ".join(self.backward)}
        require({*self.backward} <= {*inputs}, f"layer {self.name}", rule, got, "Name each by its argument.", TypeError)


PASS = None

EMBEDDING = Layer(
    name="embedding",
    forward=Row(embedding.forward, "bt, VC, t, PC -> btC", "tokens wte positions wpe"),
    backward={
        "wte": Row(embedding.backward, "btC, bt -> VC", "dy tokens"),
        "wpe": Row(embedding.backward, "btC, t -> PC", "dy positions"),
    },
)

TOKEN_EMBEDDING = Layer(
    name="embedding",
    forward=Row(embedding.forward, "bt, VC -> btC", "tokens wte"),
    backward={"wte": Row(embedding.backward, "btC, bt -> VC", "dy tokens")},
)

LAYERNORM = Layer(
    name="layernorm",
    forward=Row(norms.layernorm, "btC, C, C -> btC", "x weight bias"),
    backward={
        "x": Row(norms.layernorm_backward_x, "btC, btC, C -> btC", "dy x weight"),
        "weight": Row(norms.layernorm_backward_weight, "btC, btC -> C", "dy x"),
        "bias": Row(linear.backward_bias, "btC -> C", "dy"),
    },
    cheap=True,
)

RMSNORM = Layer(
    name="rmsnorm",
    forward=Row(norms.rmsnorm, "btC, C -> btC", "x weight", "norm_eps"),
    backward={
        "x": Row(norms.rmsnorm_backward_x, "btC, btC, C -> btC", "dy x weight", "norm_eps"),
        "weight": Row(norms.rmsnorm_backward_weight, "btC, btC -> C", "dy x", "norm_eps"),
    },
    cheap=True,
)

LINEAR = Layer(
    name="linear",
    forward=Row(linear.forward, "btC, OC, O -> btO", "x weight bias"),
    backward={
        "x": Row(linear.backward_x, "btO, OC -> btC", "dy weight"),
        "weight": Row(linear.backward_weight, "btO, btC -> OC", "dy x"),
        "bias": Row(linear.backward_bias, "btO -> O", "dy"),
    },
)

# Linear layers of models without biases.
UNBIASED = Layer(
    name="linear",
    forward=Row(linear.forward, "btC, OC -> btO", "x weight"),
    backward={name: row for name, row in LINEAR.backward.items() if name != "bias"},
)

GELU = Layer(
    name="gelu",
    forward=Row(elementwise.gelu, "btC -> btC", "x"),
    backward={"x": Row(elementwise.gelu_backward, "btC, btC -> btC", "dy x")},
    cheap=True,
)

RELU2 = Layer(
    name="relu2",
    forward=Row(elementwise.relu2, "btC -> btC", "x"),
    backward={"x": Row(elementwise.relu2_backward, "btC, btC -> btC", "dy x")},
    cheap=True,
)

SWIGLU = Layer(
    name="swiglu",
    forward=Row(elementwise.swiglu, "btX -> btC", "x"),
    backward={"x": Row(elementwise.swiglu_backward, "btC, btX -> btX", "dy x")},
    new_axes=lambda sizes, options: {"C": sizes["X"] // 2},
    cheap=True,
    widens=2,
)

ROTARY = Layer(
    name="rotary",
    forward=Row(rotary.forward, "btX, t -> btX", "x positions", "heads key_heads rope"),
    backward={"x": Row(rotary.backward, "btX, t -> btX", "dy positions", "heads key_heads rope")},
    cheap=True,
)

QK_NORM = Layer(
    name="qk_norm",
    forward=Row(norms.qk_norm, "btX, D, D -> btX", "x q_norm k_norm", "heads key_heads norm_eps"),
    backward={
        "x": Row(norms.qk_norm_backward_x, "btX, btX, D, D -> btX", "dy x q_norm k_norm", "heads key_heads norm_eps"),
        "q_norm": Row(norms.qk_norm_backward_q_norm, "btX, btX -> D", "dy x", "heads key_heads norm_eps"),
        "k_norm": Row(norms.qk_norm_backward_k_norm, "btX, btX -> D", "dy x", "heads key_heads norm_eps"),
    },
    cheap=True,
)

ADD = Layer(
    name="add",
    forward=Row(elementwise.add, "btC, btC -> btC", "x y"),
    outputs="sum",
    backward={"x": PASS, "y": PASS},
)

# The backward kernel computes again which numbers are dropped.
DROPOUT = Layer(
    name="dropout",
    forward=Row(dropout.dropped, "btC, b, t -> btC", "x streams positions", "place rate"),
    backward={"x": Row(dropout.dropped, "btC, b, t -> btC", "dy streams positions", "place rate")},
)


DROPPED_ATTENTION = Layer(
    name="attention",
    forward=Row(attention.forward, "bTX, b -> bTC, bHT", "qkv streams", "heads key_heads place rate"),
    outputs="y logsumexp",
    backward={
        "qkv": Row(
            attention.backward,
            "bTC, bTX, bTC, bHT, b -> bTX",
            "dy qkv y logsumexp streams",
            "heads key_heads place rate",
        )
    },
    new_axes=lambda sizes, options: {
        "C": sizes["X"] // (options["heads"] + 2 * options["key_heads"]) * options["heads"],
        "H": options["heads"],
    },
)

ATTENTION = Layer(
    name="attention",
    forward=Row(attention.forward, "bTX -> bTC, bHT", "qkv", "heads key_heads"),
    outputs="y logsumexp",
    backward={"qkv": Row(attention.backward, "bTC, bTX, bTC, bHT -> bTX", "dy qkv y logsumexp", "heads key_heads")},
    new_axes=DROPPED_ATTENTION.new_axes,
    dropped=DROPPED_ATTENTION,
)

GATHER = Layer(
    name="gather",
    forward=Row(attention.gather, "btX, t -> bTX", "x positions"),
    backward={"x": Row(attention.split, "bTX, t -> btX", "dy positions")},
)

SPLIT = Layer(
    name="split",
    forward=Row(attention.split, "bTC, t -> btC", "x positions"),
    backward={"x": Row(attention.gather, "btC, t -> bTC", "dy positions")},
)

# What replaces GATHER, ATTENTION and SPLIT for parts of the heads, each with queries, keys and values of its own.
BY_HEADS = (
    Layer(
        name="gather",
        forward=Row(attention.gather, "btX, t, h -> bhTC", "x positions part", "divided parts"),
        backward={"x": Row(attention.split, "bhTC, t, h -> btX", "dy positions part", "divided parts")},
        new_axes=lambda sizes, options: {"C": sizes["X"] // sizes["h"]},
    ),
    Layer(
        name="attention",
        forward=Row(attention.forward, "bhTX -> bhTC, bhHT", "qkv", "heads key_heads"),
        outputs="y logsumexp",
        backward={
            "qkv": Row(attention.backward, "bhTC, bhTX, bhTC, bhHT -> bhTX", "dy qkv y logsumexp", "heads key_heads")
        },
        new_axes=DROPPED_ATTENTION.new_axes,
    ),
    Layer(
        name="split",
        forward=Row(attention.split, "bhTC, t, h -> btX", "x positions part", "divided parts"),
        backward={"x": Row(attention.gather, "btX, t, h -> bhTC", "dy positions part", "divided parts")},
        new_axes=lambda sizes, options: {"X": sizes["C"] * sizes["h"]},
    ),
)


def _last_layers(table: str) -> tuple[Layer, Layer]:
    """Return unembedding and cross-entropy with a table as their weight.

    The cross-entropy includes the unembedding, so that the logits of a chunk never leave its task.
    """
    unembedding = Layer(
        name="unembedding",
        forward=Row(linear.forward, "btC, VC -> btV", f"x {table}"),
        outputs="logits",
        backward={
            "x": Row(linear.backward_x, "btV, VC -> btC", f"dy {table}"),
            table: Row(linear.backward_weight, "btV, btC -> VC", "dy x"),
        },
    )
    losses = Layer(
        name="crossentropy",
        forward=Row(crossentropy.forward, "btC, VC, bt -> bt, btV", f"x {table} targets", "vocabulary"),
        outputs="losses dlogits",
        backward={
            "x": Row(crossentropy.backward_x, "bt, btV, VC -> btC", f"dy dlogits {table}"),
            table: Row(crossentropy.backward_wte, "bt, btV, btC -> VC", "dy dlogits x"),
        },
    )
    return unembedding, losses


UNEMBEDDING, CROSSENTROPY = _last_layers("wte")
UNTIED_UNEMBEDDING, UNTIED_CROSSENTROPY = _last_layers("lm_head")

MEAN = Layer(
    name="mean",
    forward=Row(crossentropy.mean_forward, "bt, bt -> ", "losses shares"),
    outputs="loss",
    backward={"losses": Row(crossentropy.mean_backward, ", bt, bt -> bt", "dy losses shares")},
)

LAYERS: tuple[Layer, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Layer))

# The rows that a field of the configuration can name.
CHOICES: Mapping[str, Mapping[str, Layer]] = {
    "norm": {"layernorm": LAYERNORM, "rmsnorm": RMSNORM},
    "position": {"learned": EMBEDDING, "rotary": ROTARY},
    "attention": {"causal": ATTENTION},
    "activation": {"gelu": GELU, "swiglu": SWIGLU, "relu2": RELU2},
}


def chosen(config: ModelConfig, field: str) -> Layer:
    """Return the row that a configuration names in a field. Errors   as `row_of`"""
    return row_of(getattr(config, field), CHOICES[field], "model", field)
