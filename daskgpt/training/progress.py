"""The progress of a run: one live line in a terminal or notebook, plain lines now and then in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.std import EMA

from daskgpt.config.files import printable

SMOOTHING = 0.1  # share of the newest step in the numbers that are shown: a mean of about ten steps
PLAIN_EVERY = 30  # seconds between the lines in a file
LIVE = "{n_fmt}/{total_fmt} |{bar}| {desc}"  # tqdm's line


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
        self.first = self.done = done
        self.validation = ""
        self.loss, self.rate = EMA(SMOOTHING), EMA(SMOOTHING)
        self.start, self.last_line = time.perf_counter(), -float("inf")
        self.line: tqdm | None = None

    def begin(self) -> None:
        """Note the time at which the first step begins, and show the live line."""
        self.start = time.perf_counter()
        if self.live:
            options = {"leave": False, "dynamic_ncols": True, "bar_format": LIVE, "disable": False}
            self.line = tqdm(total=self.steps, initial=self.done, file=self.stream, **options)

    def say(self, text: str) -> None:
        """Print a text on stdout."""
        self._print(text, sys.stdout)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step that was made, by the metrics of its line in metrics.jsonl."""
        now = time.perf_counter()
        self.done += 1
        self.loss(metrics["loss"])
        self.rate(metrics["tokens_per_s"])
        left = f"{tqdm.format_interval((self.steps - self.done) * (now - self.start) / (self.done - self.first))} left"
        validated = "validation_loss" in metrics
        if validated:
            self.validation = f"validation {metrics['validation_loss']:.3f}"
        if not self.quiet and (validated or (not self.live and now - self.last_line >= PLAIN_EVERY)):
            self.last_line = now
            # With the time since the start after a validation, else with the time that is left.
            words = self.validation + " (best)" * ("best" in metrics) if validated else ""
            words = self._words(words, f"after {tqdm.format_interval(now - self.start)}" if validated else left)
            self._print(f"step {self.done:,}/{self.steps:,}  {words}", self.stream)
        if self.line is not None:
            try:
                self.line.set_description_str(self._words(self.validation, left), refresh=False)
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

    def _words(self, validation: str, duration: str) -> str:
        """Return losses, rate and time; the mean loss, since the end of a run reports that of the last step."""
        parts = f"mean loss {self.loss():.3f}", validation, f"{self.rate():,.0f} tokens/s", duration
        return ", ".join(filter(None, parts))

    def _print(self, text: str, stream: TextIO) -> None:
        if self.quiet or stream is None or stream in self.closed:
            return
        try:
            tqdm.write(printable(text), file=stream)
            stream.flush()
        except OSError:  # its reader has ended, or its disk is full: the run continues without it
            self.closed.add(stream)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config
