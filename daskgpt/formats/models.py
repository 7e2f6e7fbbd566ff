"""Which format a model file has: told by its content when it is read, by its ending when it is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.formats.llmc import KINDS, read_model, write_model
from daskgpt.formats.run_model import StoredModel, read_run_model, write_run_model

OWN, LLMC = ".safetensors", ".bin"


def read_model_file(path: str | os.PathLike[str]) -> StoredModel:
    """A model from the run's own file, or from one of llm.c.

    Errors   FileNotFoundError, or ValueError where the file is not such a model
    """
    path = Path(path)
    return read_run_model(path) if _is_safetensors(path) else StoredModel(*read_model(path))


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
             cannot express; TypeError unless float32; FileNotFoundError where the folder is missing
    """
    ending = Path(path).suffix
    rule, advice = "the ending must be .safetensors or .bin (llm.c)", "Name the file so: its ending says the format."
    require(ending in (OWN, LLMC), "save", rule, {"path": path}, advice)
    if ending == OWN:
        write_run_model(path, StoredModel(config, parameters, encoding, sequence_length))
    else:
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
