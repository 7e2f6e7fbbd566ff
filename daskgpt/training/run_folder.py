"""The folder of a run: its configuration, its metrics, its checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import open_no_link, replacing
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig
from daskgpt.data.dataset import RANDOM
from daskgpt.data.tokenizer import VOCABULARY, encoding_named, encoding_of_model, vocabulary_size
from daskgpt.formats.huggingface import is_huggingface
from daskgpt.formats.models import open_model_file
from daskgpt.formats.stored_model import StoredModel
from daskgpt.formats.vocabulary import KNOWN, is_learned
from daskgpt.training.checkpoint import (
    DamagedCheckpoint,
    checked_state,
    checkpoints,
    is_checkpoint,
    newest_good,
    remove_leftovers,
    require_checkpoint,
)
from daskgpt.training.metrics import ALWAYS, METRICS, Logs, metrics_lines

CONFIG, LOCK = "config.toml", ".lock"
MODEL = "model.safetensors"  # of a checkpoint
MODELS = (MODEL, "model.bin")  # what older versions wrote into the run folder itself


def new_folder() -> str:
    """A folder under runs/ for a run that was given none: date and time, and a number where that is taken."""
    name = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    numbered = (name.with_name(f"{name.name}-{number}") for number in count(2))
    return str(next(path for path in chain([name], numbered) if not path.exists()))


class FolderLost(RuntimeError):
    """The folder of a run was moved, removed or taken by another run while it trained."""


class RunFolder:
    """Writes a run. Nothing of a new run exists on disk before `begin`; one that is gone on with is held from here on.

    resumed   whether it is gone on with

    Errors    FileExistsError where a new run's folder already holds one; ValueError where no folder can be made there;
              FileNotFoundError where there is no run to go on with; RuntimeError where another process trains it
    """

    def __init__(self, path: str, *, resumed: bool = False) -> None:
        self.path, self.resumed = Path(path), resumed
        self.logs = Logs()
        self.lock: BinaryIO | None = None
        self.sections: Mapping[str, Any] = {}
        if resumed:
            rule, advice = f"the folder must hold a run ({CONFIG} and {METRICS})", "Check the path of --resume."
            holds = (self.path / CONFIG).is_file() and (self.path / METRICS).is_file()
            require(holds, "RunFolder", rule, {"resume": self.path}, advice, FileNotFoundError)
            self._hold()
            return
        if any((self.path / name).exists() for name in (CONFIG, METRICS, *MODELS)) or checkpoints(self.path):
            raise self._taken()
        parent = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        where, got = "RunFolder", {"out": self.path}
        rule, advice = "the path must be a folder or new", f"{parent} is a file: give another --out."
        require(parent.is_dir(), where, rule, got, advice)
        advice = f"Nothing can be written in {parent}: give another --out."
        require(os.access(parent, os.W_OK | os.X_OK), where, "the folder must be writable", got, advice)

    def begin(self, sections: Mapping[str, Any], steps: int = 0, logs: Sequence[str] = (ALWAYS,)) -> None:
        """Write the configuration, and open the metrics: empty for a new run, else with the first so many steps.

        logs     rows of `logs.SINKS`, of which the first is the one that is always there

        Errors   FileExistsError where another run has come here since
        """
        done = steps if self.resumed else None
        remove_leftovers(self.path) if self.resumed else self._claim(sections)
        try:
            self.configure(sections)
            for name in logs if self.resumed else logs[1:]:
                self.logs.open(name, self.path, sections, done)
        except BaseException:
            self.close()
            if not self.resumed:  # without a configuration it is no run, and holds no folder
                for path in (*(file.path for file in self.logs.files), self.path / LOCK, self.path / CONFIG):
                    path.unlink(missing_ok=True)
            raise

    def _claim(self, sections: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # The file of metrics is what a run holds a folder by: only one of two that start at once can make it.
            self.logs.open(ALWAYS, self.path, sections, None)
        except FileExistsError:
            raise self._taken() from None
        self._hold()

    def _hold(self) -> None:
        """Keep other processes from going on with this run; the system lets go of it when this process ends."""
        self.lock = open_no_link(self.path / LOCK, "a+b")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            holder = self.lock.read(20).decode(errors="replace").strip()
            self.lock.close()
            rule, advice = "no other process must train this run", "Wait for its end, or stop it."
            got = {"resume": self.path, "process": holder}
            raise refusal(RuntimeError, "RunFolder", rule, got, advice) from None
        except OSError:
            return  # a file system without locks: whoever starts two at once there has to know
        with suppress(OSError):  # it only serves to say who
            self.lock.truncate(0)
            self.lock.write(f"{os.getpid()}\n".encode())

    def is_held(self) -> bool:
        """Whether the folder at this path is still this run's: it holds the lock file that this process has locked."""
        if self.lock is None:
            return True
        own = os.fstat(self.lock.fileno())
        try:
            there = os.stat(self.path / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def require_held(self) -> None:
        """Errors   FolderLost where another run has the folder by now, or nobody"""
        rule, advice = "the run's folder must stay where it is while it trains", "Start the run again."
        require(self.is_held(), "RunFolder", rule, {"out": self.path}, advice, FolderLost)

    def leave(self) -> tuple[Path, Path]:
        """Go on in a new folder beside, because the former one is lost; return both. The former is not touched."""
        former, lock = self.path, self.lock
        numbered = (former.with_name(f"{former.name}.kept-{number}") for number in count(1))
        self.path = next(path for path in numbered if not path.exists())
        self.path.mkdir(parents=True)
        self._hold()
        if lock is not None:
            lock.close()
        for file in self.logs.files:
            file.copy_to(self.path / file.path.name)
        self.configure(self.sections)
        return former, self.path

    def known_metrics(self, steps: int) -> list[dict[str, Any]]:
        """What the metrics say of the first so many steps; a step may be missing."""
        return [record for record, _ in metrics_lines(self.path / METRICS, steps)]

    def configure(self, sections: Mapping[str, Any]) -> None:
        """Write the resolved configuration, or write it again: a TOML table a dataclass or mapping.

        Errors   FolderLost where the folder is not this run's any more
        """
        self.require_held()
        self.sections, lines = sections, list[str]()
        for title, section in sections.items():
            values = section if isinstance(section, Mapping) else asdict(section)
            lines += [f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
        with replacing(self.path / CONFIG, "RunFolder") as file:
            file.write("\n".join(lines).encode())

    def close(self) -> None:
        """Close the metrics, and let go of the folder: the run has ended, well or not."""
        self.logs.close()
        if self.lock is not None:
            self.lock.close()

    def _taken(self) -> FileExistsError:
        return refusal(
            FileExistsError,
            "RunFolder",
            "the folder must not hold a run already",
            {"out": self.path},
            "Give another --out.",
        )


def _toml(value: Any) -> str:
    """A number, truth value or text as TOML: JSON writes them alike, but for the one character it does not escape."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: str | Path) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """A model: the newest good checkpoint of a run folder, a checkpoint, or a model file that `daskgpt.convert` knows.

    Shapes   those of the table, wte.weight with the rows of the padded vocabulary
    Dtype    float32
    Errors   FileNotFoundError, or ValueError where the file is not such a model

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> daskgpt.save("model.bin", config, daskgpt.initial_parameters(config, seed=0))  # llm.c's format
    >>> config, parameters = daskgpt.load("model.bin")
    >>> config.blocks, parameters["ln_f.weight"].dtype
    (1, dtype('float32'))
    """
    model = read_model_of(path)
    return model.config, dict(model.parameters)


def read_model_of(path: str | Path) -> StoredModel:
    """What a run folder, a checkpoint or a model file holds.

    Errors   FileNotFoundError, or ValueError where the file is not such a model, or a checkpoint is damaged
    """
    return open_model_of(path).loaded()


def open_model_of(path: str | Path) -> StoredModel:
    """The same, before its tensors are read. A damaged checkpoint that is passed over is a line on stderr."""
    path = Path(path)
    model = open_model_file(_model_of(path))
    rule, advice = f"the file's encoding must be one of {', '.join(VOCABULARY)}", "A newer daskgpt wrote it."
    known = model.encoding in ("", *VOCABULARY) or model.encoding in KNOWN
    require(known, "load", rule, {"path": path, "encoding": model.encoding[:40]}, advice)
    return model


def _model_of(path: Path) -> Path:
    """Where the model is: of a run in the newest good checkpoint, or the file that an older version wrote."""
    if is_checkpoint(path):
        try:
            checked_state(path, model_only=True)
        except DamagedCheckpoint as error:
            rule, advice = "the checkpoint must be as it was written", "Name its run: the newest good one is taken."
            raise refusal(ValueError, "load", rule, f"path={path} ({error})", advice) from error
        return path
    if path.is_file() and is_checkpoint(path.parent):
        _model_of(path.parent)  # its checksum is beside it
        return path
    if checkpoints(path):
        return require_checkpoint(newest_good(path, _warn, model_only=True), path)[0]
    if not path.is_dir() or is_huggingface(path):
        return path
    found = [path / name for name in MODELS if (path / name).exists()]
    rule, advice = (
        "the folder must hold a checkpoint, or be Hugging Face's",
        "A run writes them while it trains: wait, or name another.",
    )
    require(bool(found), "load", rule, {"path": path}, advice, FileNotFoundError)
    return found[0]


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def trained_with(path: str | Path, model: StoredModel, encoding: str = "") -> tuple[str, int]:
    """Encoding and sequence length of a model: what its run folder says, else its file, else what its sizes tell.

    encoding   in place of its own

    Errors     ValueError where nothing tells the encoding
    """
    data = data_of(path)
    known = (data.encoding, data.sequence_length) if data else (model.encoding, model.sequence_length)
    name = encoding_named(encoding) if encoding else known[0] or encoding_of_model(model.config.vocabulary)
    return name, known[1] or model.config.positions


def data_of(path: str | Path) -> DataConfig | None:
    """What a run was trained on, None for a model file that belongs to no run.

    path     run folder, a checkpoint in it, or its model file

    Errors   ValueError where the folder's configuration is not that of a run
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    written = (folder.resolve().parent if is_checkpoint(folder) else folder) / CONFIG
    if not written.is_file():
        return None
    try:
        # Runs from before there were groups had one, and those from before there were epochs none.
        known = {"groups": 1, "order": RANDOM} | tomllib.loads(written.read_text(encoding="utf-8"))["data"]
        data = DataConfig(**{name: type(default)(known[name]) for name, default in asdict(DataConfig()).items()})
        if not is_learned(data.encoding):  # else it is in the model's file
            vocabulary_size(data.encoding)
        return data
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if is_checkpoint(folder) or (path.is_file() and path.name not in MODELS):
            return None  # a model that lies beside somebody else's file of that name
        raise refusal(
            ValueError,
            "load",
            f"{CONFIG} must be that of a run",
            f"path={written} ({type(error).__name__})",
            f"Name the model file by another path than a run's: copy {MODEL} to a folder of its own.",
        ) from error
