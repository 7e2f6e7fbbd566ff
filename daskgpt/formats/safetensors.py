"""Named tensors in safetensors files: one file, or shards with an index, written and read a tensor at a time.

The library `safetensors` checks headers. This module writes and maps: the library's writer needs every array contiguous
and in memory at once, and its NumPy reader copies and lacks bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing, write_hashed
from daskgpt.formats.stored_model import pieces, read_json, require_file, short

LONGEST_NAME = 255  # longest name that file systems allow
ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
# NumPy has no bfloat16: its bits as uint16.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "|u1"}
SHARD_BYTES = 5_000_000_000  # huggingface_hub's default
COPY_AGAIN = "Copy the folder again."


@dataclass(frozen=True)
class NamedTensor:
    """A tensor to write, whose values are read when they are needed.

    dtype    safetensors' name of it, a key of DTYPES
    values   returns an array of this shape and dtype, which need not be contiguous
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def write_tensor_files(
    folder: str | os.PathLike[str],
    tensors: Iterable[NamedTensor],
    metadata: Mapping[str, str],
    *,
    where: str,
    name: str = "model",
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write NAME.safetensors into a folder, or if that would exceed shard_bytes, NAME-00001-of-0000N.safetensors and so
    on, with NAME.safetensors.index.json, which maps tensors to files.

    folder        holds no such files yet
    where         the caller's name in error messages
    shard_bytes   limit for the tensors of one file; a larger tensor has its own file

    Cost     one tensor's values at a time
    Returns  the SHA-256 of each file by its name, in hexadecimal; all are on the disk
    Errors   as of write_tensor_file; ValueError if the folder has a model in the other form, which a reader would use
             instead
    Source   huggingface_hub, split_state_dict_into_shards_factory: in the given order, a file until it is full
    """
    folder = Path(folder)
    shards: list[list[NamedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    single, index = name + ENDING, name + INDEX_ENDING
    other = folder / (single if len(shards) > 1 else index)
    rule = "the folder must hold no such tensors yet"
    require(not other.exists(), where, rule, {"path": other}, "Give another folder.")
    if len(shards) == 1:
        return {single: write_tensor_file(folder / single, shards[0], metadata, where=where)}
    written: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}{ENDING}"
        written[file] = write_tensor_file(folder / file, shard, metadata, where=where)
        weight_map |= {tensor.name: file for tensor in shard}
    size = sum(tensor.nbytes for shard in shards for tensor in shard)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode() + b"\n"
    with replacing(folder / index, where) as stream:
        stream.write(text)
    return written | {index: hashlib.sha256(text).hexdigest()}


def write_tensor_file(
    path: str | os.PathLike[str], tensors: Sequence[NamedTensor], metadata: Mapping[str, str], *, where: str
) -> str:
    """Write one file, which appears under its name only when it is complete and on the disk.

    Cost     one tensor's values at a time, and 16 MiB if they are not contiguous
    Returns  the SHA-256 of the file, in hexadecimal
    Errors   TypeError for values of another shape or dtype than declared; FileNotFoundError if the folder is missing;
             OSError if the system refuses
    Source   safetensors, README: Format
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    header = memoryview(len(text).to_bytes(8, "little") + text)
    values = (piece.data for tensor in tensors for piece in pieces(_values(tensor, where)))
    with replacing(path, where) as file:
        return write_hashed(file, chain([header], values))


def _values(tensor: NamedTensor, where: str) -> np.ndarray:
    values, dtype = tensor.values(), np.dtype(DTYPES[tensor.dtype])
    rule = f"{tensor.name} must have shape {tensor.shape} and dtype {dtype}"
    right = values.shape == tensor.shape and values.dtype == dtype
    got = {"shape": values.shape, "dtype": values.dtype}
    require(right, where, rule, got, "Give an array as declared.", TypeError)
    return values


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    dtype   safetensors' name of it, which need not be one of DTYPES
    begin   its first byte in the file
    """

    mapped: np.memmap[Any, Any]
    shape: tuple[int, ...]
    dtype: str
    begin: int

    def read(self) -> np.ndarray:
        """Return the values as they are in the file: mapped, read-only; bfloat16 as the uint16 of its bits."""
        flat = np.frombuffer(self.mapped, np.dtype(DTYPES[self.dtype]), prod(self.shape), self.begin)
        return flat.reshape(self.shape)


class TensorFiles(dict[str, StoredTensor]):
    """The tensors of one file, or of all files in an index, by name. Opening reads and checks all headers.

    path       .safetensors, or the index (.json)
    where      the caller's name in error messages
    metadata   of each file

    Errors   FileNotFoundError; ValueError for a file that is not safetensors, truncated, or longer than by its header,
             for an invalid index, and for a tensor that is in two files
    """

    def __init__(self, path: str | os.PathLike[str], where: str) -> None:
        super().__init__()
        self.path, self.where = Path(path), where
        self.files = self._shards() if self.path.suffix == ".json" else [self.path]
        self.metadata, *others = (self._open(file) for file in self.files)
        rule = "the files of one model must have the same metadata"
        require(all(own == self.metadata for own in others), where, rule, {"path": self.path}, COPY_AGAIN)

    def _shards(self) -> list[Path]:
        files = read_json(self.path, self.where, "the index").get("weight_map")
        names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
        # The index is a foreign file: nothing outside the folder is opened.
        beside = (name == Path(name).name and name.endswith(ENDING) and name.isprintable() for name in names)
        short_names = all(len(os.fsencode(name)) <= LONGEST_NAME for name in names)
        rule, got = "weight_map must name .safetensors files beside the index", {"path": self.path}
        require(
            bool(names) and all(beside) and short_names,
            self.where,
            rule,
            got | {"weight_map": short(files)},
            COPY_AGAIN,
        )
        return [self.path.with_name(name) for name in names]

    def _open(self, path: Path) -> dict[str, str]:
        """Add the tensors of a file, and return its metadata."""
        require_file(path, self.where)
        with open(path, "rb") as file:  # names the path if the system refuses
            size = int.from_bytes(file.read(8), "little")
            try:
                with safe_open(path, framework="numpy") as checked:
                    metadata = dict(checked.metadata() or {})
            except SafetensorError as error:
                rule, advice = "the file must be a complete safetensors file", "It is of another kind, or damaged."
                got = {"path": path, "bytes": f"{path.stat().st_size} ({short(error, 120)})"}
                raise refusal(ValueError, self.where, rule, got, advice) from error
            header = json.loads(file.read(size))
        mapped = np.memmap(path, np.uint8, "r")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            twice = {"path": path, "tensor": short(name)}
            require(name not in self, self.where, "every tensor must be in one file", twice, COPY_AGAIN)
            begin = 8 + size + entry["data_offsets"][0]
            self[name] = StoredTensor(mapped, tuple(entry["shape"]), entry["dtype"], begin)
        return metadata
