"""Records of measurements by tools, in the form of `--record` of `daskgpt.bench`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from daskgpt.profiling.records import Figure, Spread, append_records, check_records, measured


def add_record_flag(parser: ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, metavar="FILE", help="add what was measured to a file of records")


def check_record(path: Path | None) -> None:
    """Errors   as of `check_records`, before anything is measured"""
    if path:
        check_records(path)


def record(
    path: Path | None,
    tool: str,
    arguments: Sequence[str],
    figures: Mapping[str, Figure],
    what: str,
    against: str = "",
    **settings: Any,
) -> None:
    """Add a record of a tool's measurement, if --record is given.

    tool      its file's name, such as benchmarks/overheads.py
    what      was measured, in words
    settings  the same for a table
    """
    if path:
        found = measured(f"python {tool}", arguments, figures, {"what": what, **settings})
        append_records(path, [replace(found, against=against)])


def figures_of(spreads: Mapping[str, Spread], unit: str, factor: float = 1) -> dict[str, Figure]:
    """Return the figures of several quantities in one unit."""
    return {name: Figure.of(spread, unit, factor) for name, spread in spreads.items()}
