"""Measurements as data: lines of JSON with command, machine, versions and turns, in files that `--record` adds to.

`python -m daskgpt.bench --json` prints such a line.
"""

from __future__ import annotations

import json
import math
import shlex
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import check_writable, written
from daskgpt.profiling.measure import Spread, figure, origin, rounded, significant

AGREE = 1e-4  # relative: what rounding to so many digits leaves between a median and that of the turns
WHERE = "records"


@dataclass(frozen=True)
class Figure:
    """One quantity of a measurement.

    unit            ms, GB, tokens/s ...; "" for a ratio or a share
    median          of the turns, or the only value; None if only a range is known
    least, largest  of the turns; None if only the median is known, or there is one turn
    q1, q3          quartiles of the turns
    turns           every value, in the order of measuring; empty if they are not known
    n               number of turns
    """

    unit: str
    median: float | None = None
    least: float | None = None
    largest: float | None = None
    q1: float | None = None
    q3: float | None = None
    turns: tuple[float, ...] = ()
    n: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        values = [n for n in (self.least, self.q1, self.median, self.q3, self.largest) if n is not None]
        fine = bool(values) and all(_is_number(value) for value in (*values, *self.turns)) and values == sorted(values)
        pairs = (self.least is None) == (self.largest is None) and (self.q1 is None) == (self.q3 is None)
        if fine and self.turns:
            spread = Spread(self.turns)
            same = [(self.median, spread.median), (self.least, min(self.turns)), (self.largest, max(self.turns))]
            fine = all(a is None or math.isclose(a, b, rel_tol=AGREE, abs_tol=AGREE) for a, b in same)
            fine &= self.n in (None, spread.n)
        rule = "a figure must have finite numbers, least <= q1 <= median <= q3 <= largest, and be that of its turns"
        require(fine and pairs and isinstance(self.unit, str), WHERE, rule, {"figure": self}, "Mend it.")

    @classmethod
    def of(cls, spread: Spread, unit: str, factor: float = 1) -> Figure:
        """Return the figure of measured turns, which are multiplied by a factor; a single value has no spread."""
        return cls(**figure(Spread.of(value * factor for value in spread.values), unit))

    @classmethod
    def single(cls, value: float, unit: str) -> Figure:
        """Return the figure of one value."""
        return cls(unit, significant(value), n=1)

    def text(self, digits: int | None = None) -> str:
        """Return the median with the least and the largest turn, if known, such as `42.9 ms (38.9 .. 47.8)`."""
        texts = [rounded(value, digits) for value in (self.median, self.least, self.largest) if value is not None]
        return " ".join(filter(None, (texts[0], self.unit, f"({texts[1]} .. {texts[2]})" if texts[1:] else "")))


@dataclass(frozen=True)
class Record:
    """One measurement.

    command    the command that repeats the measurement
    date       ISO 8601
    machine    processor, cores, features (instruction sets)
    figures    by name
    versions   of Python, daskgpt and other packages, by name
    settings   of the measurement: model, batch, precision ...
    against    the program that it is compared with; "" if there is none
    note       further information for readers
    """

    command: str
    date: str
    machine: Mapping[str, Any]
    figures: Mapping[str, Figure]
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        texts = (self.command, self.date, self.against, self.note)
        rule = "a record must have a command, a date (ISO 8601), a machine and figures, as words, tables and figures"
        tables = (self.machine, self.figures, self.versions, self.settings)
        fine = all(isinstance(text, str) for text in texts) and all(isinstance(table, Mapping) for table in tables)
        fine = fine and bool(self.command and self.figures) and {"processor", "cores"} <= set(self.machine)
        try:
            datetime.fromisoformat(self.date)
        except (TypeError, ValueError):
            fine = False
        require(fine, WHERE, rule, {"command": self.command, "date": self.date}, "Add what is missing.")

    def line(self) -> bytes:
        """Return the record as a line of a file, without empty fields.

        Errors   ValueError for a value that JSON cannot express
        """
        values = {name: value for name, value in asdict(self).items() if value}
        for name, quantity in self.figures.items():
            values["figures"][name] = {key: part for key, part in asdict(quantity).items() if part not in (None, ())}
        return f"{json.dumps(values, allow_nan=False)}\n".encode()

    @classmethod
    def of_line(cls, line: bytes) -> Record:
        """Return the record of a line.

        Errors   ValueError for a line that is not a record
        """
        try:
            values = json.loads(line)
            figures = {name: Figure(**parts) for name, parts in values.pop("figures").items()}
            return cls(figures=figures, **values)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise refusal(ValueError, WHERE, "a line must be a record", f"{line[:60]!r}", f"({error})") from None


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
    settings  the same for a table; those that are None are left out
    """
    if path:
        command = command_line(f"python {tool}", arguments)
        settings = {name: value for name, value in settings.items() if value is not None}
        made = Record(command, figures=figures, settings={"what": what, **settings}, against=against, **origin())
        append_records(path, [made])


def figures_of(spreads: Mapping[str, Spread], unit: str, factor: float = 1) -> dict[str, Figure]:
    """Return the figures of several quantities in one unit."""
    return {name: Figure.of(spread, unit, factor) for name, spread in spreads.items()}


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a measurement without recording it."""
    recording = ArgumentParser(add_help=False, allow_abbrev=False)
    recording.add_argument("--record")
    _, others = recording.parse_known_args(arguments)
    return shlex.join([*program.split(), *others])


def check_records(path: str | Path) -> None:
    """Check that records can be added to a file, before anything is measured.

    Errors   ValueError if it cannot be written, or has other content; OSError if it cannot be read
    """
    check_writable(path, WHERE, "--record")
    if Path(path).exists():
        read_records(path)


def read_records(path: str | Path) -> list[Record]:
    """Return the records of a file.

    Errors   ValueError with the number of a line that is not a record
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            records.append(Record.of_line(line))
        except ValueError as error:
            rule, got = "every line of the file must be a record", {"record": path, "line": number}
            raise refusal(ValueError, WHERE, rule, got, f"{error}") from None
    return records


def append_records(path: str | Path, records: Iterable[Record]) -> None:
    """Add records to a file, which may be new.

    Errors   ValueError if the file has other content; OSError if it cannot be written
    """
    check_records(path)
    with written(path, WHERE), open(path, "ab") as file:
        file.write(b"".join(record.line() for record in records))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
