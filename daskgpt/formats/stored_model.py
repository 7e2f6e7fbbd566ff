"""Models in files: tensors that are read when they are looked up, families of models with their layouts in other
programs' files, and checks of files that other programs wrote.

Hugging Face has GPT-2's tensors under the names of the table, with the matrices of the blocks as (in, out), and Llama's
under those below; neither has rows of padding. GGUF's names follow from Hugging Face's: the library `gguf` knows both.
All of these files may have 16-bit values. Values that are read are always float32, in the shape of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from daskgpt.config.errors import refusing, require, short
from daskgpt.config.model import ModelConfig
from daskgpt.model.parameters import ReadLater, Tensor, merged, trained_tensors

# The dtypes of values that can be read, by the names that safetensors and GGUF have for them: names here, and NumPy's.
# bfloat16 is read as the uint16 of its bits.
DTYPES = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}
# Blocks of numbers with fewer bits, by GGUF's names.
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
PIECE_BYTES = 2**24
# Indexes and configurations of large models have some hundred thousand bytes.
MAX_JSON_BYTES = 2**22
ADVICE = (
    "Give a run folder, a file of daskgpt (.safetensors) or llama.cpp (.gguf), or Hugging Face's folder with "
    "config.json and model.safetensors; `python -m daskgpt.convert --help` has the lines that convert pickles."
)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    values   its bytes
    dtype    the file's name of its dtype, which need not be one of DTYPES or BLOCKS
    """

    values: np.ndarray
    shape: tuple[int, ...]
    dtype: str

    def equals(self, other: StoredTensor) -> bool:
        """Return whether two tensors of a file are the same to the bit."""
        return self.dtype == other.dtype and self.shape == other.shape and np.array_equal(self.values, other.values)

    def read(self) -> np.ndarray:
        """Return the values as they are in the file: mapped, read-only; bfloat16 as uint16. Blocks become float32."""
        if self.dtype in DTYPES:
            return self.values.view(DTYPES[self.dtype][1]).reshape(self.shape)
        import gguf

        rows = self.values.reshape(*self.shape[:-1], -1)
        values: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.dtype])
        return values


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model in files. Everything that can be checked without the values has been checked.

    parameters        tensors by name, float32; those of a file are read when they are looked up, and may be views of
                      the file, read-only and not contiguous
    encoding          encoding of text as token ids, "" if the files name none
    sequence_length   length of the sequences that it was trained on, 0 if unknown [tokens]
    kind, dtype       names of the format and of the dtype in the files
    files             paths of the files
    adapters          adapters that were merged, by name
    base              SHA-256 of the file that has the tensors which adapters adapt, "" without adapters
    """

    config: ModelConfig
    parameters: Mapping[str, np.ndarray] = field(repr=False)
    encoding: str = ""
    sequence_length: int = 0
    kind: str = ""
    dtype: str = ""
    files: tuple[Path, ...] = ()
    adapters: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    base: str = ""

    def merged(self) -> StoredModel:
        """Return the model with its adapters merged when they are read; itself if it has none."""
        if not self.config.lora:
            return self
        adapters = ReadLater(trained_tensors(self.config), self.parameters.__getitem__)
        config, parameters = merged(self.config, self.parameters)
        return replace(self, config=config, parameters=parameters, adapters=adapters)

    def loaded(self) -> StoredModel:
        """Return the model with all tensors in memory of their own, contiguous and writable."""
        return replace(self, parameters={name: in_memory(values) for name, values in self.parameters.items()})


# Tensors in files


def config_from(settings: Mapping[str, Any], path: Path, where: str, rule: str) -> ModelConfig:
    """Return the configuration that the settings in a file describe, see `ModelConfig.shortest`.

    Errors   ValueError with the rule if they describe none
    """
    with refusing((ValueError, TypeError), where, rule, {"path": path}, "Other models are not supported."):
        config = ModelConfig(**settings)
    return config.shortest()


def held(shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    """Return values of a file in the table's shape, without further rows of padding.

    shape    shape of the result
    values   values in the table's layout, with as many rows or more

    Dtype    float32, float16, or uint16 for bfloat16 -> float32; 16-bit values are widened, which is exact
    Cost     none for float32 with all rows, of which a view is returned, maybe read-only; else memory of the tensor
    """
    values = values[: shape[0]]
    if values.dtype == np.float32 and values.shape == shape:
        return values
    array = np.zeros(shape, np.float32)
    if values.dtype == np.uint16:
        bits = array.view(np.uint32)
        bits[: len(values)] = values
        bits <<= 16
    else:
        array[: len(values)] = values
    return array


def in_memory(values: np.ndarray) -> np.ndarray:
    """Return the values as a contiguous, writable array, copied only if necessary."""
    writable = values.flags.c_contiguous and values.flags.writeable
    return values if writable else values.copy(order="C")


def pieces(values: np.ndarray, most: int = PIECE_BYTES) -> Iterator[np.ndarray]:
    """Yield the values of an array in C order, in contiguous arrays of about `most` bytes, views if possible."""
    if values.ndim < 2 or values.nbytes <= most:
        yield np.ascontiguousarray(values)
        return
    rows = max(1, most * len(values) // values.nbytes)
    for first in range(0, len(values), rows):
        yield np.ascontiguousarray(values[first : first + rows])


# Families of models, and their tensors in other programs' files

FOREIGN = (
    "Another program wrote it, or it is damaged. A file in Hugging Face's folder is read by the name of the folder; "
    "adapters must be merged first (peft: merge_and_unload)."
)
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

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape

    def in_file(self, values: np.ndarray) -> np.ndarray:
        """Return its values as the file has them; values: of the tensor of the table."""
        rows = values[self.rows]
        rows = _swapped(rows, self.turned, 2, -1) if self.interleaved else rows
        return rows.T if self.transposed else rows

    def from_file(self, values: np.ndarray) -> np.ndarray:
        """Return its rows in the tensor of the table; it undoes `in_file`."""
        rows = values.T if self.transposed else values
        return _swapped(rows, self.turned, -1, 2) if self.interleaved else rows


def _swapped(rows: np.ndarray, heads: int, *sizes: int) -> np.ndarray:
    """Return rows of heads with two axes of a head, of these sizes, in the other order: halves become pairs, those that
    are turned together side by side, and pairs halves.
    """
    return rows.reshape(heads, *sizes, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


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
    for several in parts.values():
        for part in several:
            entry = stored[part.name]
            rule = f"{part.name} must be {', '.join(DTYPES)}, or in GGUF {', '.join(BLOCKS)}"
            got = {"path": path, "dtype": short(entry.dtype)}
            require(entry.dtype in (*DTYPES, *BLOCKS), where, rule, got, "Convert it to float32 first.")
            rule = f"{part.name} must have shape {part.shape_in_file}"
            require(entry.shape == part.shape_in_file, where, rule, {"path": path, "shape": entry.shape}, FOREIGN)

    def values(part: Part) -> np.ndarray:
        return held(part.shape, part.from_file(stored[part.name].read()))

    def read(name: str) -> np.ndarray:
        first, *others = parts[name]
        return np.concatenate([values(part) for part in (first, *others)]) if others else values(first)

    return ReadLater(table, read)


# Files that other programs wrote


def mapped(path: Path, dtype: DTypeLike = np.uint8, offset: int = 0) -> np.ndarray:
    """Return the values of a file behind an offset, mapped, read-only."""
    return np.asarray(np.memmap(path, dtype, "r", offset))


def require_file(path: Path, where: str) -> None:
    """Raise FileNotFoundError if there is no such file."""
    advice = "Check the spelling and the folder."
    require(path.is_file(), where, "the file must exist", {"path": path}, advice, FileNotFoundError)


def is_pickled(start: bytes) -> bool:
    """Return whether a file that begins so holds pickled Python objects, or is a zip archive, as PyTorch makes of them.
    They can execute anything when they are read.
    """
    # After the protocol, a pickle has one of few instructions; token ids may begin with these two bytes, too.
    pickle = start[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5") and start[2:3] in b"\x95}](cXqK\x8a"
    return pickle or start.startswith(b"PK\3\4")


def read_json(path: Path, where: str, what: str, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    what     name of the object in error messages
    most     largest size of the file in bytes

    Errors   FileNotFoundError; ValueError for a file that is too long or not an object
    """
    require_file(path, where)
    size = path.stat().st_size
    rule, advice = f"{what} must be a JSON object of at most {most:,} bytes", "Copy or write it again."
    require(size <= most, where, rule, {"path": path, "bytes": size}, advice)
    with refusing((ValueError, RecursionError), where, rule, {"path": path}, advice):
        value = json.loads(path.read_bytes())
    require(isinstance(value, dict), where, rule, {"path": path, "kind": type(value).__name__}, advice)
    return dict(value)
