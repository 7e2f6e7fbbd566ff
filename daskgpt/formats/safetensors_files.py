"""Named tensors in safetensors files: one file, or shards with an index, written and read a tensor at a time."""

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
from daskgpt.formats.published import pieces

ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
# NumPy has no bfloat16: its bits as uint16.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "|u1"}
SHARD_BYTES = 5_000_000_000  # huggingface_hub's default
# Headers and indexes of GPT-2 have some ten thousand bytes. The library reads up to 100 MB, of which JSON makes a GB.
MOST_TEXT = 2**22


@dataclass(frozen=True)
class NamedTensor:
    """A tensor to write, whose values are asked for when it is its turn.

    dtype    safetensors' name of it, a key of DTYPES
    values   gives an array of this shape and dtype, which need not be contiguous
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
    """Write NAME.safetensors into a folder, or where that would exceed shard_bytes NAME-00001-of-0000N.safetensors and
    so on, and NAME.safetensors.index.json, which says in which of them a tensor is.

    folder        holds no such files yet
    where         who asks, for error messages
    shard_bytes   of the tensors of one file; a tensor that is larger has a file of its own

    Cost     one tensor's values at a time
    Returns  the SHA-256 of each file by its name, in hexadecimal; all are on the disk
    Errors   as of write_tensor_file; ValueError where the folder has a model in the other form, which a reader would
             take instead
    Source   huggingface_hub, split_state_dict_into_shards_factory: in the given order, a file until it is full
    """
    folder = Path(folder)
    shards = _shards(tensors, shard_bytes)
    single, index = name + ENDING, name + INDEX_ENDING
    other = folder / (single if len(shards) > 1 else index)
    rule, advice = "the folder must hold no such tensors yet", "Give another folder."
    require(not other.exists(), where, rule, {"path": other}, advice)
    if len(shards) == 1:
        return {single: write_tensor_file(folder / single, shards[0], metadata, where=where)}
    written: dict[str, str] = {}
    of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}{ENDING}"
        written[file] = write_tensor_file(folder / file, shard, metadata, where=where)
        of |= {tensor.name: file for tensor in shard}
    size = sum(tensor.nbytes for shard in shards for tensor in shard)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": of}, indent=2).encode() + b"\n"
    with replacing(folder / index, where) as stream:
        stream.write(text)
    return written | {index: hashlib.sha256(text).hexdigest()}


def write_tensor_file(
    path: str | os.PathLike[str], tensors: Sequence[NamedTensor], metadata: Mapping[str, str], *, where: str
) -> str:
    """Write one file, which appears under its name only when it is whole and on the disk.

    Cost     one tensor's values at a time, and 16 MiB where they are not contiguous
    Returns  the SHA-256 of the file, in hexadecimal
    Errors   ValueError for two tensors of one name; TypeError for values that are not as announced; FileNotFoundError
             where the folder is missing; OSError where the system refuses
    Source   safetensors, README: Format. The library's own writer wants every array contiguous at once (for a
             transposed model a second one), and writes others wrong without a word.
    """
    names = [tensor.name for tensor in tensors]
    twice = next((name for name in names if names.count(name) > 1), "") if len(set(names)) < len(names) else ""
    require(not twice, where, "every tensor must have a name of its own", {"name": twice}, "Rename one.")
    values = (piece.data for tensor in tensors for piece in pieces(_values(tensor, where)))
    with replacing(path, where) as file:
        return write_hashed(file, chain([memoryview(_header(tensors, metadata))], values))


def _shards(tensors: Iterable[NamedTensor], most: int) -> list[list[NamedTensor]]:
    shards: list[list[NamedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _values(tensor: NamedTensor, where: str) -> np.ndarray:
    values = tensor.values()
    got = {"shape": values.shape, "dtype": values.dtype}
    dtype = np.dtype(DTYPES[tensor.dtype])
    rule = f"{tensor.name} must have shape {tensor.shape} and dtype {dtype}"
    right = values.shape == tensor.shape and values.dtype == dtype
    require(right, where, rule, got, "Give the array that was announced.", TypeError)
    return values


def _header(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> bytes:
    """Its length in 8 bytes and the header, filled up so that the tensors begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, eq=False)
class _Stored:
    """Where a tensor is: its file, and its place there."""

    file: int
    shape: tuple[int, ...]
    dtype: str
    begin: int


class TensorFiles:
    """The tensors of one file, or of all that an index names. Opening reads and checks all headers, and no tensor.

    path     .safetensors, or the index (.json)
    where    who asks, for error messages

    Errors   FileNotFoundError; ValueError for a file that is no safetensors, truncated, or longer than its header says,
             and for an index that is none or does not say what is in the files
    """

    def __init__(self, path: str | os.PathLike[str], where: str) -> None:
        self.path, self._where = Path(path), where
        self._tensors: dict[str, _Stored] = {}
        self.metadata: dict[str, str] = {}
        self._maps: list[np.memmap[Any, Any]] = []
        if self.path.suffix == ".json":
            self._open_index()
        else:
            self.files = [self.path]
            self._open(self.path)

    def _open_index(self) -> None:
        known = read_json(self.path, self._where, "the index")
        of: Any = known.get("weight_map")
        right = isinstance(of, dict) and len(of) > 0 and all(isinstance(file, str) for file in of.values())
        rule, advice = "weight_map must say of each tensor in which file it is", "Copy the folder again."
        require(right, self._where, rule, {"path": self.path, "weight_map": short(of)}, advice)
        names = sorted(set(of.values()))
        for name in names:
            # It is somebody else's text: nothing outside of the folder is opened.
            plain = name == Path(name).name and name.endswith(ENDING) and name.isprintable() and len(name) <= 100
            rule = "weight_map must name .safetensors files beside the index"
            require(plain, self._where, rule, {"path": self.path, "file": short(name)}, advice)
        self.files = [self.path.with_name(name) for name in names]
        for file in self.files:
            self._open(file)
        for name in sorted(self._tensors.keys() | of.keys()):
            stored = self._tensors.get(name)
            found, said = names[stored.file] if stored else "no file", of.get(name, "no file")
            got = {"path": self.path, "tensor": short(name), "file": found, "weight_map": short(said)}
            require(found == said, self._where, "the index must say where each tensor is", got, advice)

    def _open(self, path: Path) -> None:
        advice = "Check the spelling and the folder."
        require(path.is_file(), self._where, "the file must exist", {"path": path}, advice, FileNotFoundError)
        with open(path, "rb") as file:  # says in words, with the path, why the system refuses
            header = int.from_bytes(file.read(8), "little")
            rule, advice = f"the header must have at most {MOST_TEXT:,} bytes", "It is no safetensors file, or damaged."
            size = path.stat().st_size
            absurd = MOST_TEXT < header <= size - 8  # a longer one is refused by the library, which calls it truncated
            require(not absurd, self._where, rule, {"path": path, "header": header}, advice)
            entries = self._checked(path, file.read(header) if header <= size else b"")
        for name, entry in entries.items():
            if name in self._tensors:
                rule, got = "every tensor must be in one file", {"path": path, "tensor": short(name)}
                raise refusal(ValueError, self._where, rule, got, "Copy the folder again.")
            begin = 8 + header + entry["data_offsets"][0]
            self._tensors[name] = _Stored(len(self._maps), tuple(entry["shape"]), entry["dtype"], begin)
        self._maps.append(np.memmap(path, np.uint8, "r"))

    def _checked(self, path: Path, text: bytes) -> dict[str, Any]:
        """The header's entries, which the library has checked: kinds, sizes, and that they fill the file."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = dict(file.metadata() or {})
        except SafetensorError as error:
            rule, advice = (
                "the file must be a whole safetensors file",
                "It is of another kind, or damaged: write it again.",
            )
            got = {"path": path, "bytes": f"{path.stat().st_size} ({short(error, 120)})"}
            raise refusal(ValueError, self._where, rule, got, advice) from error
        self.metadata = metadata if not self._maps else self.metadata
        wrong = min((key for key, value in metadata.items() ^ self.metadata.items()), default="")
        rule, got = "all files of a model must have the same metadata", {"path": path, "entry": short(wrong)}
        require(metadata == self.metadata, self._where, rule, got, "They are of two models, or damaged.")
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        return entries

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the files."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's dtype, which need not be one of DTYPES."""
        return self._tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is in the file: mapped, read-only; bfloat16 as the uint16 of its bits."""
        stored = self._tensors[name]
        dtype = np.dtype(DTYPES[stored.dtype])
        flat = np.frombuffer(self._maps[stored.file], dtype, prod(stored.shape), stored.begin)
        return flat.reshape(stored.shape)


def read_json(path: Path, where: str, what: str) -> dict[str, Any]:
    """A JSON object from somebody's file.

    what     that it is, for error messages

    Errors   FileNotFoundError; ValueError for a file that is too long, or no object
    """
    advice = "Check the spelling and the folder."
    require(path.is_file(), where, "the file must exist", {"path": path}, advice, FileNotFoundError)
    size = path.stat().st_size
    rule, advice = f"{what} must be a JSON object of at most {MOST_TEXT:,} bytes", "Copy or write it again."
    require(size <= MOST_TEXT, where, rule, {"path": path, "bytes": size}, advice)
    try:
        known = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refusal(ValueError, where, rule, {"path": f"{path} ({type(error).__name__})"}, advice) from error
    got = {"path": path, "kind": type(known).__name__}
    require(isinstance(known, dict), where, rule, got, advice)
    return dict(known)


def short(value: Any, most: int = 40) -> str:
    """A value of somebody's file, or what is said about it, on one line and no longer than fits there."""
    text = "".join(character if character.isprintable() else "?" for character in str(value)[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."
