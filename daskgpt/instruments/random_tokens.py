"""What is timed: steps on random tokens, which need no text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.settings import documented, setting
from daskgpt.training.job import Job


@documented
@dataclass(frozen=True)
class BenchConfig:
    """What is timed."""

    steps: int = setting(10, "timed steps; with --against, turns", unit="steps")
    warmup: int = setting(3, "steps before them", unit="steps")
    recorded: int = setting(3, "steps after them in which every kernel call is recorded", unit="steps")
    batch_size: int = setting(12, "B, sequences a step")
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens")
    seed: int = setting(0, "seed of initial values and tokens")

    def __post_init__(self) -> None:
        for name in ("steps", "warmup", "recorded"):
            value = getattr(self, name)
            require(value >= 1, "BenchConfig", f"{name} must be at least 1", {name: value}, "Give a larger number.")


def job_of(config: GPT2Config, asked: BenchConfig, dataflow: DataflowConfig) -> Job:
    """The checked job of a run on random tokens, with a constant learning rate."""
    return Job(
        config,
        DataConfig(batch_size=asked.batch_size, sequence_length=asked.sequence_length),
        OptimizerConfig(schedule="constant"),
        dataflow,
        RunConfig(seed=asked.seed),
    )


def random_batch(job: Job, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (B, T) int32, uniform over the vocabulary; the same for the same seed and step."""
    size, length = job.batch_shape
    tokens = np.random.default_rng([seed, step]).integers(0, job.config.vocabulary, (size, length + 1), np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
