"""Layouts of models in other programs' files: the families of models that they know, and the tensors of each.

Hugging Face has GPT-2's tensors under the names of the table, and Llama's under those below. GGUF's names follow from
Hugging Face's: the library `gguf` knows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import require, short
from daskgpt.config.model import ModelConfig
from daskgpt.formats.stored_model import READABLE, StoredTensor, held
from daskgpt.model.parameters import ReadLater, Tensor, trained_tensors

FOREIGN = "Another program wrote it, or it is damaged; adapters must be merged first (peft: merge_and_unload)."
GPT2, LLAMA = "gpt2", "llama"
_SIZES = ("blocks", "heads", "channels", "hidden", "vocabulary", "padded_vocabulary", "positions")
_ROPE = ("rope_theta", "rope_factor", "rope_low", "rope_high", "rope_positions")
_LLAMAS = ("kv_heads", "head_size", *_ROPE, "norm_eps", "bias", "head")
# Settings that a family's files hold, and choices that all of its models have; all others are GPT-2's.
FAMILIES: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    GPT2: (_SIZES, {}),
    LLAMA: ((*_SIZES, *_LLAMAS), {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}),
}

# Hugging Face's names for the tensors of each place in a Llama, one below the other in the tensor of the table.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "wte": ("embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("norm",),
}


@dataclass(frozen=True)
class Part:
    """A tensor of a file: rows of a tensor of the table.

    name        Hugging Face's
    start       the first of the rows
    shape       in the table's layout
    turned      number of heads whose channels rotary positions turn; 0 = none
    transposed  whether the file holds its transpose (in, out)
    interleaved whether the file has the channels that are turned together side by side, as GGUF does, in place of those
                of one half of a head before those of the other half
    """

    name: str
    start: int
    shape: tuple[int, ...]
    turned: int = 0
    transposed: bool = False
    interleaved: bool = False

    @property
    def rows(self) -> slice:
        """Its rows in the tensor of the table."""
        return slice(self.start, self.start + self.shape[0])


def family_of(config: ModelConfig, where: str, file: str) -> str:
    """Return the family that a model belongs to.

    file     name of the file, for error messages

    Errors   ValueError naming the setting that the family's files cannot hold
    """
    family = LLAMA if config.position == "rotary" else GPT2
    names, choices = FAMILIES[family]
    shortest = config.shortest()
    for setting in fields(config):
        value, wanted = getattr(shortest, setting.name), choices.get(setting.name, setting.default)
        rule, advice = f"{file} ({family}) has no {setting.name}, which must be {wanted}", "Write .safetensors instead."
        require(setting.name in names or value == wanted, where, rule, {setting.name: value}, advice)
    return family


def explicit(config: ModelConfig) -> dict[str, Any]:
    """Return all settings of a model by name, with numbers in place of each 0 that stands for one."""
    sizes = {"kv_heads": config.key_heads, "head_size": config.head_channels, "hidden": config.hidden_channels}
    return asdict(config) | sizes


def parts_of(config: ModelConfig, tensor: Tensor, family: str = GPT2) -> tuple[Part, ...]:
    """Return the tensors that hold a tensor of the table in a family's files, in the order of its rows."""
    if family == GPT2:
        return (Part(tensor.name, 0, tensor.shape, transposed=tensor.row.is_conv1d),)
    place, _, kind = tensor.name.rpartition(".")
    if place == "lm_head":
        return (Part(tensor.name, 0, tensor.shape),)
    names = _NAMES[place if tensor.block is None else place.removeprefix(f"h.{tensor.block}.")]
    prefix = "model." if tensor.block is None else f"model.layers.{tensor.block}."
    heads = (config.heads, config.key_heads, config.key_heads) if len(names) == 3 else (0,) * len(names)
    parts, start = [], 0
    for name, count in zip(names, heads, strict=True):
        rows = count * config.head_channels or tensor.shape[0] // len(names)
        turned = 0 if name.endswith("v_proj") else count
        parts.append(Part(f"{prefix}{name}.{kind}", start, (rows, *tensor.shape[1:]), turned))
        start += rows
    return tuple(parts)


def paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of heads in halves as rows in pairs, those that are turned together side by side."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def halved(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of heads in pairs as rows in halves; it undoes `paired`."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _shapes_in_file(config: ModelConfig, tensor: Tensor, part: Part) -> list[tuple[int, ...]]:
    """Return the shapes that a tensor may have in a file: one, or two for a table with rows of padding."""
    if part.transposed:
        return [part.shape[::-1]]
    if tensor.row.axes[0] == "V" and config.padded_vocabulary > config.vocabulary:
        return [(config.vocabulary, *part.shape[1:]), part.shape]
    return [part.shape]


def open_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    where: str,
    layout: Callable[[Tensor], Sequence[Part]],
) -> ReadLater:
    """Return the tensors of a model before they are read; of one with adapters, these alone.

    stored   tensors of the file, by Hugging Face's names
    layout   returns the parts of a tensor in such files

    Errors   ValueError for tensors that are missing, unknown, or of another shape or dtype
    """
    # This is compared before a table of tensors is built, whose length the file decides.
    got: dict[str, object] = {"path": path, "blocks": config.blocks, "tensors": len(stored)}
    require(config.blocks <= len(stored), where, "every block must have its tensors", got, FOREIGN)
    table = trained_tensors(config)
    parts = {name: layout(tensor) for name, tensor in table.items()}
    names = {part.name for several in parts.values() for part in several}
    for kind, wrong in (("missing", names - stored.keys()), ("unknown", stored.keys() - names)):
        got = {"path": path, kind: f"{short(min(wrong, default=''))} ({len(wrong)} in all)"}
        require(not wrong, where, "the tensors must be those of the described model", got, FOREIGN)
    for name, several in parts.items():
        for part in several:
            entry, shapes = stored[part.name], _shapes_in_file(config, table[name], part)
            rule = f"{part.name} must be {', '.join(READABLE.values())}"
            got = {"path": path, "dtype": short(entry.dtype)}
            require(entry.dtype in READABLE, where, rule, got, "Convert it to float32 first.")
            rule = f"{part.name} must have shape {' or '.join(map(str, shapes))}"
            require(entry.shape in shapes, where, rule, {"path": path, "shape": entry.shape}, FOREIGN)

    def values(part: Part) -> np.ndarray:
        array = stored[part.name].read()
        array = array.T if part.transposed else array
        array = halved(array, part.turned) if part.interleaved else array
        return held(part.shape, array)

    def read(name: str) -> np.ndarray:
        first, *others = parts[name]
        return np.concatenate([values(part) for part in (first, *others)]) if others else values(first)

    return ReadLater(table, read)
