"""PyTorch's side of a comparison: processes that train the same GPT-2 when they are told to, and sleep meanwhile.

They are processes of their own so that neither side's threads and memory are in the other's way. OpenMP threads spin
for some milliseconds after their last work, which is over before our turn begins; forbidding it (in the environment,
OMP_WAIT_POLICY=passive) makes PyTorch's steps slower where they are short, so it is left as it is. The price: a thread
that spins for one which another program keeps from running makes PyTorch many times slower, see `turns.take_turns`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import IO, Any

from daskgpt.config.errors import refusal, require
from daskgpt.config.stopping import delayed_interrupts
from daskgpt.instruments.compare.messages import (
    Cpu,
    Member,
    Peak,
    Ran,
    ResetPeak,
    Run,
    Start,
    TorchOptions,
    receive,
    send,
)
from daskgpt.instruments.compare.turns import PairedTurns, compare, require_published_model, undisturbed
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.random_tokens import random_batch
from daskgpt.training.job import Job

# Largest difference of the first losses, in nats: bfloat16 has 8 bits, and logits of some units.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
# For which a process waits for the others of its step: a slow network may take a while for a large model's gradients.
PATIENCE_MINUTES = 10.0
MODULE = "daskgpt.instruments.compare.torch_gpt2"


def require_torch(asked: str = "torch") -> None:
    """Errors   RuntimeError where PyTorch is not installed"""
    if importlib.util.find_spec("torch") is None:
        rule, advice = f"--against {asked} needs PyTorch", "Install it: pip install 'daskgpt[compare]'."
        raise refusal(RuntimeError, "bench", rule, "torch=not installed", advice)


@dataclass(frozen=True)
class Place:
    """Where a process of PyTorch runs.

    command    what its command line begins with: `ip netns exec NAME`, say
    interface  of the network, through which it talks to the others; "" is the loopback
    """

    command: tuple[str, ...] = ()
    interface: str = ""


class TorchProcess:
    """A process and the pipes to it."""

    def __init__(self, place: Place = Place(), module: str = MODULE) -> None:
        command = [*place.command, sys.executable, "-m", module]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": place.interface or loopback()}
        with delayed_interrupts():  # Ctrl-C is for who began this: it ends the process then
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        questions, answers = self._pipes()
        with suppress(BrokenPipeError):
            questions.close()
        if kind is not None:
            self.process.kill()
        self.process.wait()
        answers.close()

    def tell(self, message: Any) -> None:
        """Errors   RuntimeError where the process has ended; what it said stands above"""
        self._while_it_runs(lambda: send(self._pipes()[0], message))

    def hear(self) -> Any:
        """The answer to the oldest message. Errors as of `tell`."""
        return self._while_it_runs(lambda: receive(self._pipes()[1]))

    def _while_it_runs(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (EOFError, BrokenPipeError):
            rule, got = "the PyTorch process must answer", {"exit code": self.process.wait()}
            raise refusal(RuntimeError, "bench", rule, got, "See what it printed above.") from None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin
        assert self.process.stdout
        return self.process.stdin, self.process.stdout


class TorchSide:
    """A `compare.turns.Side` in other processes, on the batches of a job's random tokens.

    One process trains alone; of several each has the same number of sequences of every batch, the first one the first,
    and they average their gradients (DistributedDataParallel over gloo).
    """

    def __init__(
        self, job: Job, seed: int, threads: int, options: TorchOptions, places: Sequence[Place] = (Place(),)
    ) -> None:
        """threads   of each process

        Errors    ValueError where the processes cannot have equal parts of a batch
        """
        size, count = job.batch_shape[0], len(places)
        rule, got = "DistributedDataParallel needs as many sequences in each process", {"batch_size": size}
        advice = f"Give --batch-size {-(-size // count) * count}."
        require(size % count == 0, "bench", rule, got | {"processes": count}, advice)
        self.job, self.seed, self.losses = job, seed, list[float]()
        self.threads, self.options, self.places = threads, options, places
        self.processes: list[TorchProcess] = []
        self._running = ExitStack()

    def __enter__(self) -> TorchSide:
        with ExitStack() as running:
            meeting = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="daskgpt-"))) / "meeting"
            self.processes = [running.enter_context(TorchProcess(place)) for place in self.places]
            for rank, process in enumerate(self.processes):
                process.tell(self._start(rank, str(meeting)))
            running.push(self._end_together)
            self.version, *_ = [process.hear() for process in self.processes]
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def _end_together(self, kind: Any, *error: Any) -> None:
        """One that is left alone with a step would complain before its turn to be ended comes."""
        for process in self.processes:
            if kind is not None:
                process.process.kill()

    def _start(self, rank: int, meeting: str) -> Start:
        job, count = self.job, len(self.places)
        member = Member(rank, count, meeting, PATIENCE_MINUTES) if count > 1 else None
        return Start(job.config, job.optimizer, self.seed, self.threads, self.options, member)

    def run(self, count: int) -> list[float]:
        """Of a step of several processes: seconds of the one that took longest, and the mean of their losses."""
        batches = [random_batch(self.job, self.seed, len(self.losses) + number) for number in range(count)]
        share = self.job.batch_shape[0] // len(self.processes)
        for rank, process in enumerate(self.processes):
            own = slice(rank * share, (rank + 1) * share)
            process.tell(Run([(tokens[own], targets[own]) for tokens, targets in batches]))
        ran: list[Ran] = [process.hear() for process in self.processes]
        self.losses += [fmean(losses) for losses in zip(*(own.losses for own in ran))]
        return [max(seconds) for seconds in zip(*(own.seconds for own in ran))]

    def reset_peak(self) -> None:
        self._asked(ResetPeak())

    def peak(self) -> int:
        """Of all processes together."""
        return sum(self._asked(Peak()))

    def cpu(self) -> dict[tuple[str, int], float]:
        return {process: seconds for own in self._asked(Cpu()) for process, seconds in own.items()}

    def _asked(self, message: Any) -> list[Any]:
        for process in self.processes:
            process.tell(message)
        return [process.hear() for process in self.processes]


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def described(version: str, options: TorchOptions, *kinds: str) -> str:
    """PyTorch and how it runs, for people."""
    own = ["bfloat16 autocast" if options.bf16 else "float32", *["compiled"] * options.compiled]
    return ", ".join([f"PyTorch {version}", *kinds, *own])


def compare_torch(steps: Steps, options: TorchOptions, warmup: int, turns: int) -> PairedTurns:
    """Our steps and PyTorch's in turns, once their first losses have been found to agree.

    Errors   RuntimeError where PyTorch is not installed, its process fails, or the losses differ
    """
    require_torch()
    require_published_model(steps.job)
    threads = steps.scheduler.threads
    with TorchSide(steps.job, steps.seed, threads, options) as torch:
        steps.run(1)
        torch.run(1)
        first = steps.losses[0], torch.losses[0]
        check_losses(first, "bfloat16" if options.bf16 else steps.job.precision.name)
        pairs, steps_a_turn = compare(steps, torch, warmup, turns)
        used = undisturbed(pairs, turns)
        name = described(torch.version, options)
        return PairedTurns(name, used, steps_a_turn, len(pairs), (steps.peak(), torch.peak()), first, threads)


def check_losses(first: tuple[float, float], precision: str) -> None:
    """Errors   RuntimeError where two losses of the same model and tokens differ by more than the precision explains"""
    ours, theirs = first
    allowed = LOSS_TOLERANCE[precision]
    if not abs(ours - theirs) <= allowed:
        rule = f"both programs must find the same first loss, to {allowed:g}"
        got = f"daskgpt={ours:.6f}, torch={theirs:.6f}"
        advice = "One of them computes another model; compare with `python -m daskgpt.verify`."
        raise refusal(RuntimeError, "bench", rule, got, advice)
