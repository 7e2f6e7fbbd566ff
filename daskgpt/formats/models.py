"""Which format a model has: told by its content when it is read, by its ending when it is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.formats.huggingface import INDEX, MODEL, is_huggingface, open_huggingface
from daskgpt.formats.llmc import KINDS, open_model, write_model
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.pickles import refuse_pickle
from daskgpt.formats.run_model import StoredModel, open_run_model, write_run_model
from daskgpt.formats.safetensors_files import INDEX_ENDING
from daskgpt.model.gpt2 import require_own_layers
from daskgpt.model.parameters import check_dtypes, check_parameters

WHERE = "read_model_file"
OWN, LLMC = ".safetensors", ".bin"


def read_model_file(path: str | os.PathLike[str]) -> StoredModel:
    """A model from this program's own file, from one of llm.c, or from a folder of Hugging Face's GPT-2.

    Errors   as of open_model_file
    """
    model = open_model_file(path)
    return StoredModel(model.config, model.parameters(), model.encoding, model.sequence_length)


def open_model_file(path: str | os.PathLike[str]) -> OpenedModel:
    """The same, before its tensors are read.

    path     a file; or a folder with config.json (Hugging Face's), or with a model in this program's own form

    Errors   FileNotFoundError, or ValueError where it is not such a model
    """
    path = Path(path)
    if is_huggingface(path):
        return open_huggingface(path)
    if path.is_dir():
        index = path / INDEX
        return open_run_model(index if index.exists() else path / MODEL)
    if _is_safetensors(path) or path.name.endswith(INDEX_ENDING):
        return open_run_model(path)
    refuse_pickle(path, WHERE)
    _refuse_unknown(path)
    return open_model(path)


def _refuse_unknown(path: Path) -> None:
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(4)
        rule = "the file must be a model: this program's or llm.c's, or Hugging Face's folder"
        got = {"path": path, "first bytes": start.hex(" ") or "none"}
        known = len(start) == 4 and int.from_bytes(start, "little") in KINDS
        require(known, WHERE, rule, got, "It is something else, or damaged.")


def save(
    path: str | os.PathLike[str],
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray],
    *,
    encoding: str = "",
    sequence_length: int = 0,
) -> None:
    """Write a model file, which `daskgpt.load` reads: `.safetensors` is this program's own, `.bin` llm.c's (version 3).

    It appears under its name only when it is whole; the same bits come back.

    path              with one of these endings
    encoding          bytes or gpt2; empty = not said, and guessed from the vocabulary (.safetensors only)
    sequence_length   that it was trained on; 0 = not said, and taken to be its positions (.safetensors only)

    Dtype    float32
    Errors   ValueError for another ending, missing or unknown names, wrong shapes, a configuration that llm.c's file
             cannot express, or a layer that was replaced; TypeError unless float32; FileNotFoundError where the folder
             is missing

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> parameters = daskgpt.initial_parameters(config, seed=0)
    >>> daskgpt.save("model.safetensors", config, parameters)
    >>> same, values = daskgpt.load("model.safetensors")
    >>> same == config, all((values[name] == parameters[name]).all() for name in parameters)
    (True, True)
    """
    ending = Path(path).suffix
    rule, advice = "the ending must be .safetensors or .bin (llm.c)", "Name the file so: its ending says the format."
    require(ending in (OWN, LLMC), "save", rule, {"path": path}, advice)
    check_parameters(config, parameters)
    check_dtypes("save", parameters, np.float32)
    for name, values in parameters.items():
        rule, advice = f"every number of {name} must be finite", "Training has diverged: take an earlier model."
        got = {"not finite": int(np.count_nonzero(~np.isfinite(values)))}
        require(bool(np.isfinite(values).all()), "save", rule, got, advice)
    if ending == OWN:
        write_run_model(path, StoredModel(config, parameters, encoding, sequence_length))
    else:
        require_own_layers("save")
        write_model(path, config, parameters)


def _is_safetensors(path: Path) -> bool:
    """By its first number where that is one of llm.c's, by the bracket of the header, else by the ending."""
    start = b""
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(9)
    if int.from_bytes(start[:4], "little") in KINDS:
        return False
    return start[8:] == b"{" or path.suffix == OWN
