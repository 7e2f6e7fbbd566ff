"""What is timed: steps on random tokens, which need no text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskgpt.config.groups import groups_setting
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.training.job import Job


@documented
@dataclass(frozen=True)
class BenchConfig(Checked):
    """What is timed."""

    steps: int = setting(10, "timed steps; with --against, turns", unit="steps", least=1, most=2**20)
    warmup: int = setting(3, "steps before them", unit="steps", least=1, most=2**20)
    recorded: int = setting(
        3, "steps after them in which every kernel call is recorded", unit="steps", least=1, most=2**10
    )
    batch_size: int = setting(12, "B, sequences a step", least=1, most=2**20)
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens", least=1, most=2**24)
    groups: int = groups_setting()
    seed: int = setting(0, "seed of initial values and tokens", least=0)


def job_of(config: GPT2Config, asked: BenchConfig, dataflow: DataflowConfig) -> Job:
    """The checked job of a run on random tokens, with a constant learning rate."""
    return Job(
        config,
        DataConfig(batch_size=asked.batch_size, sequence_length=asked.sequence_length, groups=asked.groups),
        OptimizerConfig(schedule="constant"),
        dataflow,
        RunConfig(seed=asked.seed),
    )


def random_batch(job: Job, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (B, T) int32, uniform over the vocabulary; the same for the same seed and step."""
    size, length = job.batch_shape
    tokens = np.random.default_rng([seed, step]).integers(0, job.config.vocabulary, (size, length + 1), np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
