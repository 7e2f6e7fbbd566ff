"""What a run is made of: data, optimizer, dataflow, length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from daskgpt.config.errors import nearest_divisor, require
from daskgpt.config.settings import documented, one_of, setting


@documented
@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how many make a batch."""

    data: str = setting(
        "stdlib", "stdlib (this Python's library source), a text file, folder or glob, or token files (.bin)"
    )
    encoding: str = setting(
        "auto",
        "text to token ids; auto = gpt2 for token files and for models of its vocabulary, else bytes",
        choices=("auto", "bytes", "gpt2"),
    )
    validation_fraction: float = setting(0.1, "share of the text that is held out")
    batch_size: int = setting(12, "B, sequences a step")
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens")

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length"):
            value = getattr(self, name)
            require(value >= 1, "DataConfig", f"{name} must be at least 1", {name: value}, "Give a positive number.")
        require(
            0 < self.validation_fraction < 1,
            "DataConfig",
            "validation_fraction must lie between 0 and 1",
            {"validation_fraction": self.validation_fraction},
            "Try 0.1.",
        )
        one_of(self, "encoding")


@documented
@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated, and the learning rate over the steps.

    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    """

    optimizer: str = setting("adamw", "how parameters are updated: adamw or momentum (SGD with momentum beta1)")
    learning_rate: float = setting(1e-3, "largest learning rate")
    schedule: str = setting("cosine", "learning rate over the steps", choices=("constant", "cosine"))
    warmup: int = setting(100, "steps in which the learning rate rises from 0 (cosine only)", unit="steps")
    final_learning_rate: float = setting(1e-4, "learning rate after the last step (cosine only)")
    beta1: float = setting(0.9, "decay of the mean gradient m")
    beta2: float = setting(0.99, "decay of the mean squared gradient v")
    eps: float = setting(1e-8, "added to the root of v")
    weight_decay: float = setting(0.1, "decoupled weight decay")
    decay: str = setting("matrices", "which tensors decay: 2-D ones, or every one", choices=("matrices", "all"))

    def __post_init__(self) -> None:
        for name in ("learning_rate", "final_learning_rate", "eps", "weight_decay", "warmup"):
            value = getattr(self, name)
            require(value >= 0, "OptimizerConfig", f"{name} must not be negative", {name: value}, "Give 0 or more.")
            require(math.isfinite(value), "OptimizerConfig", f"{name} must be finite", {name: value}, "Try 0.001.")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, "OptimizerConfig", f"{name} must lie in [0, 1)", {name: value}, "Try 0.9.")
        for name in ("schedule", "decay"):
            one_of(self, name)


@documented
@dataclass(frozen=True)
class DataflowConfig:
    """How a step is cut into tasks, who runs them, and what its products round to.

    Only the precision, which is another arithmetic, changes a bit of the result.
    """

    batch_chunk: int = setting(0, "sequences in a chunk; divides the batch size; 0 = half of it, where that is whole")
    sequence_chunk: int = setting(
        0, "tokens of each sequence in a chunk; divides the sequence length; 0 = all, or half if the batch is not cut"
    )
    scheduler: str = setting(
        "threads", "sync, threads, local (a cluster here), tcp://host:port, or file:scheduler.json"
    )
    grain: str = setting(
        "auto",
        "size of a task; auto = from measured kernel times",
        choices=("kernel", "segment", "block", "chunk", "auto"),
    )
    barrier: str = setting(
        "step",
        "where everybody waits; layer = fork-join, none = steps overlap",
        choices=("layer", "phase", "step", "none"),
    )
    window: int = setting(4, "steps in flight with barrier none", unit="steps")
    precision: str = setting(
        "float32",
        "operands of matrix products; bfloat16 rounds them; auto = bfloat16 where it is faster; float64 to verify only",
        choices=("float32", "bfloat16", "auto", "float64"),
    )
    threads: int = setting(0, "threads (threads) or worker processes (local); 0 = one a core")

    def __post_init__(self) -> None:
        for name in ("batch_chunk", "sequence_chunk", "threads"):
            value = getattr(self, name)
            require(value >= 0, "DataflowConfig", f"{name} must not be negative", {name: value}, "Give 0 or more.")
        require(self.window >= 1, "DataflowConfig", "window must be at least 1", {"window": self.window}, "Try 4.")
        one_of(self, "grain")
        one_of(self, "barrier")
        one_of(self, "precision")


@documented
@dataclass(frozen=True)
class RunConfig:
    """One training run: how long, from where, and where it is written."""

    steps: int = setting(2000, "optimizer steps")
    seed: int = setting(0, "seed of initial values, batches and the sample")
    init: str = setting("", "model file or run folder to start from; empty = random initial values")
    out: str = setting("", "folder for the run; empty = runs/DATE-TIME on the command line, none from Python")
    validate_every: int = setting(
        500, "measure the validation loss each so many steps, 0 = at the end only", unit="steps"
    )
    validation_batches: int = setting(20, "batches of a validation loss")
    sample_tokens: int = setting(200, "length of the text sample at the end, 0 = none", unit="tokens")

    def __post_init__(self) -> None:
        for name, least in {
            "steps": 1,
            "validate_every": 0,
            "validation_batches": 1,
            "sample_tokens": 0,
            "seed": 0,
        }.items():
            value = getattr(self, name)
            require(
                value >= least, "RunConfig", f"{name} must be at least {least}", {name: value}, "Give a larger number."
            )


def chunk_sizes(data: DataConfig, dataflow: DataflowConfig) -> tuple[int, int]:
    """Sequences and tokens in a chunk, with 0 resolved.

    Errors   ValueError where a chunk does not divide what it cuts
    """
    batch, sequence = data.batch_size, data.sequence_length
    batch_chunk = dataflow.batch_chunk or (batch // 2 if batch % 2 == 0 else batch)
    uncut = batch_chunk == batch and sequence % 2 == 0
    sequence_chunk = dataflow.sequence_chunk or (sequence // 2 if uncut else sequence)
    for name, whole_name, part, whole in (
        ("batch_chunk", "batch_size", batch_chunk, batch),
        ("sequence_chunk", "sequence_length", sequence_chunk, sequence),
    ):
        require(
            whole % part == 0,
            "chunk_sizes",
            f"{name} must divide {whole_name}",
            {name: part, whole_name: whole},
            f"Try {name}={nearest_divisor(whole, part)}.",
        )
    return batch_chunk, sequence_chunk
