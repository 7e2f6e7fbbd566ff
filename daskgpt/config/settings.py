"""Fields of configurations, from which checks, command-line flags and docstrings derive."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from inspect import cleandoc
from numbers import Integral, Real
from textwrap import indent, wrap
from typing import Any, TypeVar

from daskgpt.config.errors import nearest, refusal, require
from daskgpt.config.rich import html_table

DOC_WIDTH = 67  # with the indentation and what `help` puts before it, 80 columns
FIELDS = "Fields   "
MOST = 2**63 - 1  # of a whole number that says nothing else: what 64 bits hold

Config = TypeVar("Config", bound=type)


@dataclass(frozen=True)
class Bounds:
    """What a number may be: `least` to `most`, above `above`, below `below`; None where nothing bounds it."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def hold(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def rule(self, value: float) -> str:
        """What must hold, after the name of the number, where a value does not."""
        if self.most is not None and value > self.most:
            return f"must be at most {self.most:,}"
        if self.below is not None:
            return (
                f"must lie between {self.above} and {self.below}"
                if self.least is None
                else f"must lie in [{self.least}, {self.below})"
            )
        return "must not be negative" if self.least == 0 else f"must be at least {self.least}"

    def advice(self, value: float, default: Any) -> str:
        if self.most is not None and value > self.most:
            return "Give a smaller one."
        return f"Try {default}." if self.least is None or self.below is not None else f"Give {self.least} or more."


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: int = MOST,
    zero: str = "",
    negative: str = "",
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that can be a flag, with its help text, unit and allowed values. The default tells its type.

    choices                the texts that are allowed, all if none is named
    least, above, below    the numbers that are allowed, see Bounds
    most                   the largest whole number that is allowed
    zero, negative         a word that may be given for the number 0, or for -1
    parse                  what a text means that may be given for the number (see `config.amounts`); its name says what
                           that is
    """
    words = {word: number for word, number in {zero: 0, negative: -1}.items() if word}
    known: dict[str, Any] = {"help": help, "unit": unit, "choices": choices, "words": words}
    known["bounds"] = Bounds(least, above, below, None if isinstance(default, float) else most)
    return field(default=default, metadata=known | {"parse": parse})


@dataclass(frozen=True)
class Checked:
    """A configuration of fields that `setting` made: it holds only values of their types, within their bounds.

    Errors   TypeError for a value of another type, ValueError for one that is not allowed, both naming the field
    """

    def __post_init__(self) -> None:
        where = type(self).__name__
        for f in fields(self):
            value = _of_type(where, f, getattr(self, f.name))
            object.__setattr__(self, f.name, value)
            _check(where, f, value)

    def _repr_html_(self) -> str:
        """For notebooks: a row a field, those first that are not what nobody says."""
        own = sorted(fields(self), key=lambda f: getattr(self, f.name) == f.default)
        rows = [[f.name, _shown(f, getattr(self, f.name)), help_of(f)] for f in own]
        return html_table(type(self).__name__, rows)


def _shown(f: Field[Any], value: Any) -> str:
    """A value as it would be given, with a star where it is not the default."""
    words = {number: word for word, number in f.metadata["words"].items()}
    text = str(words.get(value, value)) if not isinstance(value, str) else value or "none"
    return text if value == f.default else f"{text} *"


def _of_type(where: str, f: Field[Any], value: Any) -> Any:
    """The value as the type of the field: NumPy's whole numbers are, a word for one is, and a path is a text."""
    wanted = int if f.metadata["parse"] else type(f.default)
    if isinstance(value, str) and value in f.metadata["words"]:
        return f.metadata["words"][value]
    if isinstance(value, str) and f.metadata["parse"]:
        return _parsed(where, f, value)
    if wanted is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if wanted is float and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if wanted is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    kinds = {int: ("a whole number", "an int"), float: ("a number", "a float"), str: ("a text", "a str")}
    kind, python = kinds[wanted]
    raise refusal(TypeError, where, f"{f.name} must be {kind}", {f.name: repr(value)}, f"Give {python}.")


def _parsed(where: str, f: Field[Any], text: str) -> Any:
    parse = f.metadata["parse"]
    try:
        return parse(text)
    except ValueError:
        rule = f"{f.name} must be a {parse.__name__}"
        raise refusal(ValueError, where, rule, {f.name: repr(text)}, f"Try {f.default}.") from None


def _check(where: str, f: Field[Any], value: Any) -> None:
    got = {f.name: value}
    if choices := f.metadata["choices"]:
        require(value in choices, where, f"{f.name} must be known", got, nearest(value, list(choices)))
    if isinstance(value, str):
        return
    bounds: Bounds = f.metadata["bounds"]
    # A whole number is finite, and may be too large for a float.
    require(isinstance(value, int) or math.isfinite(value), where, f"{f.name} must be finite", got, f"Try {f.default}.")
    require(bounds.hold(value), where, f"{f.name} {bounds.rule(value)}", got, bounds.advice(value, f.default))


def help_of(f: Field[Any], default: str = "") -> str:
    """What a field means, its choices, unit and default; `default` says it in other words."""
    text = f.metadata["help"]
    unit = f" [{f.metadata['unit']}]" if f.metadata["unit"] else ""
    if f.metadata["choices"]:
        text += ": " + ", ".join(f.metadata["choices"])
    words = {number: word for word, number in f.metadata["words"].items()}
    own = words.get(f.default, f.default) if words else f.default
    return f"{text}{unit} (default: {default or ('none' if own == '' else own)})"


def documented(config: Config) -> Config:
    """Write the fields of a dataclass, all made by `setting`, into its docstring, for `help` and notebooks."""
    rows: list[str] = []
    for f in fields(config):
        rows += [f"{f.name}: {f.type}", *wrap(help_of(f), DOC_WIDTH, initial_indent="    ", subsequent_indent="    ")]
    listed = indent("\n".join(rows), " " * len(FIELDS))
    config.__doc__ = f"{cleandoc(config.__doc__ or '')}\n\n{FIELDS}{listed[len(FIELDS) :]}\n"
    return config
