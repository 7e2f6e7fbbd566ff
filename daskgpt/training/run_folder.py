"""The folder of a run: its configuration, one line of metrics a step, its model."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.formats.llmc import read_model, write_model

CONFIG, METRICS, MODEL = "config.toml", "metrics.jsonl", "model.bin"


class RunFolder:
    """Writes a run. Nothing exists on disk before `create`.

    Errors   FileExistsError where the folder already holds a run
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        if any((self.path / name).exists() for name in (CONFIG, METRICS, MODEL)):
            raise FileExistsError(
                f"RunFolder: the folder must not hold a run already; got out={self.path}. Give another --out."
            )
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(
                f"RunFolder: the path must be a folder or new; got out={self.path}. Give another --out."
            )

    def create(self, sections: dict[str, Any]) -> None:
        """Make the folder and write the resolved configuration, a TOML table a dataclass or mapping."""
        self.path.mkdir(parents=True, exist_ok=True)
        lines = []
        for title, section in sections.items():
            values = section if isinstance(section, dict) else asdict(section)
            lines += [f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
        (self.path / CONFIG).write_text("\n".join(lines))
        self.metrics = (self.path / METRICS).open("w", buffering=1)

    def log(self, record: dict[str, Any]) -> None:
        """Append one step to the metrics."""
        self.metrics.write(json.dumps(record) + "\n")

    def save(self, config: GPT2Config, parameters: dict[str, np.ndarray]) -> Path:
        """Write the model file and close the metrics."""
        self.metrics.close()
        write_model(self.path / MODEL, config, parameters)
        return self.path / MODEL


def load(path: str | Path) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """A model from a run folder or a llm.c model file.

    Errors   FileNotFoundError, or ValueError where the file is not such a model
    """
    path = Path(path)
    return read_model(path / MODEL if path.is_dir() else path)


def trained_with(path: str | Path, config: GPT2Config) -> tuple[str, int]:
    """Encoding and sequence length of a model: what its run folder says, else what the model itself tells."""
    path = Path(path)
    written = (path if path.is_dir() else path.parent) / CONFIG
    if written.exists():
        data = tomllib.loads(written.read_text())["data"]
        return str(data["encoding"]), int(data["sequence_length"])
    return "gpt2" if config.vocabulary == 50257 else "bytes", config.positions
