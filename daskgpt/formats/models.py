"""The format of a model, recognized by its content for reading and by its ending for writing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.formats.huggingface import is_huggingface, open_huggingface, open_run_model, write_run_model
from daskgpt.formats.llmc import KINDS, open_model, write_model
from daskgpt.formats.safetensors import ENDING, INDEX_ENDING, tensor_path
from daskgpt.formats.stored_model import FilePath, StoredModel, refuse_pickle
from daskgpt.model.gpt2 import require_own_layers
from daskgpt.model.parameters import check_dtypes, check_parameters

LLMC = ".bin"


def open_model_file(path: FilePath) -> StoredModel:
    """Open a model of this program, of llm.c, or of Hugging Face's GPT-2, before its tensors are read.

    path     a file; or a folder with config.json (Hugging Face's), or with a model in this program's own form

    Errors   FileNotFoundError, or ValueError if it is not such a model
    """
    path = Path(path)
    if is_huggingface(path):
        return open_huggingface(path)
    if path.is_dir():
        return open_run_model(tensor_path(path))
    start = b""
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(9)
    llmc = len(start) >= 4 and int.from_bytes(start[:4], "little") in KINDS
    if not llmc and (start[8:] == b"{" or path.name.endswith((ENDING, INDEX_ENDING))):
        return open_run_model(path)
    refuse_pickle(path, "read_model_file")
    rule = "the file must be a model: this program's or llm.c's, or Hugging Face's folder"
    got = {"path": path, "first bytes": start[:4].hex(" ") or "none"}
    require(llmc or not path.is_file(), "read_model_file", rule, got, "It is another kind of file, or damaged.")
    return open_model(path)


def save(
    path: FilePath,
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray],
    *,
    encoding: str = "",
    sequence_length: int = 0,
) -> None:
    """Write a model file, which `daskgpt.load` reads: `.safetensors` is this program's own, `.bin` llm.c's (version 3).

    It appears under its name only when it is complete, and reading it returns the same bits.

    path              with one of these endings
    encoding          bytes or gpt2; empty = unknown, and guessed from the vocabulary (.safetensors only)
    sequence_length   length that it was trained on; 0 = unknown, and assumed to be its positions (.safetensors only)

    Dtype    float32
    Errors   ValueError for another ending, missing or unknown names, wrong shapes, a configuration that llm.c's file
             cannot express, or a layer that was replaced; TypeError unless float32; FileNotFoundError if the folder is
             missing

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> parameters = daskgpt.initial_parameters(config, seed=0)
    >>> daskgpt.save("model.safetensors", config, parameters)
    >>> same, values = daskgpt.load("model.safetensors")
    >>> same == config, all((values[name] == parameters[name]).all() for name in parameters)
    (True, True)
    """
    ending = Path(path).suffix
    rule, advice = "the ending must be .safetensors or .bin (llm.c)", "The ending decides the format."
    require(ending in (ENDING, LLMC), "save", rule, {"path": path}, advice)
    check_parameters(config, parameters)
    check_dtypes("save", parameters, np.float32)
    for name, values in parameters.items():
        rule, advice = f"every number of {name} must be finite", "Training has diverged: take an earlier model."
        got = {"not finite": int(np.count_nonzero(~np.isfinite(values)))}
        require(bool(np.isfinite(values).all()), "save", rule, got, advice)
    if ending == ENDING:
        write_run_model(path, StoredModel(config, parameters, encoding, sequence_length))
    else:
        require_own_layers("save")
        write_model(path, config, parameters)
