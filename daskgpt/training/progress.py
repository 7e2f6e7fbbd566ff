"""What a person sees while steps run: one line in a terminal or notebook, plain lines now and then in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.std import EMA

SMOOTHING = 0.1  # share of the newest step in what is shown: a mean over about ten
OUTLIER = 5  # times the mean, more than which no step counts for in the time that is left
PLAIN_EVERY = 30  # seconds between the lines in a file
LEAST_BAR = 6  # columns; a shorter one says nothing
MOST_COLUMNS = 120  # of the line, in however wide a window
DEFAULT_COLUMNS = 80  # of a notebook, and of a terminal that does not tell
LABEL = 11  # columns of `scheduler  ` and the like, under which the rest of a long line goes on


class Progress:
    """A run's steps, shown where somebody looks: in a terminal, a notebook or a file.

    A terminal and a notebook have one line that is written over, and a line that stays for each validation. A file has
    the latter and a line at the first step and each `plain_every` seconds. `quiet` shows nothing at all.

    done     steps that an earlier process has made
    stream   where the line goes; None = stdout in a notebook, whose parts of one stream stay together, else stderr
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
        plain_every: float = PLAIN_EVERY,
    ) -> None:
        notebook = in_notebook()
        self.steps, self.plain_every = steps, plain_every
        self.stream = stream or (sys.stdout if notebook else sys.stderr)
        self.quiet = quiet or self.stream is None
        self.live = not self.quiet and (notebook or self.stream.isatty())
        self.gone: set[TextIO] = set()  # streams that take nothing any more
        self.last_line = -float("inf")
        self.first = self.done = done
        self.validation = ""
        self.loss, self.rate, self.seconds = (EMA(SMOOTHING) for _ in range(3))
        self.line: _Line | None = None

    def begin(self) -> None:
        """The first step starts."""
        self.start = self.last_step = time.perf_counter()
        if self.live:
            self.line = _Line(self, self.stream)

    def say(self, text: str) -> None:
        """Lines that stay, on stdout: they belong to what a run prints, whoever looks on."""
        if self.quiet:
            return
        width = columns(sys.stdout) if sys.stdout and sys.stdout.isatty() else 0
        self._keep("\n".join(wrapped(line, width) for line in text.splitlines()), sys.stdout)

    def show(self, text: str) -> None:
        """A text that stays, its lines as they are."""
        if not self.quiet:
            self._keep(text, sys.stdout)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done; its metrics are those of a line of metrics.jsonl."""
        now = time.perf_counter()
        self.done += 1
        self.loss(metrics["loss"])
        self.rate(metrics["tokens_per_s"])
        known = self.seconds()  # a step that waited for workers says nothing of those to come
        self.seconds(min(now - self.last_step, OUTLIER * known) if known else now - self.last_step)
        self.last_step = now
        validated = "validation_loss" in metrics
        if validated:
            self.validation = f"{metrics['validation_loss']:.3f}"
        if not self.quiet and (validated or (not self.live and now - self.last_line >= self.plain_every)):
            self.last_line = now
            room = columns(self.stream) - 1 if self.stream.isatty() else sys.maxsize
            self._keep(self.kept(validated, room, best=metrics.get("best", False)), self.stream)
        if self.line is not None:
            self._unless_gone(self.line.update)

    def expect(self, steps: int) -> None:
        """Another number of steps in all."""
        self.steps = steps
        if self.line is not None:
            self.line.total = steps

    def close(self) -> None:
        """Take the line away; what was kept stays."""
        if self.line is not None:
            self._unless_gone(self.line.close)

    def _unless_gone(self, show: Callable[[], object]) -> None:
        """Write to the live line, until its terminal is closed: the run goes on without."""
        try:
            show()
        except OSError:
            self.gone.add(self.stream)
            self.line = None

    def kept(self, validated: bool, room: int, *, best: bool = False) -> str:
        """The line of a step that stays: with the time since the start after a validation, else with what is left.

        best   whether the validation loss is the lowest so far
        """
        head = f"step {self.count}  "
        passed = tqdm.format_interval(time.perf_counter() - self.start)
        time_told = f"after {passed}" if validated else self.left
        shown = self.validation + " (best)" * best if validated else ""
        return head + self._words(shown, f"{self.rate():,.0f} tokens/s", time_told, room - len(head))

    def live_words(self, room: int) -> str:
        """What stands beside the bar: as much as there is room for."""
        if self.done == self.first:
            return ""
        rate = f"{tqdm.format_sizeof(self.rate())} tokens/s"
        return self._words(self.validation, rate, self.left, room)

    @property
    def count(self) -> str:
        """Steps done and to do, as wide at the start as at the end."""
        whole = f"{self.steps:,}"
        return f"{self.done:{len(whole)},}/{whole}"

    @property
    def left(self) -> str:
        return f"{tqdm.format_interval((self.steps - self.done) * self.seconds())} left"

    def _words(self, validation: str, rate: str, time_told: str, room: int) -> str:
        loss = f"loss {self.loss():.3f}"
        long, short = ((f"{name} {validation}" if validation else "") for name in ("validation", "val"))
        variants = (
            (loss, long, rate, time_told),
            (loss, short, rate, time_told),
            (loss, short, time_told),
            (loss, short),
            (loss,),
        )
        texts = (", ".join(filter(None, words)) for words in variants)
        return next((text for text in texts if len(text) <= room), "")

    def _keep(self, text: str, stream: TextIO) -> None:
        if stream is None or stream in self.gone:
            return
        try:
            tqdm.write(text, file=stream)
            stream.flush()
        except OSError:
            # Its reader has gone, or its disk is full: what is shown may be lost, what is learnt must not.
            self.gone.add(stream)


class _Line(tqdm):
    """tqdm's line, with the words of a run beside the bar and never wider than the terminal."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self.progress = progress
        super().__init__(
            total=progress.steps,
            initial=progress.done,
            file=stream,
            leave=False,
            ncols=DEFAULT_COLUMNS,
            disable=False,
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        # The last column stays free: some terminals go on to the next line once it is written.
        width = min(columns(self.progress.stream), MOST_COLUMNS) - 1
        count = self.progress.count
        words = self.progress.live_words(width - len(count) - 1)
        text = f"{count} {words}".rstrip()
        bar = "|{bar}| " if width - len(text) - len("|| ") >= LEAST_BAR else ""
        known: dict[str, Any] = super().format_dict
        return known | {"ncols": width, "bar_format": f"{count} {bar}{words}"}


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def columns(stream: TextIO) -> int:
    """How wide a stream's terminal is, as of now: a window can be resized."""
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        found = 0
    return found if found > 1 and not in_notebook() else DEFAULT_COLUMNS


def wrapped(line: str, width: int) -> str:
    """A line of the header cut at words, what follows below its first word; links stay whole, as all does with 0."""
    if not 0 < width < len(line) or width <= 2 * LABEL:
        return line
    indent = " " * LABEL
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
