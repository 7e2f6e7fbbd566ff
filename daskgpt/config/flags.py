"""Command-line flags from the fields of frozen dataclasses, and the start and end of commands."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from daskgpt.config.errors import UNSET, refusal
from daskgpt.config.files import NO_ROOM, expanded
from daskgpt.config.model import PRESETS, ModelConfig, preset
from daskgpt.config.settings import help_of
from daskgpt.config.stopping import STOPPED, CanGoOn


def called(command: str) -> str:
    """Return how the user of this process calls a command: `daskgpt train`, or `python -m daskgpt.train`."""
    program = Path(*sys.argv[:1])
    if program.parts[-2:] == ("daskgpt", "__main__.py"):
        return f"python -m daskgpt {command}"
    return f"daskgpt {command}" if program.stem == "daskgpt" else f"python -m daskgpt.{command}"


def text(value: str, blank: bool = True) -> str:
    """Return the value of a flag. Errors   ArgumentTypeError if it is empty, as from an unset variable of a shell

    blank   whether white space is a value
    """
    if not (value if blank else value.strip()):
        raise argparse.ArgumentTypeError(f"it must not be empty; got {value!r}. {UNSET}")
    return value


def name(value: str) -> str:
    """Return a name. Errors   those of `text`, also for white space"""
    return text(value, blank=False)


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest flag, prints errors in one line and exits with 2.

    Flags cannot be abbreviated, since a new flag would make abbreviations ambiguous. A description keeps its lines.
    Arguments without a type, and paths, are names, which must not be empty.

    prog   `daskgpt.NAME`, which help and errors show as the user typed it
    """

    def __init__(self, prog: str, **options: Any) -> None:
        package, _, command = prog.partition(".")
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter} | options
        super().__init__(called(command) if command else package, allow_abbrev=False, **options)
        for kind in (None, str):
            self.register("type", kind, name)
        self.register("type", Path, lambda value: expanded(name(value)))

    def read(self, arguments: list[str], *configs: type) -> tuple[Any, ...]:
        """Return the values of a command line, and these configurations, whose flags are added."""
        for config in configs:
            if config is ModelConfig:
                add_model_flags(self)
            else:
                add_flags(self, config)
        values = self.parse_args(arguments)
        return values, *(from_flags(config, values) for config in configs)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            flag = message.removeprefix("unrecognized arguments: ").partition(" ")[0].split("=")[0]
            if flag.startswith("-"):
                same = [name for name in flags if "--" + "".join(w[0] for w in name[2:].split("-")) == flag]
                close = same if len(same) == 1 else get_close_matches(flag, flags, n=1, cutoff=0.7)
                advice = f"Did you mean {close[0]}?" if close else "--help lists them."
                message = f"{flag} must be a known flag. {advice}"
            else:
                trains = {"--data", "--preset"} <= {*flags}
                advice = "Name a text by --data." * trains if flag else UNSET
                message = f"{flag or repr(flag)} must follow a flag. {advice}".rstrip()
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for each field that `setting` made. Defaults of a model are its preset's. The namespace gets only
    flags that the user gave, defaults included.
    """
    title, default = (config.__doc__ or "").splitlines()[0].rstrip("."), ""
    if config is ModelConfig:
        title, default = "Numbers of the model that override the preset", "the preset's"
    group = parser.add_argument_group(title)
    for f in fields(config):
        group.add_argument(
            "--" + f.name.replace("_", "-"),
            type=text if f.metadata["blank"] else f.metadata["parse"] or type(f.default),
            default=argparse.SUPPRESS,
            choices=None if f.metadata["rows"] else f.metadata["choices"] or None,
            metavar=f.metadata["unit"].upper() or ("NUMBER" if isinstance(f.default, int | float) else f.name.upper()),
            help=help_of(f, default).replace("%", "%%"),
        )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add --preset, and a flag for each number of the model, which overrides the preset's."""
    text = f"size of the model: {', '.join(PRESETS)} (default: tiny)"
    parser.add_argument("--preset", default="tiny", help=text)
    add_flags(parser, ModelConfig)


def given_flags(config: type, values: argparse.Namespace) -> dict[str, Any]:
    """Return only the fields that the user gave."""
    return {f.name: getattr(values, f.name) for f in fields(config) if hasattr(values, f.name)}


def from_flags(config: type, values: argparse.Namespace) -> Any:
    """Return the dataclass with the values of the flags, a model with the preset's in place of others."""
    given = given_flags(config, values)
    return preset(values.preset, **given) if config is ModelConfig else config(**given)


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command line; report bad input in one line, with exit code 2 (with DASKGPT_DEBUG=1: a traceback).

    A command whose output is no longer read (`| head`) ends without a message, as other programs do.
    """
    sys.stdin = sys.stdin or StringIO()  # a closed one is empty
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):  # what a terminal cannot show, or is no text, must not end a run
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored while modules were imported
    code: int | str | None = 0
    try:
        try:
            code = main(sys.argv[1:])
        except SystemExit as ended:  # from --help and wrong flags
            code = ended.code
        finally:  # what follows takes no time: until Python has ended, Ctrl-C just ends it
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
        if os.environ.get("DASKGPT_DEBUG"):
            raise
        code = _failed(error)
    except KeyboardInterrupt:
        code = 130
        _print_error("stopped")
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # Python would try again at exit, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _failed(error: Exception) -> int:
    """Print the error that ended a command; return its exit code."""
    if isinstance(error, BrokenPipeError) and _is_unread():
        return 128 + signal.SIGPIPE
    notes = getattr(error, "__notes__", [])
    # The error of a file has its path; without one, it is that of standard output.
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        advice = "Free space there, or send the output elsewhere."
        error = refusal(OSError, "stdout", "standard output must be writable", str(error.strerror), advice)
    # The folder that a command runs in has no name where it has been removed.
    name = getattr(error, "filename", None) or "." * isinstance(error, FileNotFoundError)
    if isinstance(error, OSError) and error.errno and name:
        rule, got = "the system must give access to a file", {"path": name, "error": error.strerror}
        error = refusal(OSError, "daskgpt", rule, got, "Check the path, its permissions and its disk.")
    if str(error) == "can't start new thread":
        rule, advice = "the system must permit more threads", "Raise the process limit (ulimit -u, or a container's)."
        error = refusal(RuntimeError, "daskgpt", rule, str(error), advice)
    if isinstance(error, MemoryError):
        rule, advice = "the computation must fit in memory", "Make the model, the batch or the text smaller."
        error = refusal(MemoryError, "daskgpt", rule, str(error) or "no memory left", advice)
    if isinstance(error, UnicodeEncodeError):  # Python reads other bytes of arguments and names as lone surrogates
        got = {"text": ascii(error.object[max(0, error.start - 20) : error.end + 20])}
        error = refusal(ValueError, "daskgpt", "text must be UTF-8", got, "Convert or rename it (iconv, convmv).")
    _print_error(" ".join([str(error), *notes]))
    return STOPPED if isinstance(error, CanGoOn) else 2


def _is_unread() -> bool:
    """Return whether standard output is a pipe whose reader has ended."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(what: object) -> None:
    """Print a line on standard error, if that is open."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(what, file=sys.stderr, flush=True)
