"""A run of `daskgpt.train` as a process: its progress and output, and a comparison with an undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from command_lines import PATIENCE, run, write_text
from small_runs import losses_of, steps_in, tensors_of

from daskgpt.config.stopping import STOPPED

NO_END = 1_000_000  # steps, more than there will be


class WatchedRun:
    """A run on a cluster, with the text that it reads; it ends with this at the latest.

    flags   of the model and its batches, which the undisturbed run also has
    """

    def __init__(self, folder: Path, flags: str) -> None:
        self.out, self.whole, self.errors = folder / "run", folder / "whole", folder / "errors"
        self.common = ["--data", write_text(folder), *flags.split(), "--schedule", "constant", "--validate-every", "0"]
        self.metrics = self.out / "metrics.jsonl"

    def start(
        self,
        scheduler: str,
        *flags: object,
        steps: int = NO_END,
        heard: Callable[[str], None] = lambda line: None,
        wrapped: Callable[[list[str]], list[str]] = lambda command: command,
    ) -> WatchedRun:
        """Begin.

        heard     called with each line that it prints, by another thread
        wrapped   the command with what comes before it
        """
        settings = ["--scheduler", scheduler, "--out", self.out, "--steps", steps, *flags]
        command = [sys.executable, "-m", "daskgpt.train", *map(str, [*self.common, *settings])]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(wrapped(command), stdout=subprocess.PIPE, stderr=errors, text=True)
        self.listener = threading.Thread(target=self._listen, args=(heard,))
        self.listener.start()
        return self

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.join()

    def _listen(self, heard: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard(line.rstrip())

    @property
    def step(self) -> int:
        """How many steps the metrics tell of."""
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    @property
    def loss(self) -> float | None:
        """Of the last of them."""
        return self._records()[-1]["loss"] if self.step else None

    @property
    def lost(self) -> list[tuple[int, float]]:
        """Of each loss that it has made up for: steps that were made again, and seconds."""
        return [(record["lost_steps"], record["lost_s"]) for record in self._records() if "lost_s" in record]

    def _records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def require_going(self) -> None:
        """Errors   AssertionError if it has ended"""
        ended = self.process.poll()
        assert ended is None, f"it ended with {ended}: {self.errors.read_text()}"

    def stop(self) -> int:
        """Let it end after its step; how many were made.

        Errors   AssertionError if it does not end well
        """
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        assert code == STOPPED, f"exit code {code}: {self.errors.read_text()}"
        return steps_in(self.out)[-1]

    def require_undisturbed(self, steps: int, what: str) -> None:
        """Losses, model and moments must be those of as many steps with threads, each step once in the metrics.

        Errors   AssertionError with the words given
        """
        whole = "--scheduler", "threads", "--steps", steps, "--out", self.whole
        done = run("train", *self.common, *whole, seconds=PATIENCE + steps / 20)  # a long campaign makes many steps
        assert done.returncode == 0, done.stderr
        # It may have been stopped as it made some steps again: the metrics are then ahead of the model.
        assert losses_of(self.out)[:steps] == losses_of(self.whole), f"{what}: other losses"
        assert tensors_of(self.out) == tensors_of(self.whole), f"{what}: other bits"
