"""The program `daskgpt`, whose commands are the modules of this package that have a `main`.

`daskgpt train`, `python -m daskgpt train` and `python -m daskgpt.train` are the same.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import NoReturn

from daskgpt import __version__
from daskgpt.config.errors import nearest, require
from daskgpt.config.flags import run_command

COMMANDS = {
    "train": "train a model, or continue a run",
    "generate": "write text with a model, or chat with it",
    "evaluate": "loss, perplexity and bits per byte of a text",
    "audit": "compute parts of a run again, and compare them with what it has written",
    "rewind": "compute any tensor of a step of a run again, or show its batch",
    "prepare": "turn text into folders of tokens that training reads",
    "convert": "turn a model into another program's files, or theirs into this one's",
    "plot": "draw the curves of runs",
    "bench": "time training steps, or measure what plans predict from",
    "study": "compare ways to run a step",
}


def console() -> NoReturn:
    """Run the command that the first word names. Only its module is imported, so that every command starts fast."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "help":
        name, rest = rest[0] if rest else "--help", ["--help"]
    if name not in COMMANDS:
        run_command(lambda _: _without_command(name))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run_command`, as for `python -m`: see daskgpt/__init__.py
    sys.argv[1:] = rest
    run_command(import_module(f"daskgpt.{name}").main)


def _without_command(word: str) -> int:
    """Answer a word that stands in the place of a command."""
    if word in ("--version", "-V"):
        print(f"daskgpt {__version__}")
        return 0
    advice = "See daskgpt --help." if word.startswith("-") else nearest(word, list(COMMANDS))
    require(word in ("--help", "-h"), "daskgpt", "the first word must be a command", {"command": word}, advice)
    print("usage: daskgpt COMMAND ...\n")
    print("Train language models (GPT-2, Llama) as a Dask dataflow of Numba kernels, on CPUs.\n\ncommands:")
    for name, description in COMMANDS.items():
        print(f"  {name:10} {description}")
    print("\ndaskgpt COMMAND --help lists the flags of a command, daskgpt --version says the version.")
    return 0


if __name__ == "__main__":
    console()
