"""The container of GGUF: entries of metadata, and tensors in llama.cpp's number formats.

The library `gguf` knows the formats. Its own reader is not used: it takes seconds for the tokens of a vocabulary, and
looks for values beyond the end of a damaged file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusing, require, require_package, short
from daskgpt.formats.stored_model import StoredTensor, mapped, require_file

READ = "read_gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
# Number formats that are read, by the library's names.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Dtypes of the values of entries, by the numbers of their kinds.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, eq=False)
class GGUFTensor(StoredTensor):
    """A tensor in a file; matrices are (out, in).

    values   a row of the tensor in each row
    dtype    of what is read
    kind     number format, by the library's name
    """

    dtype: str = "F32"
    kind: str = ""

    def read(self) -> np.ndarray:
        """Return the values, float32."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        values: np.ndarray = gguf.quants.dequantize(self.values, kind)
        return values


class _Header:
    """The beginning of a file, read from its start on. Errors   ValueError at the end of the file"""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.place = values, 0

    def take(self, size: int) -> bytes:
        if size > len(self.values) - self.place:
            raise ValueError("the file ends early")
        self.place += size
        return self.values[self.place - size : self.place].tobytes()

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.number(8)).decode()

    def value(self, kind: int) -> Any:
        """Return the value of an entry: a number, a text or a list."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self.number(4), self.number(8)
        return [self.value(kind) for _ in range(count)] if kind in (_TEXT, _ARRAY) else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        numbers: list[Any] = np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return numbers


def open_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the entries of a file, and its tensors by name before they are read.

    Errors   FileNotFoundError; RuntimeError if the library gguf is missing; ValueError for a file that is damaged, of
             another version, or has numbers in a format that is not read
    """
    require_file(path, READ)
    require_package("gguf", "gguf", READ)
    rule, got = "the file must be a complete GGUF file", {"path": path, "bytes": path.stat().st_size}
    with refusing((ValueError, KeyError, RecursionError), READ, rule, got, "It is of another kind, or damaged."):
        entries, tensors = _content(mapped(path))
    for name, tensor in tensors.items():
        rule, advice = f"tensors must be {', '.join(TYPES)}", "Convert it with llama.cpp, or give the original model."
        require(tensor.kind in TYPES, READ, rule, {"path": path, short(name): tensor.kind}, advice)
    return entries, tensors


def _content(values: np.ndarray) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

    header = _Header(values)
    magic, version = header.take(4), header.number(4)
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"version {version}")
    tensor_count, entry_count = header.number(8), header.number(8)
    entries = {}
    for _ in range(entry_count):
        name = header.text()
        entries[name] = header.value(header.number(4))
    alignment = entries.get(_ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{_ALIGNMENT} {short(alignment)}")
    places, last, end = [], 0, 0  # of the tensors, without gaps
    for _ in range(tensor_count):
        name, axes = header.text(), header.number(4)
        shape = tuple(header.number(8) for _ in range(axes))[::-1]
        kind = GGMLQuantizationType(header.number(4))
        block, size = GGML_QUANT_SIZES[kind]
        if header.number(8) != end or not shape or shape[-1] % block:
            raise ValueError(f"{name} is not where it must be")
        last = end + prod(shape) // block * size
        places.append((name, shape, kind.name, slice(end, last)))
        end = last + -last % alignment
    begin = header.place + -header.place % alignment
    if not last <= len(values) - begin <= end:
        raise ValueError("the tensors have another size")
    tensors = {}
    for name, shape, kind, place in places:
        rows = values[begin:][place].reshape(*shape[:-1], -1)
        tensors[name] = GGUFTensor(rows, shape, kind=kind)
    if len(tensors) < len(places):
        raise ValueError("two tensors have one name")
    return entries, tensors
