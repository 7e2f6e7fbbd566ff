"""Fields of configurations, from which checks, command-line flags and docstrings derive; amounts such as 10M; and rows
of tables that fields name: a built-in name, or `package.module:ROW` for a row of another module.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from numbers import Integral, Real
from textwrap import indent, wrap
from typing import Any, TypeVar, cast, dataclass_transform

from daskgpt.config.errors import refusal, refusing, require, require_known, require_named
from daskgpt.config.files import expanded

DOC_WIDTH = 67  # 80 columns with the indentation and the prefix of `help`
FIELDS = "Fields   "
MOST = 2**63 - 1  # default upper bound of a whole number: 64 bits
BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}
KINDS = {int: ("a whole number", "an int", Integral), float: ("a number", "a float", Real)}
T = TypeVar("T")
SEPARATOR = ":"
ALLOWED = "DASKGPT_MODULES"  # the environment variable with the modules that files may name, separated by commas
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def setting(
    default: str | int | float | bool,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    auto: int | None = None,
    blank: bool = False,
    rows: bool = False,
    parse: Callable[[str], Any] | None = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field that can be a flag, with help, unit and allowed values. Its default decides its type.

    choices   allowed texts; empty = all
    auto      number that the word auto stands for, if it is a value
    blank     whether white space is a valid value; it is not for names, which most texts are
    rows      whether the choices are rows of a table; a row of another module may then be given: package.module:ROW
    parse     function that converts a text to the number, such as `count` or `count_or_share`
    bounds    bounds of a number: `least` (default 0) and `most` are inclusive, `above` and `below` exclusive
    """
    if not isinstance(default, float):
        bounds = {"most": MOST} | bounds
    if "above" not in bounds:
        bounds = {"least": 0} | bounds
    if auto is not None:
        parse = _number_or_auto(auto)
    metadata: dict[str, object] = {"help": help, "unit": unit, "choices": choices, "auto": auto, "parse": parse}
    return field(default=default, metadata=metadata | {"blank": blank, "rows": rows, "bounds": bounds})


def _number_or_auto(auto: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        return auto if text == "auto" else int(text)

    parse.__name__ = "number or auto"  # shown by argparse for a text that is neither
    return parse


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Checked:
    """A configuration whose fields `setting` made, and whose values have their types and lie within their bounds. Its
    subclasses are frozen dataclasses, and their docstrings list the fields, for `help` and notebooks.

    Errors   TypeError for a value of another type, ValueError for one that is not allowed, both naming the field
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        rows: list[str] = []
        for f in fields(cls):
            text = wrap(help_of(f), DOC_WIDTH, initial_indent="    ", subsequent_indent="    ")
            rows += [f"{f.name}: {f.type}", *text]
        listed = indent("\n".join(rows), " " * len(FIELDS))
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{FIELDS}{listed[len(FIELDS) :]}\n"

    def __post_init__(self) -> None:
        where = type(self).__name__
        for f in fields(self):
            value = _of_type(where, f, getattr(self, f.name))
            object.__setattr__(self, f.name, value)
            if f.metadata["choices"] and not (f.metadata["rows"] and is_from_outside(value)):
                require_known(value, f.metadata["choices"], where, f.name)
            elif not isinstance(value, str):
                _check_bounds(where, f, value)


def _of_type(where: str, f: Field[Any], value: Any) -> Any:
    """Return the value as the type of the field: NumPy integers and auto become numbers, a path a text without ~."""
    parse = f.metadata["parse"]
    wanted: Any = int if parse else type(f.default)
    if isinstance(value, str | os.PathLike) and wanted is str:
        text = os.fspath(value)
        if text != f.default and not f.metadata["blank"]:
            require_named(text, where, f.name)
            text = str(expanded(text)) if text.startswith("~") else text
        return text
    if isinstance(value, str) and parse:
        try:
            return parse(value)
        except ValueError:
            rule, got = f"{f.name} must be a {parse.__name__}", {f.name: repr(value)}
            raise refusal(ValueError, where, rule, got, f"Try {f.default}.") from None
    kind, python, numbers = KINDS.get(wanted, ("a text", "a str", ()))
    fine = isinstance(value, numbers) and not isinstance(value, bool)
    require(fine, where, f"{f.name} must be {kind}", {f.name: repr(value)}, f"Give {python}.", TypeError)
    return wanted(value)


def _check_bounds(where: str, f: Field[Any], value: float) -> None:
    got, advice = {f.name: value}, f"Try {f.default}."
    require(not isinstance(value, float) or math.isfinite(value), where, f"{f.name} must be finite", got, advice)
    for name, bound in f.metadata["bounds"].items():
        words, holds = BOUNDS[name]
        require(holds(value, bound), where, f"{f.name} must be {words} {bound:,}", got, advice)


def help_of(f: Field[Any], default: str = "") -> str:
    """Return the help of a field with choices, unit and default, which `default` or text after "; empty = " says."""
    choices = f": {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else ""
    unit = f" [{f.metadata['unit']}]" if f.metadata["unit"] else ""
    text, _, meaning = f.metadata["help"].partition("; empty = ")
    default_word = "auto" if f.default == f.metadata["auto"] else str(f.default)
    return f"{text}{choices}{unit} (default: {default or meaning or default_word or 'none'})"


def _matched(text: str, rest: str) -> re.Match[str]:
    """Return the match of a number and of what follows it. Errors   ValueError for another text"""
    match = re.fullmatch(rf"(\d+(?:\.\d*)?|\.\d+){rest}", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    return match


def count(text: str) -> int:
    """Return the whole number of a text such as 1000, 10M, 1.5G or 1e6.

    Errors   ValueError for another text, and a number that is not whole
    """
    number, exponent, suffix = _matched(text, r"(?:e(\d{1,2}))? ?([kmgb]?)").groups()
    amount = Fraction(f"{number}e{exponent or 0}") * SUFFIXES[suffix.lower()]
    if amount.denominator > 1:
        raise ValueError(text)
    return int(amount)


def count_or_share(text: str) -> int | str:
    """Return a whole number, or a share such as 5%, which stays a text.

    Errors   ValueError for another text, or a share above 100%
    """
    if not text.endswith("%"):
        return int(text)
    share = float(_matched(text, " ?%")[1])
    if share > 100:
        raise ValueError(text)
    return f"{share:g}%"


def part_of(amount: int | str, whole: int) -> int:
    """Return an amount as a number: itself, or its share of a whole, rounded up."""
    return math.ceil(Fraction(amount.rstrip("%")) * whole / 100) if isinstance(amount, str) else amount


count.__name__ = "whole number such as 10M"  # shown by argparse for a text that is none
count_or_share.__name__ = "number or share such as 5%"


def is_from_outside(name: str) -> bool:
    """Return whether a name is that of a row in another module."""
    return SEPARATOR in name


def row_of(name: str, table: Mapping[str, T], where: str, what: str) -> T:
    """Return the row that a configuration names, from a table or from another module, which is imported.

    what     the field of the configuration

    Errors   ValueError for an unknown name, a module that cannot be imported, or one without such a row; TypeError for
             a row of another kind
    """
    if not is_from_outside(name):
        require_known(name, table, where, what)
        return table[name]
    module, _, attribute = name.partition(SEPARATOR)
    rule, advice = f"{what} must name a row of a module", "Put its folder on PYTHONPATH, of workers too."
    with refusing((ImportError, AttributeError, ValueError), where, rule, {what: name}, advice):
        row = getattr(importlib.import_module(module), attribute)
    kind = type(next(iter(table.values())))
    rule, got = f"{what} must name a row of the kind {kind.__name__}", {what: name, "type": type(row).__name__}
    require(isinstance(row, kind), where, rule, got, "Make one of the package's class.", TypeError)
    return cast(T, row)


def digests_of_modules(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source of each module from outside whose rows are named, by the name of the module.

    Errors   ValueError for a module without a file of source, which no other process could import
    """
    digests = {}
    for module in sorted({name.partition(SEPARATOR)[0] for name in names if is_from_outside(name)}):
        rule, advice = "a module whose rows are named must be a file of source", "Write its rows into a file."
        with refusing((OSError, TypeError), "model", rule, {"module": module}, advice):
            source = inspect.getsource(importlib.import_module(module))
        digests[module] = hashlib.sha256(source.encode()).hexdigest()[:12]
    return digests


def require_allowed(names: Iterable[str], where: str) -> None:
    """Refuse rows in a file unless their modules are imported or allowed: a file must not decide what code runs.

    Errors   ValueError
    """
    allowed = os.environ.get(ALLOWED, "").split(",")
    for module in [name.partition(SEPARATOR)[0] for name in names if is_from_outside(name)]:
        rule, advice = "a module that a file names must be allowed", f"If you trust it, set {ALLOWED}={module}."
        require(module in sys.modules or module in allowed, where, rule, {"module": module}, advice)
