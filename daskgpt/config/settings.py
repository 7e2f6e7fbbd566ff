"""Fields of configurations, from which command-line flags and docstrings derive."""

from __future__ import annotations

from dataclasses import Field, field, fields
from inspect import cleandoc
from textwrap import indent, wrap
from typing import Any, TypeVar

from daskgpt.config.errors import nearest, require

DOC_WIDTH = 67  # with the indentation and what `help` puts before it, 80 columns
FIELDS = "Fields   "

Config = TypeVar("Config", bound=type)


def setting(default: Any, help: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that can be a flag, with its help text, unit and allowed values."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices})


def one_of(config: Any, name: str) -> None:
    choices = next(f for f in fields(config) if f.name == name).metadata["choices"]
    value = getattr(config, name)
    require(
        value in choices, type(config).__name__, f"{name} must be known", {name: value}, nearest(value, list(choices))
    )


def help_of(f: Field[Any], default: str = "") -> str:
    """What a field means, its choices, unit and default; `default` says it in other words."""
    text = f.metadata["help"]
    unit = f" [{f.metadata['unit']}]" if f.metadata["unit"] else ""
    if f.metadata["choices"]:
        text += ": " + ", ".join(f.metadata["choices"])
    return f"{text}{unit} (default: {default or ('none' if f.default == '' else f.default)})"


def documented(config: Config) -> Config:
    """Write the fields of a dataclass, all made by `setting`, into its docstring, for `help` and notebooks."""
    rows: list[str] = []
    for f in fields(config):
        rows += [f"{f.name}: {f.type}", *wrap(help_of(f), DOC_WIDTH, initial_indent="    ", subsequent_indent="    ")]
    listed = indent("\n".join(rows), " " * len(FIELDS))
    config.__doc__ = f"{cleandoc(config.__doc__ or '')}\n\n{FIELDS}{listed[len(FIELDS) :]}\n"
    return config
