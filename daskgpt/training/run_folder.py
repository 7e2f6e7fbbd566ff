"""The folder of a run: its configuration, its metrics, its checkpoints; and the model that a path means."""

from __future__ import annotations

import fcntl
import json
import os
import time
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
from daskgpt.data.tokenizer import VOCABULARY, encoding_named, encoding_of_model
from daskgpt.formats.huggingface import INDEX, MODEL
from daskgpt.formats.models import open_model_file
from daskgpt.formats.stored_model import StoredModel
from daskgpt.formats.vocabulary import KNOWN
from daskgpt.training.checkpoint import checkpoints, find_checkpoint, remove_leftovers, set_damaged_aside
from daskgpt.training.metrics import ALWAYS, METRICS, Logs

CONFIG, LOCK = "config.toml", ".lock"


def new_folder() -> str:
    """Return a new folder below runs/: date and time, with a number where that name is taken."""
    name = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    numbered = (name.with_name(f"{name.name}-{number}") for number in count(2))
    return str(next(path for path in chain([name], numbered) if not path.exists()))


class FolderLost(RuntimeError):
    """The folder of a run was moved, removed or taken by another run while it trained."""


class RunFolder:
    """Writes a run. A new run writes nothing before `begin`; the folder of a resumed run is locked from the start.

    resumed   whether the folder holds a run that continues

    Errors    FileExistsError if a new run's folder already holds one; ValueError if no folder can be made there;
              FileNotFoundError if there is no run to resume; RuntimeError if another process trains it
    """

    def __init__(self, path: str, *, resumed: bool = False) -> None:
        self.path, self.resumed = Path(path), resumed
        self.logs = Logs()
        self.lock: BinaryIO | None = None
        self.sections: Mapping[str, Any] = {}
        found = [(self.path / name).exists() for name in (CONFIG, METRICS)]
        where, got = "RunFolder", {"out": self.path}
        if resumed:
            rule, advice = f"the folder must hold a run ({CONFIG} and {METRICS})", "Check the path of --resume."
            require(all(found), where, rule, {"resume": self.path}, advice, FileNotFoundError)
            self._lock()
            return
        if any(found) or checkpoints(self.path):
            raise self._taken()
        parent = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        rule, advice = "the path must be a folder or new", f"{parent} is a file: give another --out."
        require(parent.is_dir(), where, rule, got, advice)
        advice = f"Nothing can be written in {parent}: give another --out."
        require(os.access(parent, os.W_OK | os.X_OK), where, "the folder must be writable", got, advice)

    def begin(self, sections: Mapping[str, Any], steps: int = 0, logs: Sequence[str] = (ALWAYS,)) -> None:
        """Write the configuration and open the logs.

        steps    of a resumed run, the step that it continues from
        logs     rows of `metrics.SINKS`; the first one is always there

        Errors   FileExistsError if another run has begun here in the meantime
        """
        done = steps if self.resumed else None
        if self.resumed:
            remove_leftovers(self.path)
            set_damaged_aside(self.path, steps)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            try:  # the file of metrics claims the folder: only one of two runs that start at once can create it
                self.logs.open(ALWAYS, self.path, sections, None)
            except FileExistsError:
                raise self._taken() from None
            self._lock()
        try:
            self.configure(sections)
            for name in logs if self.resumed else logs[1:]:
                self.logs.open(name, self.path, sections, done)
        except BaseException:
            self.close()
            if not self.resumed:  # without a configuration there is no run, and the folder is free
                for path in (*(file.path for file in self.logs.files), self.path / LOCK, self.path / CONFIG):
                    path.unlink(missing_ok=True)
            raise

    def _lock(self) -> None:
        """Keep other processes from training this run; the system releases the lock when this process ends."""
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
            return  # the file system has no locks
        with suppress(OSError):  # the process id only serves the message above
            self.lock.truncate(0)
            self.lock.write(f"{os.getpid()}\n".encode())

    def is_held(self) -> bool:
        """Return whether the folder at this path still is this run's: its lock file is the one that is locked here."""
        if self.lock is None:
            return True
        own = os.fstat(self.lock.fileno())
        try:
            there = os.stat(self.path / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def require_held(self) -> None:
        """Errors   FolderLost if the folder is no longer this run's"""
        rule, advice = "the run's folder must stay where it is while it trains", "Start the run again."
        require(self.is_held(), "RunFolder", rule, {"out": self.path}, advice, FolderLost)

    def leave(self) -> tuple[Path, Path]:
        """Continue in a new folder beside the lost one, which is not touched; return both."""
        former, lock = self.path, self.lock
        numbered = (former.with_name(f"{former.name}.kept-{number}") for number in count(1))
        self.path = next(path for path in numbered if not path.exists())
        self.path.mkdir(parents=True)
        self._lock()
        if lock is not None:
            lock.close()
        for file in self.logs.files:
            file.copy_to(self.path / file.path.name)
        self.configure(self.sections)
        return former, self.path

    def configure(self, sections: Mapping[str, Any]) -> None:
        """Write the resolved configuration: a TOML table for each dataclass or mapping.

        Errors   FolderLost if the folder is no longer this run's
        """
        self.require_held()
        self.sections, lines = sections, list[str]()
        for title, section in sections.items():
            values = section if isinstance(section, Mapping) else asdict(section)
            lines += [f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
        with replacing(self.path / CONFIG, "RunFolder") as file:
            file.write("\n".join(lines).encode())

    def close(self) -> None:
        """Close the logs and unlock the folder."""
        self.logs.close()
        if self.lock is not None:
            self.lock.close()

    def _taken(self) -> FileExistsError:
        rule, got = "the folder must not hold a run already", {"out": self.path}
        return refusal(FileExistsError, "RunFolder", rule, got, "Give another --out.")


def _toml(value: Any) -> str:
    """Return a number, truth value or text as TOML, which differs from JSON in one character that must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: str | Path) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """Load a model: the newest good checkpoint of a run, a checkpoint, or a model file that `daskgpt.convert` reads.

    Shapes   those of the table, wte.weight with the rows of the padded vocabulary
    Dtype    float32
    Errors   FileNotFoundError; ValueError if the file is not such a model, or the checkpoint is damaged

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> daskgpt.save("model.bin", config, daskgpt.initial_parameters(config, seed=0))  # llm.c's format
    >>> config, parameters = daskgpt.load("model.bin")
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
    path = Path(path)
    folder, state = find_checkpoint(path) or (path, {})
    if path.is_dir() and not state:
        rule = "the folder must hold a checkpoint, or a model in this program's or Hugging Face's form"
        advice = "A run writes a checkpoint while it trains: wait, or give another path."
        holds = any((path / name).exists() for name in ("config.json", MODEL, INDEX))
        require(holds, "load", rule, {"path": path}, advice, FileNotFoundError)
    model = open_model_file(path if path.is_file() else folder)
    rule, advice = f"the file's encoding must be one of {', '.join(VOCABULARY)}", "A newer daskgpt wrote it."
    known = model.encoding in ("", *VOCABULARY) or model.encoding in KNOWN
    require(known, "load", rule, {"path": path, "encoding": model.encoding[:40]}, advice)
    return model, state


def encoding_and_length(model: StoredModel, encoding: str = "") -> tuple[str, int]:
    """Return the encoding of a model and the length of the sequences that it was trained on.

    encoding   replaces the model's own

    Errors     ValueError if neither the file nor the vocabulary determines the encoding
    """
    name = encoding_named(encoding) if encoding else model.encoding or encoding_of_model(model.config.vocabulary)
    return name, model.sequence_length or model.config.positions
