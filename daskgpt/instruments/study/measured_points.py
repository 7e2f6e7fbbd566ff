"""The points of a study as records of measurements: a record a point, whose turns are its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daskgpt.instruments.records import PACKAGES, Figure, Record, command_line, this_machine
from daskgpt.instruments.statistics import Spread
from daskgpt.instruments.study.dials import DIALS
from daskgpt.instruments.study.numbers import model_name, model_of
from daskgpt.instruments.study.table import Row

# Column of the table -> figure, unit.
FIGURES = {
    "step_ms": ("step", "ms"),
    "critical_path_ms": ("critical_path", "ms"),
    "overlap": ("overlap", ""),
    "steps_overlap": ("steps_overlap", ""),
    "kernel_share": ("kernel_share", ""),
    "scheduling_share": ("scheduling_share", ""),
    "waiting_share": ("waiting_share", ""),
    "peak_gb": ("peak", "GB"),
}
SHARED = ("batch_size", "sequence_length", "groups", "precision", "window", "tasks", "others_cores", "loss")


def records_of(rows: Sequence[Row], arguments: Sequence[str]) -> list[Record]:
    """A record for each point of a table, in the order of its first runs.

    arguments   the command line of the study
    """
    points: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        points.setdefault(tuple(row[dial] for dial in DIALS), []).append(row)
    return [_record(own, arguments) for own in points.values()]


def _record(rows: list[Row], arguments: Sequence[str]) -> Record:
    first = rows[0]
    settings = {"model": model_name(model_of(first))} | {name: first[name] for name in (*DIALS, *SHARED)}
    return Record(
        command=command_line("daskgpt.study", arguments),
        date=str(rows[-1]["date"]),
        machine=this_machine() | {"processor": first["cpu"], "cores": first["cores"]},
        figures={
            name: Figure.of(Spread.of(row[column] for row in rows), unit)
            for column, (name, unit) in FIGURES.items()
            if all(row[column] is not None for row in rows)
        },
        versions={name: first[name] for name in ("python", "daskgpt", *PACKAGES)},
        settings={name: value for name, value in settings.items() if value is not None},
    )
