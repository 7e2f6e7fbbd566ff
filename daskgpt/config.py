"""What a model and a run are made of: frozen dataclasses, from whose fields the command-line flags derive."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any


def setting(default: Any, help: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that can be a flag, with its help text, unit and allowed values."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices})


def require(holds: bool, where: str, rule: str, got: dict[str, Any], advice: str) -> None:
    """Raise ValueError in the one form that all errors share, unless `holds`."""
    if not holds:
        values = ", ".join(f"{name}={value}" for name, value in got.items())
        raise ValueError(f"{where}: {rule}; got {values}. {advice}")


def nearest(name: str, known: list[str]) -> str:
    """`Did you mean x?` for a misspelt name, or the list of all names."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(known)}."


@dataclass(frozen=True)
class GPT2Config:
    """The size of a GPT-2 model.

    Errors   ValueError where a number is below 1, heads does not divide channels, or padding is below the vocabulary
    Source   Radford et al. 2019, table 2 (names of the published sizes)
    """

    blocks: int = setting(4, "transformer blocks")
    heads: int = setting(4, "attention heads")
    channels: int = setting(128, "channels of an activation")
    vocabulary: int = setting(257, "token ids that can occur")
    padded_vocabulary: int = setting(
        0, "rows of the embedding table, 0 for the vocabulary itself; rows beyond it stay 0"
    )
    positions: int = setting(64, "longest sequence", unit="tokens")

    def __post_init__(self) -> None:
        if self.padded_vocabulary == 0:
            object.__setattr__(self, "padded_vocabulary", self.vocabulary)
        for f in fields(self):
            value = getattr(self, f.name)
            require(
                value >= 1, "GPT2Config", f"{f.name} must be at least 1", {f.name: value}, "Give a positive number."
            )
        require(
            self.channels % self.heads == 0,
            "GPT2Config",
            "channels must be a multiple of heads",
            {"channels": self.channels, "heads": self.heads},
            f"Try heads={_nearest_divisor(self.channels, self.heads)}.",
        )
        require(
            self.padded_vocabulary >= self.vocabulary,
            "GPT2Config",
            "padded_vocabulary must be at least vocabulary",
            {"padded_vocabulary": self.padded_vocabulary, "vocabulary": self.vocabulary},
            "Use 0 for no padding.",
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    # Looked for near what is wanted only: the number may come from a broken file and be huge.
    divisors = [n for n in range(1, min(number, 2 * wanted) + 1) if number % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))


PRESETS: dict[str, GPT2Config] = {
    "tiny": GPT2Config(blocks=4, heads=4, channels=128, vocabulary=257, positions=64),
    "gpt2": GPT2Config(blocks=12, heads=12, channels=768, vocabulary=50257, padded_vocabulary=50304, positions=1024),
    "gpt2-medium": GPT2Config(
        blocks=24, heads=16, channels=1024, vocabulary=50257, padded_vocabulary=50304, positions=1024
    ),
    "gpt2-large": GPT2Config(
        blocks=36, heads=20, channels=1280, vocabulary=50257, padded_vocabulary=50304, positions=1024
    ),
    "gpt2-xl": GPT2Config(
        blocks=48, heads=25, channels=1600, vocabulary=50257, padded_vocabulary=50304, positions=1024
    ),
}


def preset(name: str, **overrides: Any) -> GPT2Config:
    """The named size with some numbers replaced.

    Errors   ValueError for an unknown name
    """
    require(name in PRESETS, "preset", "the name must be known", {"preset": name}, nearest(name, list(PRESETS)))
    if "vocabulary" in overrides and "padded_vocabulary" not in overrides:
        overrides["padded_vocabulary"] = 0
    return replace(PRESETS[name], **overrides)


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how many make a batch."""

    data: str = setting(
        "stdlib", "stdlib (this Python's library source), a text file, folder or glob, or token files (.bin)"
    )
    encoding: str = setting(
        "auto", "text to token ids; auto = gpt2 for token files, bytes for text", choices=("auto", "bytes", "gpt2")
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
        _one_of(self, "encoding")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over the steps.

    Source   Loshchilov and Hutter 2019, arXiv:1711.05101
    """

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
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, "OptimizerConfig", f"{name} must lie in [0, 1)", {name: value}, "Try 0.9.")
        for name in ("schedule", "decay"):
            _one_of(self, name)


@dataclass(frozen=True)
class DataflowConfig:
    """How a step is cut into tasks and who runs them. None of it but the chunks changes a bit of the result."""

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
        "operands of matrix products; auto = bfloat16 where it is faster here; float64 to verify only",
        choices=("float32", "bfloat16", "auto", "float64"),
    )
    threads: int = setting(0, "threads (threads) or worker processes (local); 0 = one a core")

    def __post_init__(self) -> None:
        for name in ("batch_chunk", "sequence_chunk", "threads"):
            value = getattr(self, name)
            require(value >= 0, "DataflowConfig", f"{name} must not be negative", {name: value}, "Give 0 or more.")
        require(self.window >= 1, "DataflowConfig", "window must be at least 1", {"window": self.window}, "Try 4.")
        _one_of(self, "grain")
        _one_of(self, "barrier")
        _one_of(self, "precision")


@dataclass(frozen=True)
class RunConfig:
    """One training run: how long, from where, and where it is written."""

    steps: int = setting(2000, "optimizer steps")
    seed: int = setting(0, "seed of initial values, batches and the sample")
    init: str = setting("", "model file or run folder to start from; empty = random initial values")
    out: str = setting("", "folder for the run; empty = runs/DATE-TIME")
    validate_every: int = setting(
        500, "measure the validation loss each so many steps, 0 = at the end only", unit="steps"
    )
    validation_batches: int = setting(20, "batches of a validation loss")
    sample_tokens: int = setting(200, "length of the text sample at the end, 0 = none", unit="tokens")
    timeline: str = setting("", "write what the last steps ran when to FILE.json and FILE.html", unit="file")
    timeline_steps: int = setting(4, "how many steps a timeline shows", unit="steps")

    def __post_init__(self) -> None:
        for name, least in {
            "steps": 1,
            "validate_every": 0,
            "validation_batches": 1,
            "sample_tokens": 0,
            "seed": 0,
            "timeline_steps": 1,
        }.items():
            value = getattr(self, name)
            require(
                value >= least, "RunConfig", f"{name} must be at least {least}", {name: value}, "Give a larger number."
            )


def _one_of(config: Any, name: str) -> None:
    choices = next(f for f in fields(config) if f.name == name).metadata["choices"]
    value = getattr(config, name)
    require(
        value in choices, type(config).__name__, f"{name} must be known", {name: value}, nearest(value, list(choices))
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
            f"Try {name}={_nearest_divisor(whole, part)}.",
        )
    return batch_chunk, sequence_chunk
