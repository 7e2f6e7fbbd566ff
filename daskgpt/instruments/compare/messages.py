"""What daskgpt and a process it compares itself with say to each other over a pipe."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import OptimizerConfig


@dataclass(frozen=True)
class TorchOptions:
    """How PyTorch runs the model.

    compiled   through torch.compile
    bf16       matrix products in bfloat16 (autocast)
    """

    compiled: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class Member:
    """One of the processes that train together (DistributedDataParallel).

    meeting  path of a file that does not exist yet, where they tell each other their addresses
    minutes  for which one waits for the others before it gives up
    """

    rank: int
    size: int
    meeting: str
    minutes: float


@dataclass(frozen=True, eq=False)
class Start:
    """Everything a training needs: the first message. Both sides make the initial values from the seed for themselves,
    so that no copy of the other's stays in anybody's memory.

    member   None for a process that trains alone
    """

    config: GPT2Config
    optimizer: OptimizerConfig
    seed: int
    threads: int
    options: TorchOptions
    member: Member | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """Train on these batches of tokens and targets; the answer is `Ran`."""

    batches: list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Ran:
    """Seconds and loss of each step."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Write:
    """Write so many tokens after a prompt, the likeliest ones; the answer is their seconds, and they."""

    prompt: list[int]
    count: int


@dataclass(frozen=True)
class ResetPeak:
    """Let the peak count from now on; the answer is None."""


@dataclass(frozen=True)
class Peak:
    """Ask for the most bytes in memory since then."""


@dataclass(frozen=True)
class Cpu:
    """Ask for the seconds of processor time that the process has used (`machine.processor_time`)."""


def send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message.

    Errors   EOFError where the other side has ended
    """
    return pickle.load(stream)
