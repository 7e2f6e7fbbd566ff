"""Safetensors files, written and read a tensor at a time, and this program's own file of a model.

The library `safetensors` checks headers. This module writes and maps: the library's writer needs every array contiguous
and in memory at once, and its NumPy reader copies and lacks bfloat16. Files in shards with an index are read. A model's
own file has its configuration as metadata.
"""

from __future__ import annotations

import json
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from daskgpt import __version__
from daskgpt.config.errors import refusing, require, short
from daskgpt.config.files import digest_of_file, replacing, write_hashed
from daskgpt.config.model import ModelConfig
from daskgpt.config.settings import require_allowed
from daskgpt.formats.encoding import get_encoding, is_learned, know
from daskgpt.formats.stored_model import (
    FOREIGN,
    GPT2,
    StoredModel,
    StoredTensor,
    held,
    mapped,
    open_tensors,
    parts_of,
    pieces,
    read_json,
    require_file,
)
from daskgpt.model.parameters import trained_tensors

ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
MODEL = f"model{ENDING}"
# Large models have headers of a MB; a run's file has its vocabulary there, of which 200,000 tokens take some ten MB.
# Of more, JSON would make some GB.
HEADER_LIMIT = 2**26
COPY_AGAIN = "Copy the folder again."
Shapes = Mapping[str, tuple[int, ...]]

# This program's own file.
ENTRY = "daskgpt"  # its entry of the metadata, a JSON object
CHECK = "check"  # a part of the entry: a checksum of the others, since nothing else reveals a flipped bit there
LEARNED = "vocabulary"  # a part of the entry, if the vocabulary was learned: the content of its file
VERSION = 1
BASE = f"base{ENDING}"  # the model that a run's adapters adapt
ADAPTED = "base"  # a part of the entry, if the model has adapters: the SHA-256 of BASE
READ, WRITE = "read_run_model", "write_run_model"


def tensor_path(folder: Path, name: str = "model") -> Path:
    """Return the file of tensors in a folder, or the index of several if there is only that, as transformers does."""
    single, index = folder / (name + ENDING), folder / (name + INDEX_ENDING)
    return index if index.is_file() and not single.is_file() else single


def write_tensor_file(
    path: Path, shapes: Shapes, read: Callable[[str], np.ndarray], metadata: Mapping[str, str], *, where: str
) -> str:
    """Write one file of float32 tensors, which appears under its name only when it is complete and on the disk.

    shapes   of the tensors by name, in the order in which they are written
    read     returns a tensor by its name when it is needed; it need not be contiguous

    Cost     memory of one tensor at a time, and 16 MiB if it is not contiguous
    Returns  the SHA-256 of the file, in hexadecimal
    Errors   ValueError for a header that is too large to be read; FileNotFoundError if the folder is missing; OSError
             if the system refuses
    Source   safetensors, README: Format
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    rule, got = f"the file's header must have at most {HEADER_LIMIT:,} bytes", {"path": path, "bytes": len(text)}
    require(len(text) <= HEADER_LIMIT, where, rule, got, "Choose a smaller vocabulary.")
    header = memoryview(len(text).to_bytes(8, "little") + text)

    def values(name: str) -> np.ndarray:
        tensor = read(name)
        assert tensor.dtype == np.float32, name
        assert tensor.shape == shapes[name], name
        return tensor

    data = (piece.data for name in shapes for piece in pieces(values(name)))
    with replacing(path, where) as file:
        return write_hashed(file, chain([header], data))


class TensorFiles(dict[str, StoredTensor]):
    """The tensors of one file, or of all files in an index, by name. Opening reads and checks all headers.

    path       .safetensors, or the index (.json)
    where      the caller's name in error messages
    metadata   metadata of the first file

    Errors   FileNotFoundError; ValueError for a file that is not safetensors, truncated, or longer than by its header,
             for an invalid index, and for a tensor that is in two files
    """

    def __init__(self, path: Path, where: str) -> None:
        super().__init__()
        self.path, self.where = path, where
        self.files = self._shards() if self.path.suffix == ".json" else [self.path]
        self.metadata, *_ = [self._open(file) for file in self.files]

    def _shards(self) -> list[Path]:
        files = read_json(self.path, self.where, "the index").get("weight_map")
        names = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
        # The index is a foreign file: nothing outside the folder is opened.
        missing = set(names) - {path.name for path in self.path.parent.glob(f"*{ENDING}")}
        rule = "weight_map must name .safetensors files beside the index"
        got = {"path": self.path, "weight_map": short(files), "missing": short(min(missing, default="none"), 100)}
        require(bool(names) and not missing, self.where, rule, got, COPY_AGAIN)
        return [self.path.with_name(name) for name in names]

    def _open(self, path: Path) -> dict[str, str]:
        """Add the tensors of a file, and return its metadata."""
        require_file(path, self.where)
        with open(path, "rb") as file:  # names the path if the system refuses
            size = int.from_bytes(file.read(8), "little")
            rule, got = "the file must be a complete safetensors file", {"path": path, "bytes": path.stat().st_size}
            advice = "It is of another kind, or damaged."
            require(size <= HEADER_LIMIT, self.where, rule, got | {"header": size}, advice)
            with refusing(SafetensorError, self.where, rule, got, advice), safe_open(path, framework="numpy"):
                pass  # opening checks the header
            header = json.loads(file.read(size))
        values, metadata = mapped(path, offset=8 + size), header.pop("__metadata__", None)
        for name, entry in header.items():
            twice = {"path": path, "tensor": short(name)}
            require(name not in self, self.where, "every tensor must be in one file", twice, COPY_AGAIN)
            begin, end = entry["data_offsets"]
            self[name] = StoredTensor(values[begin:end], tuple(entry["shape"]), entry["dtype"])
        return metadata or {}


# This program's own file


def write_run_model(path: Path, model: StoredModel, family: str = GPT2) -> str:
    """Write a model as one file, which appears under its name only when it is complete and on the disk. Of a model with
    adapters, the file has these alone, and those beside it share BASE, which has the other tensors.

    family   whose names and layout of tensors the file has; GPT-2's can hold every model

    Layout   Hugging Face's, with rows of padding, in the table's order; metadata "daskgpt": configuration, encoding
             with the content of a learned one, sequence length, and of adapters the SHA-256 of BASE
    Dtype    float32
    Cost     16 MiB, and a tensor if tensors are read later
    Returns  the SHA-256 of the file
    Errors   FileNotFoundError if the folder is missing
    """
    config, table = model.config, trained_tensors(model.config)
    places = {part.name: (tensor, part) for tensor in table.values() for part in parts_of(config, tensor, family)}
    shapes = {name: part.shape_in_file for name, (_, part) in places.items()}

    def read(name: str) -> np.ndarray:
        tensor, part = places[name]
        return part.in_file(held(tensor.shape, model.parameters[tensor.name]))

    entry: dict[str, object] = {"version": VERSION, "daskgpt": __version__, "model": asdict(config)}
    entry |= {"encoding": model.encoding, "sequence_length": model.sequence_length}
    if is_learned(model.encoding):  # no other place has it
        entry[LEARNED] = get_encoding(model.encoding).content
    if config.lora:
        entry[ADAPTED] = model.base
    # transformers reads a file only if its metadata names a library; the layout is the same for all.
    metadata = {"format": "pt", ENTRY: json.dumps(entry | {CHECK: _checksum(entry)})}
    return write_tensor_file(path, shapes, read, metadata, where=WRITE)


def _checksum(entry: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


def open_run_model(path: Path) -> StoredModel:
    """Open a model that `write_run_model` wrote. All headers are checked before a tensor is read.

    The tensors that adapters adapt are those of BASE, beside the folder of the file.

    Shapes   those of parameter_shapes
    Dtype    float32
    Cost     of adapters: reads BASE once in a process
    Errors   FileNotFoundError, also for adapters beside another BASE than theirs; ValueError for a file that is no
             safetensors, truncated, or longer than its header says, for metadata without a configuration, and for
             tensors that are missing, unknown, or of another shape or dtype
    """
    files = TensorFiles(path, READ)
    config, encoding, length, sha256 = read_metadata(path, files.metadata)
    opened = open_tensors(path, files, config, READ, lambda tensor: parts_of(config, tensor))
    stored = StoredModel(config, opened, encoding, length, "daskgpt", "float32", (path,), base=sha256)
    if not config.lora:
        return stored
    base_path = path.resolve().parent.parent / BASE
    is_there = base_path.is_file()
    rule = "adapters must have the model that they were trained with beside their folder"
    got = {"path": path, "model": f"{base_path} ({'another one, or damaged' if is_there else 'missing'})"}
    refused = READ, rule, got, "Copy the whole run folder.", FileNotFoundError
    require(is_there and sha256 == digest_of_base(base_path), *refused)
    base = open_run_model(base_path)
    require(base.config == replace(config, lora=0), *refused)
    parameters = ChainMap[str, np.ndarray](opened, base.parameters)  # type: ignore[arg-type]
    return replace(stored, parameters=parameters, files=(path, *base.files))


def digest_of_base(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it has changed. Errors   OSError"""
    status = path.stat()
    return _digest(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache
def _digest(path: Path, *version: int) -> str:
    return digest_of_file(path)


def read_metadata(path: Path, metadata: Mapping[str, str]) -> tuple[ModelConfig, str, int, str]:
    """Return configuration, encoding, sequence length and, of adapters, the SHA-256 of BASE in the metadata of a file.

    Errors   ValueError if they are missing or changed
    """
    rule = f"the metadata must have an entry {ENTRY} with the model's configuration"
    advice = "Another program wrote it: a model of Hugging Face is read as a folder with config.json."
    got: dict[str, object] = {"path": path, "entries": short(", ".join(sorted(metadata)), 80) or "none"}
    require(ENTRY in metadata, READ, rule, got, advice)
    rule = f"the metadata's {ENTRY} must match its checksum"
    errors = (ValueError, RecursionError, AttributeError, TypeError, KeyError)
    with refusing(errors, READ, rule, {"path": path}, FOREIGN):
        entry = json.loads(metadata[ENTRY])
        check = entry.pop(CHECK)
    require(check == _checksum(entry), READ, rule, {"path": path, CHECK: short(check)}, FOREIGN)
    rule, advice = f"the version must be {VERSION}", "Read it with the daskgpt that wrote it, or a newer one."
    require(entry["version"] == VERSION, READ, rule, {"path": path, "version": short(entry["version"])}, advice)
    if LEARNED in entry:
        know(entry[LEARNED], str(path))
    rule = "the metadata must describe a model that is supported"
    with refusing((ValueError, TypeError), READ, rule, {"path": path}, advice):
        config = ModelConfig(**entry["model"])  # a setting that is newer than the file has its default
    require_allowed(map(str, asdict(config).values()), READ)
    return config, entry["encoding"], entry["sequence_length"], entry.get(ADAPTED, "")
