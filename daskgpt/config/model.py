"""The configuration of a model, and the published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daskgpt.config.errors import require, require_divisor, require_known
from daskgpt.config.settings import Checked, setting


class ModelConfig(Checked):
    """Sizes of a decoder-only language model, and the choice of its layers. The defaults are tiny's sizes and
    GPT-2's choices.

    A choice names a row of `daskgpt.model.layers`, or one of another module, which workers import too, as
    package.module:ROW.

    Errors   ValueError if a number is below 1, heads does not divide channels (without head_size), kv_heads does not
             divide heads, or padding is below the vocabulary; TypeError if one is not a whole number
    Source   Radford et al. 2019, table 2 (GPT-2's sizes); Allal et al. 2025, arXiv:2502.02737 (SmolLM2)
    """

    blocks: int = setting(4, "transformer blocks", least=1, most=10_000)
    heads: int = setting(4, "attention heads", least=1, most=1_000_000)
    channels: int = setting(128, "channels of an activation", least=1, most=1_000_000)
    vocabulary: int = setting(257, "token ids that can occur", least=1, most=2**24)
    padded_vocabulary: int = setting(0, "rows of the embedding table; 0 = the vocabulary; others stay 0", most=2**25)
    positions: int = setting(64, "longest sequence", unit="tokens", least=1, most=2**24)
    norm: str = setting("layernorm", "normalization of a block's inputs", choices=("layernorm", "rmsnorm"), rows=True)
    norm_eps: float = setting(1e-5, "what rmsnorm adds to the mean square", least=1e-37, most=1)
    position: str = setting(
        "learned", "a table of positions, or queries and keys that are turned", choices=("learned", "rotary"), rows=True
    )
    rope_theta: float = setting(10_000.0, "base of the angles of rotary positions", above=0, most=1e12)
    rope_factor: float = setting(1.0, "Llama 3's scaling: what its slow angles are divided by", least=1, most=1e6)
    rope_low: float = setting(1.0, "turns in rope_positions of an angle that is divided by all of it", above=0)
    rope_high: float = setting(4.0, "turns in rope_positions of an angle that is not divided", above=0)
    rope_positions: int = setting(8192, "longest sequence without this scaling", unit="tokens", least=1, most=2**24)
    qk_norm: str = setting(
        "none", "normalization of each head of queries and keys, before they are turned", choices=("none", "rmsnorm")
    )
    attention: str = setting("causal", "what mixes the tokens of a sequence", choices=("causal",), rows=True)
    activation: str = setting(
        "gelu", "function of the feed-forward layer", choices=("gelu", "swiglu", "relu2"), rows=True
    )
    bias: str = setting("all", "linear layers with a bias", choices=("all", "qkv", "none"))
    head: str = setting("tied", "whether the last layer shares the table of the embedding", choices=("tied", "untied"))
    kv_heads: int = setting(0, "heads of keys and values, a divisor of heads; 0 = as many as heads", most=1_000_000)
    head_size: int = setting(0, "channels of a head; 0 = channels / heads", most=1_000_000)
    hidden: int = setting(0, "channels inside of the feed-forward layer; 0 = 4 x channels", most=4_000_000)
    lora: int = setting(
        0, "rank of low-rank adapters of the blocks' linear layers, which alone are trained; 0 = none", most=1_000_000
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padded_vocabulary == 0:
            object.__setattr__(self, "padded_vocabulary", self.vocabulary)
        where = "ModelConfig"
        if not self.head_size:
            require_divisor(where, "heads", self.heads, "channels", self.channels)
        require_divisor(where, "kv_heads", self.key_heads, "heads", self.heads)
        rule, got = "rotary positions must have an even head_size", {"head_size": self.head_channels}
        require(self.position != "rotary" or self.head_channels % 2 == 0, where, rule, got, "Take fewer or more heads.")
        rule, turns = "rope_high must be above rope_low", {"rope_high": self.rope_high, "rope_low": self.rope_low}
        require(self.rope_high > self.rope_low, where, rule, turns, f"Try rope_high={4 * self.rope_low}.")
        rule = f"layernorm must have norm_eps={ModelConfig.norm_eps}"
        advice = "Use rmsnorm, or leave norm_eps out."
        fits = self.norm != "layernorm" or self.norm_eps == ModelConfig.norm_eps
        require(fits, where, rule, {"norm_eps": self.norm_eps}, advice)
        rule, got = "lora must be at most channels", {"lora": self.lora, "channels": self.channels}
        require(self.lora <= self.channels, where, rule, got, f"Try lora={min(16, self.channels)}.")
        rule = "padded_vocabulary must be at least vocabulary"
        got = {"padded_vocabulary": self.padded_vocabulary, "vocabulary": self.vocabulary}
        require(self.padded_vocabulary >= self.vocabulary, where, rule, got, "Use 0 for no padding.")

    @property
    def key_heads(self) -> int:
        """Number of heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.head_size or self.channels // self.heads

    @property
    def rope(self) -> tuple[float, ...]:
        """Numbers that the angles of rotary positions follow from, see `kernels.rotary`."""
        return self.rope_theta, self.rope_factor, self.rope_low, self.rope_high, float(self.rope_positions)

    @property
    def hidden_channels(self) -> int:
        """Channels inside of the feed-forward layer."""
        return self.hidden or 4 * self.channels

    @property
    def uses(self) -> frozenset[str]:
        """Features of the model for which kernels are compiled, see `kernels.compilation.Kernel`."""
        return frozenset({self.norm, self.position, self.qk_norm, self.activation})

    def shortest(self) -> ModelConfig:
        """Return the same model with a 0 for each size that follows from others."""
        # If heads do not divide the channels, no head_size follows from them: none is equal to the fraction.
        usual = {"kv_heads": self.heads, "head_size": self.channels / self.heads, "hidden": 4 * self.channels}
        unneeded: dict[str, Any] = {name: 0 for name, size in usual.items() if getattr(self, name) == size}
        return replace(self, **unneeded)

    def beyond_gpt2(self) -> str:
        """Return the choices and sizes that GPT-2 does not have, such as `position=rotary`; empty if there are none."""
        values = {name: getattr(self.shortest(), name) for name in (*CHOICES, *SIZES_OF_OTHERS)}
        others = [f"{name}={value}" for name, value in values.items() if value != getattr(ModelConfig, name)]
        return ", ".join(sorted(others))


CHOICES = ("norm", "position", "qk_norm", "attention", "activation", "bias", "head")
SIZES_OF_OTHERS = ("norm_eps", "kv_heads", "head_size", "hidden", "lora")


_PUBLISHED: dict[str, Any] = {"vocabulary": 50257, "padded_vocabulary": 50304, "positions": 1024}
_LLAMA: dict[str, Any] = {"norm": "rmsnorm", "position": "rotary", "bias": "none"}
_SMOLLM2 = _LLAMA | {"vocabulary": 49152, "positions": 8192, "rope_theta": 100_000.0, "activation": "swiglu"}
_NANOCHAT = _LLAMA | {"vocabulary": 65536, "positions": 2048, "activation": "relu2", "head": "untied"}
_NANOCHAT |= {"qk_norm": "rmsnorm"}
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(),
    "gpt2": ModelConfig(blocks=12, heads=12, channels=768, **_PUBLISHED),
    "gpt2-medium": ModelConfig(blocks=24, heads=16, channels=1024, **_PUBLISHED),
    "gpt2-large": ModelConfig(blocks=36, heads=20, channels=1280, **_PUBLISHED),
    "gpt2-xl": ModelConfig(blocks=48, heads=25, channels=1600, **_PUBLISHED),
    "smollm2-135m": ModelConfig(blocks=30, heads=9, kv_heads=3, channels=576, hidden=1536, **_SMOLLM2),
    "smollm2-360m": ModelConfig(blocks=32, heads=15, kv_heads=5, channels=960, hidden=2560, **_SMOLLM2),
    "nanochat-d4": ModelConfig(blocks=4, heads=2, channels=256, **_NANOCHAT),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the named size with some numbers replaced.

    Errors   ValueError for an unknown name, or numbers of rotary positions without them

    >>> preset("gpt2", blocks=2)
    ModelConfig(blocks=2, heads=12, channels=768, vocabulary=50257, padded_vocabulary=50304, positions=1024, ...)
    >>> preset("tiny", heads=3)
    Traceback (most recent call last):
    ValueError: ModelConfig: heads must divide channels; got heads=3, channels=128. Try heads=4.
    """
    require_known(name, PRESETS, "preset", "name")
    if "vocabulary" in overrides and "padded_vocabulary" not in overrides:
        overrides["padded_vocabulary"] = 0
    config = replace(PRESETS[name], **overrides)
    turns = {name: value for name, value in overrides.items() if name.startswith("rope_")}
    unused = config.position == "learned" and any(turns[name] != getattr(ModelConfig, name) for name in turns)
    advice = "Add position=rotary, or leave them out."
    require(not unused, "preset", "rope_ numbers must come with rotary positions", turns, advice)
    return config
