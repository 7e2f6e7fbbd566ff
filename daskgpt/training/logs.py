"""Where a run's metrics go: a table, one row a form, and one way to write all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from daskgpt.config.errors import nearest, refusal, require
from daskgpt.training.metrics_file import open_metrics
from daskgpt.training.record_file import RecordFile
from daskgpt.training.tensorboard_file import open_tensorboard


@dataclass(frozen=True)
class Sink:
    """A form of the metrics.

    open      (folder, configuration by sections, steps that were made before or None for a new run) -> its file
    package   what must be installed for it, by an extra of the sink's name
    """

    open: Callable[[Path, Mapping[str, Any], int | None], RecordFile]
    package: str = ""


SINKS = {
    "metrics": Sink(open_metrics),  # always written: a run is gone on with from it
    "tensorboard": Sink(open_tensorboard, package="tensorboard"),
}
ALWAYS = "metrics"


def chosen_sinks(log: str, out: str) -> tuple[str, ...]:
    """Names of the rows that a run writes to, by its settings `log` (names with commas between them) and `out`.

    Errors   ValueError for an unknown name, or where there is no folder; RuntimeError where its package is missing
    """
    names = [part.strip() for part in log.split(",") if part.strip()]
    known = [name for name in SINKS if name != ALWAYS]
    for name in names:
        require(name in SINKS, "train", "the log must be known", {"log": name}, nearest(name, known))
        require(bool(out), "train", "a log must have a folder", {"log": name}, "Give RunConfig(out=...).")
        if (package := SINKS[name].package) and find_spec(package) is None:
            rule, got = f"{package} must be installed", {"log": name}
            raise refusal(RuntimeError, "train", rule, got, f"Install it with pip install 'daskgpt[{name}]'.")
    return tuple(dict.fromkeys([ALWAYS, *names]))


class Logs:
    """All files that a run's metrics go to."""

    def __init__(self) -> None:
        self.files: list[RecordFile] = []

    def open(self, name: str, folder: Path, sections: Mapping[str, Any], done: int | None) -> None:
        self.files.append(SINKS[name].open(folder, sections, done))

    def log(self, record: Mapping[str, Any]) -> list[tuple[Path, OSError]]:
        """Append one step to each; a number that is not finite, which JSON does not know, as null.

        What has no room is kept and written once there is: an error for each file for which that is new.
        """
        valid = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        errors = []
        for file in self.files:
            waited = bool(file.unwritten)
            try:
                file.log(valid)
            except OSError as error:
                errors += [(file.path, error)] * (not waited)
        return errors

    def write(self) -> None:
        """Write what is not written yet. Errors   OSError where there is no room for it"""
        for file in self.files:
            file.write()

    def sync(self) -> None:
        """Let the records so far be on the disk. Errors   OSError where they are not all written"""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()
