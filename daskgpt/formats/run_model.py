"""The run's own model file: safetensors in Hugging Face's names and layout, with the configuration as metadata."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt import __version__
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.formats.opened import OpenedModel, ReadLater
from daskgpt.formats.published import DESCRIPTION, published_shapes, to_published, view_published
from daskgpt.formats.safetensors_files import (
    SHARD_BYTES,
    NamedTensor,
    TensorFiles,
    short,
    write_tensor_file,
    write_tensor_files,
)
from daskgpt.formats.shown_models import model_html, model_text
from daskgpt.formats.vocabulary_file import is_learned, know_vocabulary, learned_content
from daskgpt.model.gpt2 import replaced_rows
from daskgpt.model.parameters import Tensor, check_dtypes, check_parameters, tensors

ENTRY = "daskgpt"  # of the metadata, a JSON object
CHECK = "check"  # among its parts
LAYERS = "layers"  # among its parts, where rows of the layer table were replaced: which, and by what
VOCABULARY = "vocabulary"  # among its parts, where it was learned: the content of its file
VERSION = 1
# The numbers that every file has. A field of GPT2Config that came later means its default where a file lacks it.
SIZES = ("blocks", "heads", "channels", "vocabulary", "padded_vocabulary", "positions")

READ, WRITE = "read_run_model", "write_run_model"
ALONE = "It was written by another program: a GPT-2 of Hugging Face's is read as a folder, with its config.json."
FOREIGN = "It was written by another program, or is damaged: give a file that daskgpt wrote."


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model as files hold it.

    encoding          between text and token ids, "" where the file does not say
    sequence_length   of the sequences it was trained on, 0 where the file does not say [tokens]
    """

    config: GPT2Config
    parameters: Mapping[str, np.ndarray]
    encoding: str = ""
    sequence_length: int = 0

    def __repr__(self) -> str:
        return model_text("StoredModel", self)

    def _repr_html_(self) -> str:
        return model_html("StoredModel", self)


def write_run_model(path: str | os.PathLike[str], model: StoredModel) -> None:
    """Write a model as one file, which appears under its name only when it is whole and on the disk.

    Layout   formats/published.py, in the table's order; metadata "daskgpt": configuration, encoding, sequence length
    Dtype    float32
    Cost     16 MiB
    Errors   ValueError for missing or unknown names and wrong shapes; TypeError unless float32; FileNotFoundError where
             the folder is missing
    """
    write_tensor_file(path, _named(model), _metadata(model), where=WRITE)


def stream_run_model(path: str | os.PathLike[str], model: OpenedModel) -> None:
    """The same for a model whose tensors are read when it is their turn."""
    metadata = metadata_of(model.config, model.encoding, model.sequence_length)
    write_tensor_file(path, named_tensors(model.config, model.read), metadata, where=WRITE)


def write_run_models(
    folder: str | os.PathLike[str], model: StoredModel, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """The same as model.safetensors in a folder, or where that is larger than shard_bytes as shards and an index.

    Returns  the SHA-256 of each file by its name
    """
    return write_tensor_files(folder, _named(model), _metadata(model), where=WRITE, shard_bytes=shard_bytes)


def _named(model: StoredModel) -> list[NamedTensor]:
    if not isinstance(model.parameters, ReadLater):  # of which each is checked as it is written
        check_parameters(model.config, model.parameters)
        check_dtypes(WRITE, model.parameters, np.float32)
    return named_tensors(model.config, lambda tensor: model.parameters[tensor.name])


def named_tensors(config: GPT2Config, read: Callable[[Tensor], np.ndarray]) -> list[NamedTensor]:
    """What a file in Hugging Face's layout holds: every tensor of a model, read when it is its turn.

    read   gives a tensor of the table in its shape, float32
    """
    found = []
    for tensor in tensors(config).values():
        view = partial(_view, config, tensor, read)
        # Only of the table of tokens does the shape depend on the values.
        shape = view().shape if len(published_shapes(config, tensor)) > 1 else published_shapes(config, tensor)[0]
        found.append(NamedTensor(tensor.name, shape, "F32", view))
    return found


def _view(config: GPT2Config, tensor: Tensor, read: Callable[[Tensor], np.ndarray]) -> np.ndarray:
    return to_published(config, tensor, read(tensor))


def _metadata(model: StoredModel) -> dict[str, str]:
    return metadata_of(model.config, model.encoding, model.sequence_length)


def metadata_of(config: GPT2Config, encoding: str, sequence_length: int) -> dict[str, str]:
    """The metadata of a file that holds such a model; a learned vocabulary is in it."""
    known = {
        "version": VERSION,
        "daskgpt": __version__,
        "layout": DESCRIPTION,
        "model": asdict(config),
        "encoding": encoding,
        "sequence_length": sequence_length,
    }
    if replaced := replaced_rows():
        known[LAYERS] = replaced
    if is_learned(encoding):  # nobody else has it
        known[VOCABULARY] = learned_content(encoding)
    known |= {CHECK: _check_of(known)}
    # transformers reads a file only if it says for which library it was written; the layout of all is the same.
    return {"format": "pt", ENTRY: json.dumps(known)}


def _check_of(known: Mapping[str, Any]) -> int:
    """A checksum of what the metadata says: nothing else in a file would tell a flipped bit of heads or encoding."""
    said = {name: value for name, value in known.items() if name != CHECK}
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def read_run_model(path: str | os.PathLike[str]) -> StoredModel:
    """A model that write_run_model or write_run_models wrote. All headers are checked before a tensor is read.

    path     the file, or the index of several

    Shapes   those of parameter_shapes; rows of padding that the file leaves out are 0
    Dtype    float32
    Cost     the parameters; the files are mapped
    Errors   FileNotFoundError; ValueError for a file that is no safetensors, truncated, or longer than its header says,
             for metadata without a configuration, and for tensors that are missing, unknown, or of another shape or
             dtype
    """
    model = open_run_model(path)
    return StoredModel(model.config, model.parameters(), model.encoding, model.sequence_length)


def open_run_model(path: str | os.PathLike[str]) -> OpenedModel:
    """The same, before a tensor is read."""
    path = Path(path)
    files = TensorFiles(path, READ)
    config, encoding, length = said_of(path, files.metadata)
    _check(path, config, files)

    def read(tensor: Tensor) -> np.ndarray:
        return view_published(tensor, files.read(tensor.name))

    return OpenedModel(config, files.files, "daskgpt", "float32", read, encoding, length)


def said_of(path: Path, metadata: Mapping[str, str]) -> tuple[GPT2Config, str, int]:
    """What the metadata of a file says: configuration, encoding, sequence length.

    Errors   ValueError where it says none, or what cannot be
    """
    known = _known(path, metadata)
    config, encoding = _config_of(path, known), known["encoding"]
    rule, own = "the layers must be those that the model was trained with", "GPT-2's own"
    layers = f"path={path} ({short(known.get(LAYERS, own), 200)}), here {replaced_rows() or own}"
    require(
        known.get(LAYERS, "") == replaced_rows(), READ, rule, layers, "Put the same rows into daskgpt.model.layers."
    )
    if VOCABULARY in known:
        _require_kinds(path, ENTRY, known, {VOCABULARY: str})
        own = know_vocabulary(known[VOCABULARY], str(path))
        rule, got = "the vocabulary must be that of the encoding", {"path": path, "encoding": short(encoding)}
        require(own == encoding, READ, rule, got, FOREIGN)
    return config, encoding, known["sequence_length"]


def _known(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the metadata says of the model, its parts of the right kind."""
    require(
        ENTRY in metadata,
        READ,
        f"the metadata must have an entry {ENTRY} with the model's configuration",
        {"path": path, "entries": short(", ".join(sorted(metadata)), 80) or "none"},
        ALONE,
    )
    try:
        known = json.loads(metadata[ENTRY])
    except (ValueError, RecursionError) as error:
        rule = f"the metadata's entry {ENTRY} must be JSON"
        raise refusal(ValueError, READ, rule, {"path": f"{path} ({type(error).__name__})"}, FOREIGN) from error
    _require_kinds(path, ENTRY, known, {"version": int, "model": dict, "encoding": str, "sequence_length": int})
    if CHECK in known:  # older files have none
        rule = f"the metadata's {ENTRY} must be what was written, by its checksum"
        require(known[CHECK] == _check_of(known), READ, rule, {"path": path, CHECK: short(known[CHECK])}, FOREIGN)
    rule, advice = f"the version must be {VERSION}", "Read it with the daskgpt that wrote it, or a newer one."
    require(known["version"] == VERSION, READ, rule, {"path": path, "version": short(known["version"])}, advice)
    return dict(known)


def _config_of(path: Path, known: Mapping[str, Any]) -> GPT2Config:
    numbers = known["model"]
    defaults = {f.name: f.default for f in fields(GPT2Config)}
    _require_kinds(path, "model", numbers, {n: type(defaults[n]) for n in defaults if n in SIZES or n in numbers})
    unknown = [short(name) for name in numbers if name not in defaults]
    rule, advice = "the model must have no setting that is unknown here", "A newer daskgpt wrote it: read it with that."
    require(not unknown, READ, rule, {"path": path, "model": ", ".join(unknown)[:80]}, advice)
    rule = "the metadata must describe a GPT-2"
    # GPT2Config reads 0 as "no padding"; a file always has the number.
    require(numbers["padded_vocabulary"] != 0, READ, rule, {"path": path, "padded_vocabulary": 0}, FOREIGN)
    for name, value in (numbers | {"sequence_length": known["sequence_length"]}).items():
        absurd = isinstance(value, int) and abs(value) >= 2**63
        require(not absurd, READ, rule, {"path": path, name: short(value)}, FOREIGN)
    try:
        config = GPT2Config(**numbers)
    except ValueError as error:
        raise refusal(ValueError, READ, rule, {"path": path}, str(error)) from error
    length = known["sequence_length"]
    rule = f"the sequence length must lie between 0 and the model's positions ({config.positions})"
    require(0 <= length <= config.positions, READ, rule, {"path": path, "sequence_length": length}, FOREIGN)
    return config


def _require_kinds(path: Path, what: str, known: Any, kinds: Mapping[str, type]) -> None:
    """The entry must be an object that has all of these, of these types; a truth value is no number."""
    got = {} if isinstance(known, dict) else {what: type(known).__name__}
    for name in kinds if isinstance(known, dict) else ():
        value = known.get(name, "missing")
        if name not in known or type(value) is not kinds[name]:
            got = {f"{what}.{name}": short(value)}
            break
    rule = f"the metadata's {what} must have " + ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
    require(not got, READ, rule, {"path": path} | got, FOREIGN)


def _check(path: Path, config: GPT2Config, files: TensorFiles) -> None:
    """The file's tensors must be the model's, in name, shape and dtype."""
    names = set(files.names)
    # Compared before there is a table of tensors, whose length is what the metadata says.
    rule, advice = "every block must have its tensors", FOREIGN
    got = {"path": path, "blocks": config.blocks, "tensors": len(names)}
    require(config.blocks <= len(names), READ, rule, got, advice)
    expected = tensors(config)
    for kind, wrong in (("missing", expected.keys() - names), ("unknown", names - expected.keys())):
        got = {"path": path, kind: f"{short(min(wrong, default=''))} ({len(wrong)} in all)"}
        require(not wrong, READ, "the tensors must be those of the model in the metadata", got, FOREIGN)
    for name, tensor in expected.items():
        shape, dtype = files.shape(name), files.dtype(name)
        right = published_shapes(config, tensor)
        rule = f"{name} must be float32 (F32)"
        require(dtype == "F32", READ, rule, {"path": path, "dtype": dtype}, "Convert the file to float32 first.")
        rule = f"{name} must have shape {' or '.join(map(str, right))} in a file"
        require(shape in right, READ, rule, {"path": path, "shape": shape}, FOREIGN)
