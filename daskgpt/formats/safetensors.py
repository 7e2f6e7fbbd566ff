"""Named tensors in safetensors files, written and read a tensor at a time; files in shards with an index are read.

The library `safetensors` checks headers. This module writes and maps: the library's writer needs every array contiguous
and in memory at once, and its NumPy reader copies and lacks bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from daskgpt.config.errors import refusing, require, short
from daskgpt.config.files import replacing, write_hashed
from daskgpt.formats.stored_model import FilePath, StoredTensor, mapped, pieces, read_json, require_file

ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
ENTRY = "daskgpt"  # this program's entry of the metadata, a JSON object
# Large models have headers of a MB; a run's file has its vocabulary there, of which 200,000 tokens take some ten MB.
# Of more, JSON would make some GB.
HEADER_LIMIT = 2**26
COPY_AGAIN = "Copy the folder again."
Shapes = Mapping[str, tuple[int, ...]]


def tensor_path(folder: Path, name: str = "model") -> Path:
    """Return the file of tensors in a folder, or the index of several if there is only that, as transformers does."""
    single, index = folder / (name + ENDING), folder / (name + INDEX_ENDING)
    return index if index.is_file() and not single.is_file() else single


def write_tensor_file(
    path: FilePath, shapes: Shapes, read: Callable[[str], np.ndarray], metadata: Mapping[str, str], *, where: str
) -> str:
    """Write one file of float32 tensors, which appears under its name only when it is complete and on the disk.

    shapes   of the tensors by name, in the order in which they are written
    read     returns a tensor by its name when it is needed; it need not be contiguous

    Cost     memory of one tensor at a time, and 16 MiB if it is not contiguous
    Returns  the SHA-256 of the file, in hexadecimal
    Errors   TypeError for values of another shape or dtype; ValueError for a header that is too large to be read;
             FileNotFoundError if the folder is missing; OSError if the system refuses
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
        tensor, rule = read(name), f"{name} must be float32 and have shape {shapes[name]}"
        right, got = tensor.dtype == np.float32 and tensor.shape == shapes[name], f"{tensor.dtype} {tensor.shape}"
        require(right, where, rule, {"array": got}, "Give an array as declared.", TypeError)
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

    def __init__(self, path: FilePath, where: str) -> None:
        super().__init__()
        self.path, self.where = Path(path), where
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
            with refusing(SafetensorError, self.where, rule, got, advice):
                _check(path)
            header = json.loads(file.read(size))
        values, metadata = mapped(path, offset=8 + size), header.pop("__metadata__", None)
        for name, entry in header.items():
            twice = {"path": path, "tensor": short(name)}
            require(name not in self, self.where, "every tensor must be in one file", twice, COPY_AGAIN)
            begin, end = entry["data_offsets"]
            self[name] = StoredTensor(values[begin:end], tuple(entry["shape"]), entry["dtype"])
        return metadata or {}


def _check(path: Path) -> None:
    """Check the header of a file. Errors   SafetensorError"""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except OSError:  # its file system cannot map files
        deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
