"""Command-line flags from the fields of frozen dataclasses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from io import TextIOWrapper
from typing import Any, NoReturn

from daskgpt.config.errors import nearest
from daskgpt.config.settings import help_of
from daskgpt.config.synonyms import answer


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest flag, says one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments"):
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            name = unknown[0].split("=")[0]
            if name.startswith("-"):
                message = f"{name} must be a known flag. {answer(name, known) or nearest(name, known)}"
            else:
                message = f"{name} must follow a flag. " + "A text is named by --data." * ("--data" in known)
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def add_flags(parser: argparse.ArgumentParser, config: type, *, title: str = "", of_preset: bool = False) -> None:
    """A flag for each field that `setting` made. The namespace gets only what the user gave, also if it is the default.

    of_preset   whether a preset decides the default
    """
    group = parser.add_argument_group(title or (config.__doc__ or "").splitlines()[0].rstrip("."))
    for f in fields(config):
        flag = "--" + f.name.replace("_", "-")
        group.add_argument(
            flag,
            type=_type(f),
            default=argparse.SUPPRESS,
            choices=f.metadata["choices"] or None,
            metavar=f.metadata["unit"].upper() or ("NUMBER" if _type(f) in (int, float) else f.name.upper()),
            help=help_of(f, "the preset's" if of_preset else "").replace("%", "%%"),
        )


def from_flags(config: type, values: argparse.Namespace) -> Any:
    """The dataclass with what the flags say."""
    given = vars(values)
    return config(**{f.name: given[f.name] for f in fields(config) if f.name in given})


def given_flags(config: type, values: argparse.Namespace) -> dict[str, Any]:
    """Only the fields that the user gave."""
    return {f.name: getattr(values, f.name) for f in fields(config) if hasattr(values, f.name)}


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command line: what is wrong with its input is one line and exit code 2 (DASKGPT_DEBUG=1: the traceback)."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what an ASCII terminal cannot show ends no run
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        if os.environ.get("DASKGPT_DEBUG"):
            raise
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _type(f: Field[Any]) -> Callable[[str], Any]:
    default = f.default
    assert default is not MISSING
    return type(default)
