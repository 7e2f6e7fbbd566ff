"""Command-line flags from the fields of frozen dataclasses."""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

from daskgpt.config.errors import nearest, refusal
from daskgpt.config.settings import help_of
from daskgpt.config.stopping import STOPPED, CanGoOn
from daskgpt.config.synonyms import answer

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest flag, says one line and exits with 2.

    No flag may be shortened, which a new one would make ambiguous; a description's lines stay as they are.
    """

    def __init__(self, *, allow_abbrev: bool = False, **options: Any) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter} | options
        super().__init__(allow_abbrev=allow_abbrev, **options)

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
            metavar=f.metadata["unit"].upper() or ("NUMBER" if isinstance(f.default, int | float) else f.name.upper()),
            help=help_of(f, "the preset's" if of_preset else "").replace("%", "%%"),
        )


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that describe a step instead of running it."""
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print tasks and memory of a step and whether they fit here, and run nothing",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="with --plan: of a step that so many workers share, what each sends, and what one runs and holds",
    )


def from_flags(config: type, values: argparse.Namespace) -> Any:
    """The dataclass with what the flags say."""
    given = vars(values)
    return config(**{f.name: given[f.name] for f in fields(config) if f.name in given})


def given_flags(config: type, values: argparse.Namespace) -> dict[str, Any]:
    """Only the fields that the user gave."""
    return {f.name: getattr(values, f.name) for f in fields(config) if hasattr(values, f.name)}


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command line: what is wrong with its input is one line and exit code 2 (DASKGPT_DEBUG=1: the traceback).

    Where nobody reads what is printed any more (`| head`) a command ends without a word, as other programs do.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what an ASCII terminal cannot show ends no run
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # taken away while modules were imported
    code: Any = 0
    try:
        try:
            code = main(sys.argv[1:])
        except SystemExit as ended:  # of --help, and of flags that are wrong
            code = ended.code
        _flush(sys.stdout)
    except (ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
        if os.environ.get("DASKGPT_DEBUG"):
            raise
        code = _failed(error)
    except KeyboardInterrupt:
        code = 130
        _tell("stopped")
    for stream in (sys.stdout, sys.stderr):
        _abandon(stream)
    sys.exit(code)


def _failed(error: Exception) -> int:
    """Say what ended a command, and with which code it ends."""
    if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
        return 128 + signal.SIGPIPE
    # A file's error comes with its path, this one from what is printed.
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        advice = "Make room where it goes, or send it elsewhere."
        error = refusal(OSError, "stdout", "what is printed must have somewhere to go", str(error.strerror), advice)
    if isinstance(error, MemoryError):
        rule, advice = "what is computed must fit into memory", "Make the model, the batch or the text smaller."
        error = refusal(MemoryError, "daskgpt", rule, str(error) or "no memory left", advice)
    _tell(error)
    return STOPPED if isinstance(error, CanGoOn) else 2


def _is_unread(stream: TextIO | None) -> bool:
    """Whether a stream is a pipe whose reader has gone."""
    if stream is None or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _tell(what: object) -> None:
    """A line on stderr, if anybody reads it."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(what, file=sys.stderr, flush=True)


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


def _abandon(stream: TextIO | None) -> None:
    """Send what a stream could not get rid of nowhere: Python would try it again, and complain, as it ends."""
    try:
        _flush(stream)
    except OSError:
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _type(f: Field[Any]) -> Callable[[str], Any]:
    default = f.default
    assert default is not MISSING
    if f.metadata["parse"]:
        parse: Callable[[str], Any] = f.metadata["parse"]
        return parse
    return _number_or(f.metadata["words"]) if f.metadata["words"] else type(default)


def _number_or(words: Mapping[str, int]) -> Callable[[str], int]:
    def number(text: str) -> int:
        return words[text] if text in words else int(text)

    number.__name__ = f"number or {' or '.join(words)}"  # argparse says this of a text that is neither
    return number
