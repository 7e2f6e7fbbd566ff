"""This project's docstrings as reStructuredText, which Sphinx reads.

They are written for `help` in a terminal: paragraphs, rows of a name and a text in two columns, and examples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from itertools import groupby

ROW = re.compile(r"(\S+(?:,? \S+)*?)\s{2,}(\S.*)")  # a name, two blanks or more, a text
FIELD = re.compile(r"(\w+): ([\w |]+)")
CODE = re.compile(r"`([^`]+)`")
MARKUP = re.compile(r"([\\*|_])")


def structured(lines: list[str]) -> None:
    """Turn a docstring's lines, in place."""
    filled = groupby(lines, key=lambda line: bool(line.strip()))
    lines[:] = [line for some, paragraph in filled if some for line in [*_paragraph(list(paragraph)), ""]]


def _paragraph(lines: list[str]) -> Iterator[str]:
    if lines[0].lstrip().startswith(">>>"):
        yield from lines
    elif lines[0].startswith("Fields "):
        yield from _fields(cleandoc("\n".join([" " * 9 + lines[0].removeprefix("Fields").lstrip(), *lines[1:]])))
    elif ROW.fullmatch(lines[0]) and not _is_formula(lines[0]):
        yield from _rows(lines)
    elif all(_is_formula(line) for line in lines):
        yield from (f"| {_prose(line)}" for line in lines)
    else:
        yield from map(_prose, lines)


def _is_formula(line: str) -> bool:
    return " = " in line and not line.startswith(("Shapes ", "Dtype ", "Cost ", "Errors ", "Source "))


def _rows(lines: list[str]) -> Iterator[str]:
    """Names with their texts; a line that begins with blanks continues with the text above."""
    for line in lines:
        row = ROW.fullmatch(line)
        if row and not line.startswith(" "):
            yield f":{row[1].replace(':', ' ')}: {_prose(row[2])}"
        else:
            yield f"    {_prose(line.strip())}"


def _fields(text: str) -> Iterator[str]:
    """The fields of a configuration: `name: type`, below it what it means."""
    for line in text.splitlines():
        field = FIELD.fullmatch(line)
        yield f":{field[1]}: *{field[2]}* --" if field else f"    {_prose(line.strip())}"


def _prose(text: str) -> str:
    """Text without markup, but for `code`."""
    parts = CODE.split(text)
    return "".join(f"``{part}``" if number % 2 else MARKUP.sub(r"\\\1", part) for number, part in enumerate(parts))
