"""The progress of a run: one live line in a terminal or notebook, plain lines now and then in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from textwrap import fill
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.std import EMA

SMOOTHING = 0.1  # share of the newest step in the numbers that are shown: a mean of about ten steps
OUTLIER = 5  # times the mean: no step counts for more in the estimate of the time that is left
PLAIN_EVERY = 30  # seconds between the lines in a file
LEAST_BAR = 6  # columns; a shorter bar is left out
MOST_COLUMNS = 120  # of the live line, however wide the window
DEFAULT_COLUMNS = 80  # of a notebook, and of a terminal of unknown width
LABEL = 11  # columns of `scheduler  ` and the like, by which continued lines are indented


class Progress:
    """Shows the steps of a run.

    A terminal or a notebook has one line that is overwritten, and a lasting line for each validation. A file has the
    latter, and a line at the first step and now and then.

    done     how many steps earlier processes have made
    quiet    whether to show nothing
    stream   of the lines; None for stdout in a notebook, which shows streams apart, else stderr
    """

    def __init__(self, steps: int, *, done: int = 0, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.steps, notebook = steps, in_notebook()
        self.stream = stream or (sys.stdout if notebook else sys.stderr)
        self.quiet = quiet or self.stream is None
        self.live = not self.quiet and (notebook or self.stream.isatty())
        self.closed: set[TextIO] = set()  # streams whose reader has ended
        self.last_line = -float("inf")
        self.first = self.done = done
        self.validation = ""
        self.loss, self.rate, self.seconds = (EMA(SMOOTHING) for _ in range(3))
        self.line: _Line | None = None

    def begin(self) -> None:
        """Note the time at which the first step begins, and show the live line."""
        self.start = self.last_step = time.perf_counter()
        if self.live:
            self.line = _Line(self, self.stream)

    def say(self, text: str) -> None:
        """Print lines on stdout, wrapped to the terminal."""
        width = columns(sys.stdout) if not self.quiet and sys.stdout and sys.stdout.isatty() else 0
        self.show("\n".join(wrapped(line, width) for line in text.splitlines()))

    def show(self, text: str) -> None:
        """Print a text on stdout, its lines as they are."""
        self._print(text, sys.stdout)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step that was made, by the metrics of its line in metrics.jsonl."""
        now = time.perf_counter()
        self.done += 1
        self.loss(metrics["loss"])
        self.rate(metrics["tokens_per_s"])
        usual = self.seconds()  # a step that waited for workers says nothing about later ones
        self.seconds(min(now - self.last_step, OUTLIER * usual) if usual else now - self.last_step)
        self.last_step = now
        validated = "validation_loss" in metrics
        if validated:
            self.validation = f"{metrics['validation_loss']:.3f}"
        if not self.quiet and (validated or (not self.live and now - self.last_line >= PLAIN_EVERY)):
            self.last_line = now
            room = columns(self.stream) - 1 if self.stream.isatty() else sys.maxsize
            # With the time since the start after a validation, else with the time that is left.
            best = " (best)" if validated and metrics.get("best") else ""
            passed = f"after {tqdm.format_interval(now - self.start)}" if validated else self.left
            head, rate = f"step {self.count}  ", f"{self.rate():,.0f} tokens/s"
            shown = self.validation + best if validated else ""
            self._print(head + self._words(shown, rate, passed, room - len(head)), self.stream)
        if self.line is not None:
            try:
                self.line.update()
            except OSError:  # the terminal was closed: the run continues without it
                self.closed.add(self.stream)
                self.line = None

    def close(self) -> None:
        """Remove the live line; printed lines stay."""
        line, self.line = self.line, None
        if line is not None:
            with suppress(OSError):
                line.close()

    def live_words(self, room: int) -> str:
        """Return the words beside the bar, as many as there is room for."""
        if self.done == self.first:
            return ""
        rate = f"{tqdm.format_sizeof(self.rate())} tokens/s"
        return self._words(self.validation, rate, self.left, room)

    @property
    def count(self) -> str:
        """Steps made and all steps, as wide at the start as at the end."""
        whole = f"{self.steps:,}"
        return f"{self.done:{len(whole)},}/{whole}"

    @property
    def left(self) -> str:
        return f"{tqdm.format_interval((self.steps - self.done) * self.seconds())} left"

    def _words(self, validation: str, rate: str, duration: str, room: int) -> str:
        """Return losses, rate and time; where there is no room for all, the less important ones are left out."""
        loss = f"mean loss {self.loss():.3f}"  # unlike that of the last step, which the end of a run reports
        long, short = ((f"{name} {validation}" if validation else "") for name in ("validation", "val"))
        fewer = (loss, short, duration), (loss, short), (loss,)
        variants = (loss, long, rate, duration), (loss, short, rate, duration), *fewer
        texts = (", ".join(filter(None, words)) for words in variants)
        return next((text for text in texts if len(text) <= room), "")

    def _print(self, text: str, stream: TextIO) -> None:
        if self.quiet or stream is None or stream in self.closed:
            return
        try:
            tqdm.write(text, file=stream)
            stream.flush()
        except OSError:  # its reader has ended, or its disk is full: the run continues without it
            self.closed.add(stream)


class _Line(tqdm):
    """tqdm's line with words beside the bar, never wider than the terminal."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self.progress = progress
        total, done = progress.steps, progress.done
        super().__init__(total=total, initial=done, file=stream, leave=False, ncols=DEFAULT_COLUMNS, disable=False)

    @property
    def format_dict(self) -> dict[str, Any]:
        # The last column stays free: some terminals begin the next line once it is written.
        width = min(columns(self.progress.stream), MOST_COLUMNS) - 1
        count = self.progress.count
        words = self.progress.live_words(width - len(count) - 1)
        text = f"{count} {words}".rstrip()
        bar = "|{bar}| " if width - len(text) - len("|| ") >= LEAST_BAR else ""
        values: dict[str, Any] = super().format_dict
        return values | {"total": self.progress.steps, "ncols": width, "bar_format": f"{count} {bar}{words}"}


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def columns(stream: TextIO) -> int:
    """Return the current width of a stream's terminal: a window can be resized."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        width = 0
    return width if width > 1 and not in_notebook() else DEFAULT_COLUMNS


def wrapped(line: str, width: int) -> str:
    """Return a line of the header wrapped at words and indented; links stay whole. A width of 0 changes nothing."""
    if not 0 < width < len(line) or width <= 2 * LABEL:
        return line
    indent = " " * LABEL
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
