"""Common parts of the formats: models whose tensors are read when they are looked up, checks of files that other
programs wrote.

Hugging Face's GPT-2 has the matrices of the blocks as (in, out) and a vocabulary without padding. All formats of other
programs may have 16-bit values. Values that are read are always float32, in the shape of the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from daskgpt.config.errors import refusing, require
from daskgpt.config.model import ModelConfig
from daskgpt.model.parameters import ReadLater, merged, trained_tensors

# The dtypes of values that can be read, by safetensors' names; bfloat16 is read as the uint16 of its bits.
READABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
PIECE_BYTES = 2**24
# Indexes and configurations of large models have some hundred thousand bytes.
MAX_JSON_BYTES = 2**22
FilePath = str | os.PathLike[str]
ADVICE = (
    "Give a run folder, a file of daskgpt (.safetensors) or llama.cpp (.gguf), or Hugging Face's folder with "
    "config.json and model.safetensors; `python -m daskgpt.convert --help` has the lines that convert pickles."
)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    values   its bytes
    dtype    safetensors' name of its dtype, which need not be one of READABLE
    """

    values: np.ndarray
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Return the values as they are in the file: mapped, read-only; bfloat16 as uint16."""
        return self.values.view(DTYPES[self.dtype]).reshape(self.shape)


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
    """Return values of a file in the table's shape: rows of padding are added as 0, or left out.

    shape    shape of the result
    values   values in the table's layout, with any number of rows

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


# Files that other programs wrote


def mapped(path: Path, dtype: DTypeLike = np.uint8, offset: int = 0) -> np.ndarray:
    """Return the values of a file behind an offset, read-only: mapped, or read if its file system cannot map files."""
    try:
        return np.asarray(np.memmap(path, dtype, "r", offset))
    except OSError:
        values = np.fromfile(path, dtype, offset=offset)
        values.setflags(write=False)
        return values


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
