"""PyTorch's side of a comparison: a process that trains the same GPT-2 when it is told to, and sleeps meanwhile.

It is a process of its own so that neither side's threads and memory are in the other's way. Its OpenMP threads spin for
some milliseconds after their last work, which is over before our turn begins; forbidding it (OMP_WAIT_POLICY=passive in
the environment) makes PyTorch's steps slower where they are short, so it is left as it is. The price: a thread that
spins for one which another program keeps from running makes PyTorch many times slower, see `turns.alternate`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from daskgpt.config.errors import refusal
from daskgpt.instruments.compare.messages import Cpu, Peak, Ran, ResetPeak, Run, Start, TorchOptions, receive, send
from daskgpt.instruments.compare.turns import PairedTurns, compare, require_published_model, undisturbed
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.random_tokens import random_batch
from daskgpt.training.job import Job

# Largest difference of the first losses, in nats: bfloat16 has 8 bits, and logits of some units.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def require_torch() -> None:
    """Errors   RuntimeError where PyTorch is not installed"""
    if importlib.util.find_spec("torch") is None:
        rule, advice = "--against torch needs PyTorch", "Install it: pip install 'daskgpt[compare]'."
        raise refusal(RuntimeError, "bench", rule, "torch=not installed", advice)


class TorchProcess:
    """A `compare.turns.Side` in another process, on the batches of a job's random tokens."""

    def __init__(self, job: Job, seed: int, threads: int, options: TorchOptions) -> None:
        self.job, self.seed, self.losses = job, seed, list[float]()
        command = [sys.executable, "-m", "daskgpt.instruments.compare.torch_gpt2"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.start = Start(job.config, job.optimizer, seed, threads, options)

    def __enter__(self) -> TorchProcess:
        self.version = self.ask(self.start)
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

    def run(self, count: int) -> list[float]:
        done = len(self.losses)
        ran: Ran = self.ask(Run([random_batch(self.job, self.seed, done + number) for number in range(count)]))
        self.losses += ran.losses
        return ran.seconds

    def reset_peak(self) -> None:
        self.ask(ResetPeak())

    def peak(self) -> int:
        return int(self.ask(Peak()))

    def cpu(self) -> float:
        return float(self.ask(Cpu()))

    def ask(self, message: Any) -> Any:
        """The answer to a message.

        Errors   RuntimeError where the process has ended; what it said stands above
        """
        questions, answers = self._pipes()
        try:
            send(questions, message)
            return receive(answers)
        except (EOFError, BrokenPipeError):
            rule, got = "the PyTorch process must answer", {"exit code": self.process.wait()}
            raise refusal(RuntimeError, "bench", rule, got, "See what it printed above.") from None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin
        assert self.process.stdout
        return self.process.stdin, self.process.stdout


def compare_torch(steps: Steps, options: TorchOptions, warmup: int, turns: int) -> PairedTurns:
    """Our steps and PyTorch's in turns, once their first losses have been found to agree.

    Errors   RuntimeError where PyTorch is not installed, its process fails, or the losses differ
    """
    require_torch()
    require_published_model(steps.job)
    threads = steps.scheduler.threads
    with TorchProcess(steps.job, steps.seed, threads, options) as torch:
        steps.run(1)
        torch.run(1)
        first = steps.losses[0], torch.losses[0]
        check_losses(first, "bfloat16" if options.bf16 else steps.job.precision.name)
        pairs, steps_a_turn = compare(steps, torch, warmup, turns)
        used = undisturbed(pairs, turns)
        kinds = ["bfloat16 autocast" if options.bf16 else "float32"] + ["compiled"] * options.compiled
        name = f"PyTorch {torch.version}, {', '.join(kinds)}"
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
