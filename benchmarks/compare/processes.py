"""Programs of other processes that take turns with ours: PyTorch, one or several, and Hugging Face's transformers.

They are separate processes so that threads and memory do not interfere. OpenMP threads spin for some milliseconds after
their last work, which is over before our turn begins; disabling this (OMP_WAIT_POLICY=passive in the environment) makes
short steps of PyTorch slower, so it stays enabled. The price: if another program delays a thread for which others spin,
PyTorch becomes many times slower, see `take_turns`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from compare.pipes import Process, TorchOptions
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import ModelConfig
from daskgpt.profiling.measure import random_batch
from daskgpt.training.job import Job

# For which a process waits for the others of its step: a slow network may take a while for a large model's gradients.
PATIENCE_MINUTES = 10.0


def require_installed(program: str, *packages: str) -> None:
    """Errors   RuntimeError if a package is not installed"""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        advice = "Install it: pip install 'daskgpt[test-peers]'."
        raise refusal(RuntimeError, "against", f"{program} must be installed", f"{missing[0]}=not installed", advice)


def require_gpt2(config: ModelConfig) -> None:
    """Errors   ValueError for another model than GPT-2"""
    others, rule = config.beyond_gpt2(), "the other program must have this model, which is not GPT-2"
    require(not others, "against", rule, {"model": others}, "Compare it with torch.")


class OtherProcesses:
    """Processes that do the same at the same time: a program that takes turns."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.losses: list[float] = []
        self._running = ExitStack()

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def reset_peak(self) -> None:
        self.all("reset_peak")

    def peak(self) -> int:
        """Most bytes in memory since then, of all processes together."""
        return sum(self.all("peak"))

    def cpu(self) -> dict[tuple[str, int], float]:
        return {process: seconds for times in self.all("cpu") for process, seconds in times.items()}

    def all(self, name: str) -> list[Any]:
        for process in self.processes:
            process.send(name)
        return [process.answer() for process in self.processes]


class TorchSide(OtherProcesses):
    """Training in PyTorch on the batches of a job's random tokens.

    One process trains alone; of several each has the same number of sequences of every batch, the first one the first,
    and they average their gradients (DistributedDataParallel over gloo).
    """

    def __init__(self, job: Job, seed: int, threads: int, options: TorchOptions, count: int = 1) -> None:
        """threads   of each process
        count     of processes

        Errors    ValueError if the processes cannot have equal parts of a batch
        """
        super().__init__()
        size = job.batch_shape[0]
        rule, got = "DistributedDataParallel needs as many sequences in each process", {"batch_size": size}
        advice = f"Give --batch-size {-(-size // count) * count}."
        require(size % count == 0, "against", rule, got | {"processes": count}, advice)
        self.job, self.seed = job, seed
        self.threads, self.options, self.count = threads, options, count

    def __enter__(self) -> TorchSide:
        job, size = self.job, self.count
        with ExitStack() as running:
            meeting = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="daskgpt-"))) / "meeting"
            self.processes = [running.enter_context(Process("torch_model")) for _ in range(size)]
            for rank, process in enumerate(self.processes):
                member = (rank, size, str(meeting), PATIENCE_MINUTES) if size > 1 else None
                process.send("start", job.config, job.optimizer, self.seed, self.threads, self.options, member)
            running.push(self._end_together)
            self.version, *_ = [process.answer() for process in self.processes]
            self._running = running.pop_all()
        return self

    def _end_together(self, kind: Any, *error: Any) -> None:
        """After an error, end all at once: one that is left alone with a step would complain."""
        for process in self.processes:
            if kind is not None:
                process.process.kill()

    def run(self, count: int) -> list[float]:
        """Of a step of several processes: seconds of the one that took longest, and the mean of their losses."""
        batches = [random_batch(self.job, self.seed, len(self.losses) + number) for number in range(count)]
        share = self.job.batch_shape[0] // len(self.processes)
        for rank, process in enumerate(self.processes):
            rows = slice(rank * share, (rank + 1) * share)
            process.send("run", [(tokens[rows], targets[rows]) for tokens, targets in batches])
        answers = [process.answer() for process in self.processes]
        self.losses += [fmean(losses) for losses in zip(*(losses for _, losses in answers))]
        return [max(seconds) for seconds in zip(*(seconds for seconds, _ in answers))]


class TransformersSide(OtherProcesses):
    """Hugging Face's program: each turn writes tokens after the same prompt, the likeliest ones, its cache on."""

    def __init__(self, config: ModelConfig, seed: int, threads: int, prompt: list[int]) -> None:
        super().__init__()
        self.start, self.prompt = (config, seed, threads), prompt
        self.written: list[int] = []

    def __enter__(self) -> TransformersSide:
        with ExitStack() as running:
            self.processes = [running.enter_context(Process("transformers_model"))]
            self.name = self.processes[0].call("start", *self.start)
            self._running = running.pop_all()
        return self

    def run(self, count: int) -> list[float]:
        """Mean seconds of a token; the prompt, of a few tokens, is read with the first one."""
        seconds, self.written = self.processes[0].call("write", self.prompt, count)
        return [seconds / count]
