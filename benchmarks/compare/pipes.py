"""Processes that answer calls over pipes: both ends."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal
from daskgpt.config.stopping import delayed_interrupts
from daskgpt.schedulers import machine

BENCHMARKS = Path(__file__).parent.parent


@dataclass(frozen=True)
class TorchOptions:
    """How PyTorch runs the model.

    compiled   through torch.compile
    bf16       matrix products in bfloat16 (autocast)
    """

    compiled: bool = False
    bf16: bool = False

    def describe(self, version: str, *kinds: str) -> str:
        """Return PyTorch and how it runs, for people."""
        options = ["bfloat16 autocast" if self.bf16 else "float32", *["compiled"] * self.compiled]
        return ", ".join([f"PyTorch {version}", *kinds, *options])


class Process:
    """A Python process that runs a module of this folder, whose `serve` answers the calls that are sent here."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", f"compare.{module}"]
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "PYTHONPATH": path}
        with delayed_interrupts():  # this process handles Ctrl-C, and ends the other one then
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if kind is not None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def send(self, name: str, *arguments: Any) -> None:
        """Call a function there; `answer` returns its result.

        Errors   RuntimeError if the process has ended; what it printed stands above
        """
        try:
            pickle.dump((name, arguments), self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Return the result of the oldest call that is not answered. Errors as of `send`."""
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            raise self._ended() from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function there and return its result. Errors as of `send`."""
        self.send(name, *arguments)
        return self.answer()

    def _ended(self) -> RuntimeError:
        rule, got = "the other process must answer", {"exit code": self.process.wait()}
        return refusal(RuntimeError, "against", rule, got, "See what it printed above.")


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls of these functions, and of those that say what the process uses, until standard input ends.

    What libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    callables = {"cpu": machine.processor_time, "peak": machine.peak_memory, "reset_peak": machine.reset_peak_memory}
    callables |= functions
    with suppress(EOFError):
        while True:
            name, arguments = pickle.load(sys.stdin.buffer)
            pickle.dump(callables[name](*arguments), answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
