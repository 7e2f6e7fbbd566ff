"""What the tests of one number share: models, a few steps under any dials, and the bits they end with."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.parameters import initial_parameters
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.step import TrainingStep

SEED = "DASKGPT_TEST_SEED"
STEPS = 3


@dataclass(frozen=True)
class Model:
    """A configuration with the shape of its batch."""

    config: GPT2Config
    batch: tuple[int, int]


MODELS = {
    "tiny": Model(GPT2Config(), (12, 64)),
    # Nothing is a multiple of a vector, a tile of 32 tokens or a pair.
    "odd": Model(
        GPT2Config(blocks=2, heads=3, channels=21, vocabulary=131, padded_vocabulary=160, positions=20), (6, 20)
    ),
    # Sequences of several tiles, the last one incomplete.
    "long": Model(
        GPT2Config(blocks=1, heads=2, channels=24, vocabulary=67, padded_vocabulary=67, positions=75), (3, 75)
    ),
}


@dataclass(frozen=True)
class Dials:
    """Everything that must not change a bit."""

    chunk: tuple[int, int]
    barrier: str = "step"
    grain: str = "block"
    scheduler: str = "sync"
    threads: int = 1
    in_place: bool | None = None


def bits_after_steps(model: Model, precision: str, dials: Dials) -> str:
    """Losses in hexadecimal and a hash of all parameters."""
    random = np.random.default_rng(0)
    length = model.batch[1] + 1
    text = random.integers(0, model.config.vocabulary, (STEPS, model.batch[0], length)).astype(np.int32)
    batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in text]
    with open_scheduler(dials.scheduler, dials.threads) as scheduler:
        step = TrainingStep(
            model.config,
            model.batch,
            dials.chunk,
            OptimizerConfig(),
            precision=precision_of(precision),
            grain=dials.grain,
            barrier=dials.barrier,
            in_place=scheduler.in_place if dials.in_place is None else dials.in_place,
        )
        state = step.initial(initial_parameters(model.config, 0))
        if dials.barrier == "none":
            losses, state = step.window(scheduler, state, batches, STEPS)
        else:
            losses = []
            for tokens, targets in batches:
                loss, state = step(scheduler, state, tokens, targets, STEPS)
                losses.append(loss)
        digest = hashlib.sha256()
        for name, value in sorted(state.parameters(scheduler).items()):
            digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return " ".join([*(loss.hex() for loss in losses), digest.hexdigest()[:16]])


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def random_dials(random: np.random.Generator, model: Model) -> Dials:
    """Any combination that the command line would take."""

    def one_of(values):
        return values[random.integers(len(values))]

    barrier = one_of(["layer", "phase", "step", "none"])
    return Dials(
        chunk=(one_of(divisors(model.batch[0])), one_of(divisors(model.batch[1]))),
        barrier=barrier,
        grain=one_of(["kernel", "segment", "block", "chunk"]),
        scheduler=one_of(["sync", "threads"]),
        threads=one_of([1, 2, 5]),
        in_place=None if barrier == "none" else one_of([True, False]),
    )


def seed() -> int:
    """A new one each time, or the one of an earlier run that the environment names."""
    return int(os.environ.get(SEED) or secrets.randbelow(2**32))
