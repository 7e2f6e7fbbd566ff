"""The folder of a run: its configuration, one line of metrics a step, its model."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import not_written, replacing
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig
from daskgpt.data.encodings import VOCABULARY, encoding_of, vocabulary_size
from daskgpt.formats.huggingface import is_huggingface
from daskgpt.formats.models import open_model_file
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.run_model import StoredModel, write_run_model

CONFIG, METRICS, MODEL = "config.toml", "metrics.jsonl", "model.safetensors"
MODELS = (MODEL, "model.bin")  # the second is what older versions wrote


def new_folder() -> str:
    """A folder under runs/ for a run that was given none: date and time, and a number where that is taken."""
    name = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    numbered = (name.with_name(f"{name.name}-{number}") for number in count(2))
    return str(next(path for path in chain([name], numbered) if not path.exists()))


class RunFolder:
    """Writes a run. Nothing exists on disk before `create`.

    Errors   FileExistsError where the folder already holds a run; ValueError where no folder can be made there
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if any((self.path / name).exists() for name in (CONFIG, METRICS, *MODELS)):
            raise self._taken()
        parent = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        where, got = "RunFolder", {"out": self.path}
        rule, advice = "the path must be a folder or new", f"{parent} is a file: give another --out."
        require(parent.is_dir(), where, rule, got, advice)
        advice = f"Nothing can be written in {parent}: give another --out."
        require(os.access(parent, os.W_OK | os.X_OK), where, "the folder must be writable", got, advice)

    def create(self, sections: Mapping[str, Any]) -> None:
        """Make the folder, and in it the configuration and an empty file of metrics.

        Errors   FileExistsError where another run has come here since
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # The file of metrics is what a run holds a folder by: only one of two that start at once can make it.
            self.metrics = (self.path / METRICS).open("xb", buffering=0)
        except FileExistsError:
            raise self._taken() from None
        try:
            self.configure(sections)
        except BaseException:  # without a configuration it is no run, and holds no folder
            self.metrics.close()
            (self.path / METRICS).unlink()
            raise

    def configure(self, sections: Mapping[str, Any]) -> None:
        """Write the resolved configuration, or write it again: a TOML table a dataclass or mapping."""
        lines = []
        for title, section in sections.items():
            values = section if isinstance(section, Mapping) else asdict(section)
            lines += [f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
        with replacing(self.path / CONFIG, "RunFolder") as file:
            file.write("\n".join(lines).encode())

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one step to the metrics; a number that is not finite, which JSON does not know, as null.

        Errors   OSError where there is no room for all of the line: nothing of it is left then
        """
        valid = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line, before = f"{json.dumps(valid, allow_nan=False)}\n".encode(), self.metrics.tell()
        try:
            while line:
                line = line[self.metrics.write(line) :]
        except OSError as error:
            self.metrics.truncate(before)
            raise not_written(error, "RunFolder", self.path / METRICS) from error

    def save(self, model: StoredModel) -> Path:
        """Write the model file."""
        write_run_model(self.path / MODEL, model)
        return self.path / MODEL

    def close(self) -> None:
        """Close the metrics: the run has ended, well or not."""
        self.metrics.close()

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
    """A model: from a run folder, or from a model file of this program (.safetensors) or of llm.c (.bin).

    Shapes   those of the table, wte.weight with the rows of the padded vocabulary
    Dtype    float32
    Errors   FileNotFoundError, or ValueError where the file is not such a model
    """
    model = read_model_of(path)
    return model.config, dict(model.parameters)


def read_model_of(path: str | Path) -> StoredModel:
    """What a run folder or a model file holds.

    Errors   FileNotFoundError, or ValueError where the file is not such a model
    """
    model = open_model_of(path)
    return StoredModel(model.config, model.parameters(), model.encoding, model.sequence_length)


def open_model_of(path: str | Path) -> OpenedModel:
    """The same, before its tensors are read."""
    path = Path(path)
    if path.is_dir() and not is_huggingface(path):
        found = [path / name for name in MODELS if (path / name).exists()]
        rule, advice = (
            f"the run folder must hold a {MODEL}",
            "A run writes it at its end: wait for that, or name another.",
        )
        require(bool(found), "load", rule, {"path": path}, advice, FileNotFoundError)
        path = found[0]
    model = open_model_file(path)
    rule, advice = f"the file's encoding must be one of {', '.join(VOCABULARY)}", "A newer daskgpt wrote it."
    require(model.encoding in ("", *VOCABULARY), "load", rule, {"path": path, "encoding": model.encoding[:40]}, advice)
    return model


def trained_with(path: str | Path, model: StoredModel) -> tuple[str, int]:
    """Encoding and sequence length of a model: what its run folder says, else its file, else what its sizes tell."""
    data = data_of(path)
    known = (data.encoding, data.sequence_length) if data else (model.encoding, model.sequence_length)
    return known[0] or encoding_of(model.config.vocabulary), known[1] or model.config.positions


def data_of(path: str | Path) -> DataConfig | None:
    """What a run was trained on, None for a model file that belongs to no run.

    path     run folder, or the model file in it

    Errors   ValueError where the folder's configuration is not that of a run
    """
    path = Path(path)
    written = (path if path.is_dir() else path.parent) / CONFIG
    if not written.is_file():
        return None
    try:
        # Runs from before there were groups had one.
        known = {"groups": 1} | tomllib.loads(written.read_text(encoding="utf-8"))["data"]
        data = DataConfig(**{name: type(default)(known[name]) for name, default in asdict(DataConfig()).items()})
        vocabulary_size(data.encoding)
        return data
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if path.is_file() and path.name not in MODELS:
            return None  # a model file that lies beside somebody else's file of that name
        raise refusal(
            ValueError,
            "load",
            f"{CONFIG} must be that of a run",
            f"path={written} ({type(error).__name__})",
            f"Name the model file by another path than a run's: copy {MODEL} to a folder of its own.",
        ) from error
