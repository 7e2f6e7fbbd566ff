"""The configuration of a model, and the published sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from daskgpt.config.errors import nearest_divisor, require, require_known
from daskgpt.config.settings import Checked, documented, setting


@documented
@dataclass(frozen=True)
class GPT2Config(Checked):
    """The size of a GPT-2 model.

    Errors   ValueError if a number is below 1, heads does not divide channels, or padding is below the vocabulary;
             TypeError if one is not a whole number
    Source   Radford et al. 2019, table 2 (names of the published sizes)
    """

    blocks: int = setting(4, "transformer blocks", least=1, most=10_000)
    heads: int = setting(4, "attention heads", least=1, most=1_000_000)
    channels: int = setting(128, "channels of an activation", least=1, most=1_000_000)
    vocabulary: int = setting(257, "token ids that can occur", least=1, most=2**24)
    padded_vocabulary: int = setting(
        0, "rows of the embedding table, 0 for the vocabulary itself; rows beyond it stay 0", most=2**25
    )
    positions: int = setting(64, "longest sequence", unit="tokens", least=1, most=2**24)
    norm: str = setting("layernorm", "normalization of a block's inputs", choices=("layernorm", "rmsnorm"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padded_vocabulary == 0:
            object.__setattr__(self, "padded_vocabulary", self.vocabulary)
        where, got = "GPT2Config", {"channels": self.channels, "heads": self.heads}
        rule, heads = "channels must be a multiple of heads", nearest_divisor(self.channels, self.heads)
        require(self.channels % self.heads == 0, where, rule, got, f"Try heads={heads}.")
        rule = "padded_vocabulary must be at least vocabulary"
        got = {"padded_vocabulary": self.padded_vocabulary, "vocabulary": self.vocabulary}
        require(self.padded_vocabulary >= self.vocabulary, where, rule, got, "Use 0 for no padding.")


_PUBLISHED: dict[str, Any] = {"vocabulary": 50257, "padded_vocabulary": 50304, "positions": 1024}
PRESETS: dict[str, GPT2Config] = {
    "tiny": GPT2Config(blocks=4, heads=4, channels=128, vocabulary=257, positions=64),
    "gpt2": GPT2Config(blocks=12, heads=12, channels=768, **_PUBLISHED),
    "gpt2-medium": GPT2Config(blocks=24, heads=16, channels=1024, **_PUBLISHED),
    "gpt2-large": GPT2Config(blocks=36, heads=20, channels=1280, **_PUBLISHED),
    "gpt2-xl": GPT2Config(blocks=48, heads=25, channels=1600, **_PUBLISHED),
}


def preset(name: str, **overrides: Any) -> GPT2Config:
    """Return the named size with some numbers replaced.

    Errors   ValueError for an unknown name

    >>> preset("gpt2", blocks=2)
    GPT2Config(blocks=2, heads=12, channels=768, vocabulary=50257, padded_vocabulary=50304, positions=1024, ...)
    >>> preset("tiny", heads=3)
    Traceback (most recent call last):
    ValueError: GPT2Config: channels must be a multiple of heads; got channels=128, heads=3. Try heads=4.
    """
    require_known(name, PRESETS, "preset", "preset")
    if "vocabulary" in overrides and "padded_vocabulary" not in overrides:
        overrides["padded_vocabulary"] = 0
    return replace(PRESETS[name], **overrides)
