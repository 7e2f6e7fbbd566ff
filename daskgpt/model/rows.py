"""Tables whose rows may be replaced, compared with the package's own rows by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import unwrap
from types import CodeType
from typing import Any

PACKAGE = "daskgpt."


class Table:
    """A table and the package's own rows, taken where the table is defined, so before anyone can replace one."""

    def __init__(self, rows: Callable[[], Mapping[str, Any]]) -> None:
        """rows   returns the present rows by their names for people"""
        self.rows = rows
        # A kernel can be replaced in its own module before the table is defined: such a row is nobody's own.
        self.own = {name: content(row) for name, row in rows().items() if not foreign_functions(row)}

    def replaced(self) -> dict[str, Any]:
        """Return the rows that are not the package's own, by name; None for a row that is gone."""
        present = self.rows()
        changed = [name for name, row in present.items() if self.own.get(name) != content(row)]
        return dict.fromkeys(self.own.keys() - present.keys()) | {name: present[name] for name in changed}


def named(rows: Mapping[str, Any], *, coded: bool = False) -> str:
    """Return the names of rows, each with a function that it now has, if it has one: `GELU=mine.relu`.

    coded   whether a digest of each row's content follows: functions of one name may differ between two processes
    """
    words = []
    for name, row in sorted(rows.items()):
        names = [name_of(value) for value in parts(row) if callable(value)]
        # One that is not the package's tells the most.
        names = [name for name in names if not name.startswith(PACKAGE)] or [n for n in names if "<lambda>" not in n]
        function = f"={names[0]}" if names else ""
        words.append(f"{name}{function}{f' ({content(row)[:8]})' if coded else ''}")
    return ", ".join(words)


def content(row: Any) -> str:
    """Return a digest of a row's values and of its functions' code, which is equal in equal processes."""
    texts = [text_of(value) if callable(value) else repr(value) for value in parts(row)]
    return hashlib.sha256("\n".join(texts).encode(errors="backslashreplace")).hexdigest()


def foreign_functions(row: Any) -> list[Any]:
    """Return the functions of a row that are not the package's."""
    return [value for value in parts(row) if callable(value) and not name_of(value).startswith(PACKAGE)]


def parts(value: Any) -> Iterator[Any]:
    """Yield the functions and the other single values in nested rows, mappings and sequences, in order."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.items())
    elif isinstance(value, partial):
        value = value.func, value.args, value.keywords
    if isinstance(value, list | tuple):
        for item in value:
            yield from parts(item)
    else:
        yield value


def name_of(function: Any) -> str:
    """Return the full name of a function, or of the class of another callable."""
    named_object = function if hasattr(function, "__qualname__") else type(function)
    return f"{named_object.__module__}.{named_object.__qualname__}"


def text_of(function: Any) -> str:
    """Return the full name of a function and its code, with defaults and the values that it encloses."""
    inner = unwrap(getattr(function, "py_func", function))
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    enclosed = [cell.cell_contents for cell in cells if not callable(cell.cell_contents)]
    bound = getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None), enclosed
    return f"{name_of(function)} {code_of(code) if code else ''} {bound if any(bound) else ''}"


def code_of(code: CodeType) -> str:
    """Return bytecode, names and constants as text, without places in files and memory."""
    constants = [code_of(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
