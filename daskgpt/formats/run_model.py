"""The run's own model file: safetensors in Hugging Face's names and layout, with the configuration as metadata."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt import __version__
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.formats.safetensors import (
    SHARD_BYTES,
    NamedTensor,
    StoredTensor,
    TensorFiles,
    write_tensor_file,
    write_tensor_files,
)
from daskgpt.formats.stored_model import READABLE, ReadLater, StoredModel, held, published_shapes, short, to_published
from daskgpt.formats.vocabulary import is_learned, know_vocabulary, learned_vocabulary
from daskgpt.model.gpt2 import replaced_rows
from daskgpt.model.parameters import Tensor, tensors

ENTRY = "daskgpt"  # entry of the metadata, a JSON object
CHECK = "check"  # a part of the entry: a checksum of the others, since nothing else reveals a flipped bit there
LAYERS = "layers"  # a part of the entry, if layers were replaced: their rows, and the replacements
VOCABULARY = "vocabulary"  # a part of the entry, if the vocabulary was learned: the content of its file
VERSION = 1

READ, WRITE = "read_run_model", "write_run_model"
ALONE = "Another program wrote it: a GPT-2 of Hugging Face is read as a folder with config.json."
FOREIGN = "Another program wrote it, or it is damaged: give a file that daskgpt wrote."


def write_run_model(path: str | os.PathLike[str], model: StoredModel) -> None:
    """Write a model as one file, which appears under its name only when it is complete and on the disk.

    Layout   formats/stored_model.py, in the table's order; metadata "daskgpt": configuration, encoding, sequence length
    Dtype    float32
    Cost     16 MiB, and a tensor if tensors are read later
    Errors   ValueError for missing or unknown names and wrong shapes; TypeError unless float32; FileNotFoundError if
             the folder is missing
    """
    model.check(WRITE)
    write_tensor_file(path, named_tensors(model), metadata_of(model), where=WRITE)


def write_run_models(
    folder: str | os.PathLike[str], model: StoredModel, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Write model.safetensors into a folder, or shards and an index if it is larger than shard_bytes.

    Returns  the SHA-256 of each file by its name
    Errors   as of write_run_model
    """
    model.check(WRITE)
    return write_tensor_files(folder, named_tensors(model), metadata_of(model), where=WRITE, shard_bytes=shard_bytes)


def named_tensors(model: StoredModel) -> list[NamedTensor]:
    """Return every tensor of a model in Hugging Face's layout; each is read when it is written."""

    def view(tensor: Tensor) -> np.ndarray:
        return to_published(model.config, tensor, held(tensor, model.parameters[tensor.name]))

    found = []
    for tensor in tensors(model.config).values():
        shapes = published_shapes(model.config, tensor)
        # Only the shape of the token table depends on its values.
        shape = shapes[0] if len(shapes) == 1 else view(tensor).shape
        found.append(NamedTensor(tensor.name, shape, "F32", partial(view, tensor)))
    return found


def metadata_of(model: StoredModel) -> dict[str, str]:
    """Return the metadata of a model's file, including a learned vocabulary."""
    known = {
        "version": VERSION,
        "daskgpt": __version__,
        "model": asdict(model.config),
        "encoding": model.encoding,
        "sequence_length": model.sequence_length,
    }
    if replaced := replaced_rows():
        known[LAYERS] = replaced
    if is_learned(model.encoding):  # no other place has it
        known[VOCABULARY] = learned_vocabulary(model.encoding).content
    # transformers reads a file only if its metadata names a library; the layout is the same for all.
    return {"format": "pt", ENTRY: json.dumps(known | {CHECK: _checksum(known)})}


def _checksum(known: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(known, sort_keys=True).encode())


def open_run_model(path: str | os.PathLike[str]) -> StoredModel:
    """Open a model that write_run_model or write_run_models wrote. All headers are checked before a tensor is read.

    path     the file, or the index of several

    Shapes   those of parameter_shapes; rows of padding that the file leaves out are 0
    Dtype    float32
    Errors   FileNotFoundError; ValueError for a file that is no safetensors, truncated, or longer than its header says,
             for metadata without a configuration, and for tensors that are missing, unknown, or of another shape or
             dtype
    """
    path = Path(path)
    files = TensorFiles(path, READ)
    config, encoding, length = read_metadata(path, files.metadata)
    parameters = open_tensors(path, files, config, READ)
    return StoredModel(config, parameters, encoding, length, "daskgpt", "float32", tuple(files.files))


def open_tensors(path: Path, stored: Mapping[str, StoredTensor], config: GPT2Config, where: str) -> ReadLater:
    """Return the tensors of a model in Hugging Face's layout, before they are read.

    stored   by names of the table

    Errors   ValueError for tensors that are missing, unknown, or of another shape or dtype
    """
    # Compared before there is a table of tensors, whose length is what the file says.
    got: dict[str, Any] = {"path": path, "blocks": config.blocks, "tensors": len(stored)}
    require(config.blocks <= len(stored), where, "every block must have its tensors", got, FOREIGN)
    table = tensors(config)
    for kind, wrong in (("missing", table.keys() - stored.keys()), ("unknown", stored.keys() - table.keys())):
        got = {"path": path, kind: f"{short(min(wrong, default=''))} ({len(wrong)} in all)"}
        require(not wrong, where, "the tensors must be those of the described GPT-2", got, FOREIGN)
    for name, tensor in table.items():
        found, shapes = stored[name], published_shapes(config, tensor)
        rule, got = f"{name} must be {', '.join(READABLE.values())}", {"path": path, "dtype": short(found.dtype)}
        require(found.dtype in READABLE, where, rule, got, "Convert it to float32 first.")
        rule, got = f"{name} must have shape {' or '.join(map(str, shapes))}", {"path": path, "shape": found.shape}
        require(found.shape in shapes, where, rule, got, FOREIGN)

    def read(name: str) -> np.ndarray:
        values = stored[name].read()
        return held(table[name], values.T if table[name].row.is_conv1d else values, stored[name].dtype)

    return ReadLater(table, read)


def read_metadata(path: Path, metadata: Mapping[str, str]) -> tuple[GPT2Config, str, int]:
    """Return configuration, encoding and sequence length in the metadata of a file.

    Errors   ValueError if they are missing or changed
    """
    rule = f"the metadata must have an entry {ENTRY} with the model's configuration"
    got: dict[str, Any] = {"path": path, "entries": short(", ".join(sorted(metadata)), 80) or "none"}
    require(ENTRY in metadata, READ, rule, got, ALONE)
    rule = f"the metadata's {ENTRY} must match its checksum"
    try:
        known = json.loads(metadata[ENTRY])
        check = known.pop(CHECK)
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        got = {"path": f"{path} ({type(error).__name__})"}
        raise refusal(ValueError, READ, rule, got, FOREIGN) from error
    require(check == _checksum(known), READ, rule, {"path": path, CHECK: short(check)}, FOREIGN)
    rule, advice = f"the version must be {VERSION}", "Read it with the daskgpt that wrote it, or a newer one."
    require(known["version"] == VERSION, READ, rule, {"path": path, "version": short(known["version"])}, advice)
    rule, own = "the layers must be those that the model was trained with", "GPT-2's own"
    layers = f"path={path} ({short(known.get(LAYERS, own), 200)}), here {replaced_rows() or own}"
    advice = "Put the same rows into daskgpt.model.layers."
    require(known.get(LAYERS, "") == replaced_rows(), READ, rule, layers, advice)
    if VOCABULARY in known:
        rule, got = "the vocabulary must be that of the encoding", {"path": path, "encoding": short(known["encoding"])}
        require(know_vocabulary(known[VOCABULARY], str(path)) == known["encoding"], READ, rule, got, FOREIGN)
    try:  # a setting that is newer than the file has its default
        return GPT2Config(**known["model"]), known["encoding"], known["sequence_length"]
    except (ValueError, TypeError) as error:
        rule = "the metadata must describe a GPT-2 that is supported"
        raise refusal(ValueError, READ, rule, {"path": path}, short(error, 200)) from error
