"""A checkpoint on disk: a folder with model, optimizer and state of a run after some steps, there whole or not at all.

    RUN/step-00001000/model.safetensors      in Hugging Face's names and layout
                      optimizer.safetensors  the moments, under `m.NAME` and so on, in the parameters' own shapes
                      state.json             step, seed, data, configuration, versions, SHA-256 of each file
    RUN/latest -> step-00001000
    RUN/best -> step-00000500                see `training/checkpoint`

It is written under a temporary name, brought to the disk and renamed: a kill at any moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing, set_aside, sync_folder
from daskgpt.formats.checks import read_json, short
from daskgpt.formats.layouts import in_memory
from daskgpt.formats.run_model import open_run_model, write_run_models
from daskgpt.formats.safetensors import ENDING, INDEX_ENDING, NamedTensor, TensorFiles, write_tensor_files
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import Tensor, tensors

STATE, LATEST, BEST, MODEL, OPTIMIZER = "state.json", "latest", "best", "model", "optimizer"
VERSION = 1
DIGEST = "sha256"  # of state.json's other entries, in state.json
STEP = re.compile(r"step-(\d{8,})")
READ_BYTES = 2**22


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after some steps.

    moments   "m.NAME" and so on, float32
    facts     what else state.json says: configuration, versions and so on
    shapes    of moments that do not have the parameter's shape
    """

    step: int
    model: StoredModel
    moments: Mapping[str, np.ndarray]
    facts: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not as it was written; the text says what is wrong with it."""


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return run / f"step-{step:08}"


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint: its folder under whatever name, `latest` or `best`."""
    return (path / STATE).is_file()


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, by steps, whether they are good or not."""
    found = {path: STEP.fullmatch(path.name) for path in run.iterdir()} if run.is_dir() else {}
    return sorted((path for path, match in found.items() if match and path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The number of steps in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def write_checkpoint(
    run: Path, checkpoint: Checkpoint, before: Callable[[], None] = lambda: None, *, beside: bool = True
) -> Path:
    """Write a checkpoint of a run, and let `latest` mean it.

    before   called once all of it is on the disk, before it gets its name
    beside   write the model beside its moments: a SHA-256 is a chain, and one file alone slower than the disk

    Cost     one tensor at a time, or one of each beside each other
    Errors   OSError where the system refuses, with the path and the reason; nothing of it is left then
    """
    target = step_folder(run, checkpoint.step)
    temporary = run / f".{target.name}.{_unique()}.tmp"
    temporary.mkdir()
    try:
        if beside:
            with ThreadPoolExecutor(1) as pool:
                model = pool.submit(write_run_models, temporary, checkpoint.model)
                digests = _write_moments(temporary, checkpoint) | model.result()
        else:
            digests = write_run_models(temporary, checkpoint.model) | _write_moments(temporary, checkpoint)
        files = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": digest} for name, digest in digests.items()
        }
        state = {"version": VERSION, "step": checkpoint.step, **checkpoint.facts, "files": files}
        with replacing(temporary / STATE, "write_checkpoint") as file:
            file.write(json.dumps(state | {DIGEST: _digest_of(state)}, indent=1).encode() + b"\n")
        sync_folder(temporary)
        before()
        set_aside(target, "damaged")
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(run)
    point(run / LATEST, target.name)
    return target


def _write_moments(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    kinds = sorted({name.partition(".")[0] for name in checkpoint.moments})
    table = tensors(checkpoint.model.config)
    ordered = ((f"{kind}.{name}", table[name].shape) for kind, name in product(kinds, table))
    named = [  # in the table's order, whatever the state's
        NamedTensor(key, checkpoint.shapes.get(key, shape), "F32", partial(checkpoint.moments.__getitem__, key))
        for key, shape in ordered
        if key in checkpoint.moments
    ]
    metadata = {"format": "pt", "daskgpt": json.dumps({"version": VERSION, "layout": "the shapes of parameter_shapes"})}
    return write_tensor_files(folder, named, metadata, where="write_checkpoint", name=OPTIMIZER)


def point(link: Path, name: str) -> None:
    """Let a link in a run folder mean a checkpoint from now on: at any moment it means this one or the one before."""
    temporary = link.with_name(f".{link.name}.{_unique()}.tmp")
    os.symlink(name, temporary)
    if link.is_dir() and not link.is_symlink():  # the run folder was copied by what follows links
        set_aside(link, "copy")
    os.replace(temporary, link)
    sync_folder(link.parent)


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _digest_of(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def remove_leftovers(run: Path) -> None:
    """Remove what killed processes have left half-written. Only who holds the run's lock may do so."""
    for path in run.glob(".*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def prune(run: Path, keep: int, keep_every: int, best: int = -1, spared: frozenset[Path] = frozenset()) -> None:
    """Delete all but the newest checkpoints of a run, those of each so many steps, and the best one.

    best     its step
    spared   checkpoints that are not deleted and do not count: damaged ones
    """
    good = [path for path in checkpoints(run) if path not in spared]
    for path in good[:-keep]:
        step = step_of(path)
        if step != best and not (keep_every and step % keep_every == 0):
            gone = run / f".{path.name}.{_unique()}.tmp"  # whole, or no checkpoint at all
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def newest_state(run: Path, *, model_only: bool = False) -> Iterator[tuple[Path, dict[str, Any] | DamagedCheckpoint]]:
    """The checkpoints of a run from the newest one on, each with its checked state, or what is wrong with it.

    model_only   whether the optimizer's files are not looked at
    """
    for folder in reversed(checkpoints(run)):
        try:
            yield folder, checked_state(folder, model_only=model_only)
        except DamagedCheckpoint as error:
            if folder.exists():  # else a run that goes on has deleted it meanwhile
                yield folder, error


def newest_good(
    run: Path, tell: Callable[[str], None], *, model_only: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint of a run and its state; None where there is none.

    tell   is given a line for each damaged one
    """
    for folder, state in newest_state(run, model_only=model_only):
        if not isinstance(state, DamagedCheckpoint):
            return folder, state
        tell(passed_over(folder, state))
    return None


def passed_over(folder: Path, error: DamagedCheckpoint) -> str:
    """A line on a damaged checkpoint."""
    return f"checkpoint {folder} is damaged and passed over: {error}"


def checked_state(folder: Path, *, model_only: bool = False) -> dict[str, Any]:
    """What state.json says, after it and all files (or the model's) are found to be as they were written.

    Cost     reads all files once
    Errors   DamagedCheckpoint; ValueError for a state of another version
    """
    try:
        state = read_json(folder / STATE, "read_checkpoint", STATE)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{STATE} {'is missing' if isinstance(error, OSError) else 'is no JSON'}") from error
    if state.pop(DIGEST, None) != _digest_of(state):
        raise DamagedCheckpoint(f"{STATE} is not what was written")
    rule, advice = (
        f"the version of {STATE} must be {VERSION}",
        "Read it with the daskgpt that wrote it, or a newer one.",
    )
    got = {"path": folder, "version": short(state.get("version"))}
    require(state.get("version") == VERSION, "read_checkpoint", rule, got, advice)
    if folder.resolve().name != step_folder(folder, state["step"]).name and STEP.fullmatch(folder.resolve().name):
        raise DamagedCheckpoint(f"{STATE} is that of step {state['step']}")
    for name, known in state["files"].items():
        if name.startswith(MODEL) or not model_only:
            _check_file(folder / name, known["bytes"], known["sha256"])
    return state


def _check_file(path: Path, size: int, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedCheckpoint(f"{path.name} has {found:,} bytes instead of {size:,}")
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise DamagedCheckpoint(f"{path.name} has another SHA-256 than when it was written")


def read_checkpoint(folder: Path, state: Mapping[str, Any], moments: Mapping[str, Tensor]) -> Checkpoint:
    """All of a checkpoint whose state was checked.

    moments   what the run has of them, "MOMENT.NAME" -> whose it is

    Dtype     float32, in memory of its own
    Errors    ValueError where the optimizer's file does not hold these moments of the model's tensors
    """
    model = open_run_model(_tensor_path(folder, MODEL)).loaded()
    files = TensorFiles(_tensor_path(folder, OPTIMIZER), "read_checkpoint")
    return Checkpoint(state["step"], model, _moments(files, moments), state)


def _moments(files: TensorFiles, expected: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    rule, advice = "the moments must be those of the model's tensors", "Another program wrote it."
    wrong = expected.keys() ^ files.keys()
    got = {"path": files.path, "tensor": short(min(wrong, default=""))}
    require(not wrong, "read_checkpoint", rule, got, advice)
    for name, tensor in expected.items():
        right = files[name].dtype == "F32" and files[name].shape == tensor.shape
        got = {"path": files.path, name: f"{files[name].dtype} {files[name].shape}"}
        require(right, "read_checkpoint", rule, got, advice)
    return {name: in_memory(files[name].read()) for name in expected}


def _tensor_path(folder: Path, name: str) -> Path:
    index = folder / (name + INDEX_ENDING)
    return index if index.exists() else folder / (name + ENDING)


def require_checkpoint(found: tuple[Path, dict[str, Any]] | None, run: Path) -> tuple[Path, dict[str, Any]]:
    """What newest_good has found.

    Errors   FileNotFoundError where that is nothing
    """
    if found is None:
        damaged = "All of its checkpoints are damaged: name another model, or start it again."
        advice = damaged if checkpoints(run) else "It ended before its first: start it again."
        raise refusal(FileNotFoundError, "load", "the run must have a good checkpoint", {"path": run}, advice)
    return found


@dataclass(frozen=True)
class Best:
    """Which checkpoint is the best one.

    step   of it; -1 where there is none
    loss   on the held-out text, in nats a token
    """

    step: int = -1
    loss: float = math.inf

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's state says of it."""
        return {"best": asdict(self)} if self.step >= 0 else {}


NONE = Best()


def best_of(run: Path, state: Mapping[str, Any]) -> Best:
    """What a checkpoint's state says is the best one; none where that is not there any more, or damaged."""
    best = Best(**state.get("best", {}))
    if best.step >= 0:
        try:
            checked_state(step_folder(run, best.step), model_only=True)
        except DamagedCheckpoint:
            return NONE
    return best


def point_best(run: Path, best: Best) -> None:
    """Let `best` mean a checkpoint, or be gone where there is none."""
    if best.step >= 0:
        point(run / BEST, step_folder(run, best.step).name)
    elif (run / BEST).is_symlink():
        (run / BEST).unlink()
