"""Helpers of the tests of one number: models, a few steps under any dials, and the bits at their end.

    python tests/support/one_number.py [PRECISION]

prints the bits that every model ends with after 20 steps, as `golden/bits.json` has them; `campaign.py` tries
combinations of dials at random.
"""

import hashlib
import json
import os
import secrets
import sys
from dataclasses import dataclass, replace

import numpy as np
from steps import run_window, state_of, step_of

from daskgpt.config.model import ModelConfig
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.parameters import parameter_shapes
from daskgpt.model.precision import precision_of
from daskgpt.model.step import Outcome
from daskgpt.schedulers.opening import open_scheduler

SEED = "DASKGPT_TEST_SEED"
STEPS = 3


@dataclass(frozen=True)
class Model:
    """A configuration, the shape and groups of its batch, its optimizer, dropout and clipping."""

    config: ModelConfig
    batch: tuple[int, int]
    groups: int = 1
    optimizer: str = "adamw"
    dropout: float = 0.0
    clip: float = 0.0

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(optimizer=self.optimizer, dropout=self.dropout, clip=self.clip)

    def batches(self, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens and targets of each step."""
        text = raw_numbers(1, (steps, self.batch[0], self.batch[1] + 1)) % self.config.vocabulary
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in text.astype(np.int32)]


ODD = ModelConfig(blocks=2, heads=3, channels=21, vocabulary=131, padded_vocabulary=160, positions=20)
LLAMA = replace(ODD, heads=6, kv_heads=2, head_size=6, hidden=37, norm="rmsnorm", norm_eps=1e-6, position="rotary")
LLAMA = replace(LLAMA, rope_theta=500.0, activation="swiglu", bias="none", head="untied")
MODELS = {
    "tiny": Model(ModelConfig(), (12, 64)),
    # Nothing is a multiple of a vector, a tile of 32 tokens or a pair.
    "odd": Model(ODD, (6, 20)),
    # Sequences of several tiles, the last one incomplete.
    "long": Model(ModelConfig(1, 2, 24, vocabulary=67, padded_vocabulary=67, positions=75), (3, 75)),
}
MODELS["tiny in 4 groups"] = replace(MODELS["tiny"], groups=4)
MODELS["odd in 2 groups"] = replace(MODELS["odd"], groups=2)
MODELS["odd with muon"] = replace(MODELS["odd in 2 groups"], optimizer="muon")
MODELS["odd with dropout"] = replace(MODELS["odd in 2 groups"], dropout=0.2)
MODELS["llama"] = Model(LLAMA, (6, 20), groups=2)
MODELS["llama with adapters"] = replace(MODELS["llama"], config=replace(LLAMA, lora=5))
# The bits of these are not recorded.
VARIANTS = {
    "clipped": replace(MODELS["odd in 2 groups"], clip=0.1),
    "clipped muon": replace(MODELS["odd"], clip=0.1, optimizer="muon"),
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
    window: int = STEPS
    accumulate: int = 1


def raw_numbers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return whole numbers from a stream that is stable across versions of NumPy."""
    return (np.random.Philox(seed).random_raw(int(np.prod(shape))) >> np.uint64(40)).reshape(shape)


def start_values(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return parameters between -1/8 and 1/8, or around 1 if they scale, made without the C library."""
    values = {}
    for number, (name, shape) in enumerate(parameter_shapes(config).items()):
        uniform = (raw_numbers(100 + number, shape).astype(np.float32) - np.float32(2**23)) * np.float32(2.0**-26)
        values[name] = uniform + np.float32(".ln_" in f".{name}" and name.endswith("weight"))
    for table in values.keys() & {"wte.weight", "lm_head.weight"}:
        values[table][config.vocabulary :] = 0
    return values


def outcomes_of_steps(model: Model, precision: str, dials: Dials, steps: int = STEPS) -> tuple[list[Outcome], dict]:
    """Return the outcomes of all steps, and the parameters after the last one."""
    batches = model.batches(steps)
    with open_scheduler(dials.scheduler, dials.threads) as scheduler:
        options = {name: getattr(dials, name) for name in ("grain", "barrier", "accumulate")} | {"groups": model.groups}
        options["in_place"] = scheduler.in_place if dials.in_place is None else dials.in_place
        options["threads"] = scheduler.threads
        step = step_of(
            model.config, model.batch, dials.chunk, model.optimizer_config, precision_of(precision), **options
        )
        state, told = state_of(step, start_values(model.config)), []
        window = dials.window if dials.barrier == "none" else 1
        for first in range(0, steps, window):
            outcomes, state = run_window(scheduler, step, state, batches[first : first + window], steps)
            told += outcomes
        return told, state.parameters(scheduler)


def bits_after_steps(model: Model, precision: str, dials: Dials, steps: int = STEPS) -> str:
    """Return the bits that a model ends with."""
    return bits_of(*outcomes_of_steps(model, precision, dials, steps))


def bits_of(told: list[Outcome], parameters: dict[str, np.ndarray]) -> str:
    """The last loss in hexadecimal and a hash of all losses (and norms, where they are clipped) and parameters."""
    numbers = [outcome.loss.hex() for outcome in told]
    digest = hashlib.sha256(" ".join(numbers + [outcome.norm.hex() for outcome in told if outcome.norm]).encode())
    for name, value in sorted(parameters.items()):
        digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return f"{numbers[-1]} {digest.hexdigest()[:32]}"


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def divisions(sequences: int) -> list[int]:
    """Return the numbers of groups into which some sequences can be divided."""
    return [part for part in divisors(sequences) if part.bit_count() == 1]


def random_dials(random: np.random.Generator, model: Model) -> Dials:
    """Return any combination that the command line accepts."""

    def one_of(values):
        return values[random.integers(len(values))]

    chunk, barrier = tuple(one_of(divisors(size)) for size in model.batch), one_of(["layer", "phase", "step", "none"])
    grain, scheduler = one_of(["kernel", "segment", "block", "chunk"]), one_of(["sync", "threads"])
    threads, in_place = one_of([1, 2, 3, 5, 8]), one_of([True, False])
    window, accumulate = one_of([1, 2, STEPS]), one_of([1, 1, 2, 3])
    return Dials(chunk, barrier, grain, scheduler, threads, in_place, window, accumulate)


def seed() -> int:
    """Return a new seed, or that of an earlier run from the environment."""
    return int(os.environ.get(SEED) or secrets.randbelow(2**32))


def expected_bits(precision: str) -> dict[str, str]:
    """Return the bits of a precision in `golden/bits.json`."""
    return {name: bits_after_steps(model, precision, Dials(model.batch), 20) for name, model in MODELS.items()}


if __name__ == "__main__":
    print(json.dumps(expected_bits(sys.argv[1] if sys.argv[1:] else "float32"), indent=2))
