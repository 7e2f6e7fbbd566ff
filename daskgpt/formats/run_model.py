"""The run's own model file: safetensors in Hugging Face's names and layout, with the configuration as metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from daskgpt import __version__
from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing
from daskgpt.config.model import GPT2Config
from daskgpt.formats.published import DESCRIPTION, from_published, published_shapes, to_published
from daskgpt.model.parameters import check_dtypes, check_parameters, tensors

ENTRY = "daskgpt"  # of the metadata, a JSON object
VERSION = 1
# The numbers that every file has. A field of GPT2Config that came later means its default where a file lacks it.
SIZES = ("blocks", "heads", "channels", "vocabulary", "padded_vocabulary", "positions")

READ, WRITE = "read_run_model", "write_run_model"
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


def write_run_model(path: str | os.PathLike[str], model: StoredModel) -> None:
    """Write a model; the file appears under its name only when it is whole and on the disk.

    Layout   formats/published.py, in the table's order; metadata "daskgpt": configuration, encoding, sequence length
    Dtype    float32
    Cost     a copy of the largest matrix
    Errors   ValueError for missing or unknown names and wrong shapes; TypeError unless float32; FileNotFoundError where
             the folder is missing
    Source   safetensors, README: Format. Its own writer wants every array contiguous at once (a second model, since
             matrices are transposed) and writes others wrong without a word.
    """
    check_parameters(model.config, model.parameters)
    check_dtypes(WRITE, model.parameters, np.float32)
    found = tensors(model.config).values()
    views = {tensor.name: to_published(model.config, tensor, model.parameters[tensor.name]) for tensor in found}
    with replacing(path, WRITE) as file:
        file.write(_header(_metadata(model), views))
        for values in views.values():
            file.write(np.ascontiguousarray(values, "<f4").data)


def _metadata(model: StoredModel) -> dict[str, str]:
    known = {
        "version": VERSION,
        "daskgpt": __version__,
        "layout": DESCRIPTION,
        "model": asdict(model.config),
        "encoding": model.encoding,
        "sequence_length": model.sequence_length,
    }
    # transformers reads a file only if it says for which library it was written; the layout of all is the same.
    return {"format": "pt", ENTRY: json.dumps(known)}


def _header(metadata: dict[str, str], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Its length in 8 bytes and the header, filled up so that the tensors begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, values in arrays.items():
        begin, end = end, end + values.nbytes
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_run_model(path: str | os.PathLike[str]) -> StoredModel:
    """A model that write_run_model wrote. All of the header is checked before a tensor is read.

    Shapes   those of parameter_shapes; rows of padding that the file leaves out are 0
    Dtype    float32
    Cost     the parameters and a copy of the largest; the file is mapped
    Errors   FileNotFoundError; ValueError for a file that is no safetensors, truncated, or longer than its header says,
             for metadata without a configuration, and for tensors that are missing, unknown, or of another shape or
             dtype
    """
    path = Path(path)
    advice = "Check the spelling and the folder."
    require(path.is_file(), READ, "the file must exist", {"path": path}, advice, FileNotFoundError)
    with open(path, "rb"):  # says in words, with the path, why the system refuses
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            known = _known(path, file.metadata() or {})
            config = _config_of(path, known)
            _check(path, config, file)
            values = {
                name: from_published(config, tensor, file.get_tensor(name)) for name, tensor in tensors(config).items()
            }
    except SafetensorError as error:
        rule, advice = "the file must be a whole safetensors file", "It is of another kind, or damaged: write it again."
        got = {"path": path, "bytes": f"{path.stat().st_size} ({_short(error, 120)})"}
        raise refusal(ValueError, READ, rule, got, advice) from error
    return StoredModel(config, values, known["encoding"], known["sequence_length"])


def _known(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the metadata says of the model, its parts of the right kind."""
    require(
        ENTRY in metadata,
        READ,
        f"the metadata must have an entry {ENTRY} with the model's configuration",
        {"path": path, "entries": ", ".join(sorted(metadata))[:80] or "none"},
        FOREIGN,
    )
    try:
        known = json.loads(metadata[ENTRY])
    except (ValueError, RecursionError) as error:
        rule = f"the metadata's entry {ENTRY} must be JSON"
        raise refusal(ValueError, READ, rule, {"path": f"{path} ({type(error).__name__})"}, FOREIGN) from error
    _require_kinds(path, ENTRY, known, {"version": int, "model": dict, "encoding": str, "sequence_length": int})
    rule, advice = f"the version must be {VERSION}", "Read it with the daskgpt that wrote it, or a newer one."
    require(known["version"] == VERSION, READ, rule, {"path": path, "version": _short(known["version"])}, advice)
    return dict(known)


def _config_of(path: Path, known: Mapping[str, Any]) -> GPT2Config:
    numbers = known["model"]
    defaults = {f.name: f.default for f in fields(GPT2Config)}
    _require_kinds(path, "model", numbers, {n: type(defaults[n]) for n in defaults if n in SIZES or n in numbers})
    unknown = [_short(name) for name in numbers if name not in defaults]
    rule, advice = "the model must have no setting that is unknown here", "A newer daskgpt wrote it: read it with that."
    require(not unknown, READ, rule, {"path": path, "model": ", ".join(unknown)[:80]}, advice)
    rule = "the metadata must describe a GPT-2"
    # GPT2Config reads 0 as "no padding"; a file always has the number.
    require(numbers["padded_vocabulary"] != 0, READ, rule, {"path": path, "padded_vocabulary": 0}, FOREIGN)
    for name, value in (numbers | {"sequence_length": known["sequence_length"]}).items():
        absurd = isinstance(value, int) and abs(value) >= 2**63
        require(not absurd, READ, rule, {"path": path, name: _short(value)}, FOREIGN)
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
            got = {f"{what}.{name}": _short(value)}
            break
    rule = f"the metadata's {what} must have " + ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
    require(not got, READ, rule, {"path": path} | got, FOREIGN)


def _check(path: Path, config: GPT2Config, file: Any) -> None:
    """The file's tensors must be the model's, in name, shape and dtype."""
    names = set(file.keys())
    # Compared before there is a table of tensors, whose length is what the metadata says.
    rule, advice = "every block must have its tensors", FOREIGN
    got = {"path": path, "blocks": config.blocks, "tensors": len(names)}
    require(config.blocks <= len(names), READ, rule, got, advice)
    expected = tensors(config)
    for kind, wrong in (("missing", expected.keys() - names), ("unknown", names - expected.keys())):
        got = {"path": path, kind: f"{_short(min(wrong, default=''))} ({len(wrong)} in all)"}
        require(not wrong, READ, "the tensors must be those of the model in the metadata", got, FOREIGN)
    for name, tensor in expected.items():
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        right = published_shapes(config, tensor)
        rule = f"{name} must be float32 (F32)"
        require(dtype == "F32", READ, rule, {"path": path, "dtype": dtype}, "Convert the file to float32 first.")
        rule = f"{name} must have shape {' or '.join(map(str, right))} in a file"
        require(shape in right, READ, rule, {"path": path, "shape": shape}, FOREIGN)


def _short(value: Any, most: int = 40) -> str:
    """A value of somebody's file, or what is said about it, on one line and no longer than fits there."""
    text = "".join(character if character.isprintable() else "?" for character in str(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."
