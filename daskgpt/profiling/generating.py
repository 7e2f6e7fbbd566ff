"""Time how a model writes: the cost of a token early and late in a text, of a batch, and the memory's share in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import PRECISIONS, Choice, Texts
from daskgpt.model.parameters import initial_parameters, parameter_count
from daskgpt.profiling import machine
from daskgpt.profiling.measure import BenchConfig, Side, Turn, disturbed, take_turns, undisturbed
from daskgpt.profiling.records import Figure, figures_of
from daskgpt.profiling.statistics import Spread
from daskgpt.schedulers.local import usable_cores
from daskgpt.schedulers.machine import copy_rate

EARLY, LATE, BATCH = 10, 900, 8  # tokens that stand before, and texts
TOKENS = 16  # of a turn
LIKELIEST = Choice(temperature=0)
RATIOS = {"flat": "a late token / an early one", "batch": f"tokens/s of {BATCH} texts / of 1"}


class _OfThisProcess:
    def cpu(self) -> dict[tuple[str, int], float]:
        return machine.processor_time()


class Writing(_OfThisProcess):
    """Texts of random tokens, which each turn goes on with anew from where they were.

    position   tokens of each text before the ones that are timed
    whole      whether a turn reads these as well, with its first token
    """

    def __init__(
        self, weights: Weights, texts: int, position: int, threads: int, seed: int, whole: bool = False
    ) -> None:
        self.kept = 0 if whole else position - 1
        prompts = random_prompts(weights.config, texts, position, seed)
        self.prompts, self.position = prompts, position
        self.texts = Texts(weights, prompts, longest=position + TOKENS, threads=threads)
        self.texts.scores(range(texts))
        self.written: list[list[int]] = []

    def run(self, count: int) -> list[float]:
        """Seconds of each step: a token of each text, the choice included."""
        self.texts.tokens = [list(prompt) for prompt in self.prompts]
        self.texts.read = [self.kept] * len(self.prompts)
        seconds, tokens = [], self.texts.write(count, LIKELIEST)
        for _ in range(count):
            start = perf_counter()
            next(tokens)
            seconds.append(perf_counter() - start)
        self.written = [text[self.position :] for text in self.texts.tokens]
        return seconds

    @property
    def read(self) -> int:
        """Bytes of weights, keys and values that a step reads, in the middle of a turn."""
        return self.texts.decoder.bytes_read([self.position + TOKENS // 2] * len(self.prompts))


class Copying(_OfThisProcess):
    """Copies of memory: a step is the time of one byte, read or written."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def run(self, count: int) -> list[float]:
        return [1 / copy_rate(self.threads)]


def random_prompts(config: GPT2Config, texts: int, length: int, seed: int) -> list[list[int]]:
    """Tokens, uniform over the vocabulary; the same for the same seed."""
    found: list[list[int]] = (
        np.random.default_rng([seed, texts]).integers(0, config.vocabulary, (texts, length)).tolist()
    )
    return found


@dataclass(frozen=True)
class Row:
    """One way to write: seconds of a step, and the share of a copy's rate at which its bytes were read."""

    precision: str
    texts: int
    position: int
    seconds: Spread
    read: int
    share: Spread

    @property
    def tokens(self) -> float:
        """A second."""
        return self.texts / self.seconds.median

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements; a way to write is called by precision, texts, and tokens that stand before."""
        name = f"{self.precision}_{self.texts}_{self.position}"
        return {
            f"{name}_step": Figure.of(self.seconds, "ms", 1e3),
            f"{name}_share": Figure.of(self.share, ""),
            f"{name}_tokens": Figure.single(self.tokens, "tokens/s"),
            f"{name}_read": Figure.single(self.read / 1e6, "MB"),
        }


@dataclass(frozen=True)
class Generation:
    """What was found.

    ratios   what several rows say together, by name: each turn's
    turns    of every way to write, of copies, and of other programs
    """

    config: GPT2Config
    threads: int
    copy: Spread
    rows: tuple[Row, ...]
    ratios: dict[str, Spread]
    turns: Sequence[Turn]

    @property
    def settings(self) -> dict[str, Any]:
        """What was measured, beside the model."""
        return {"threads": self.threads, "disturbed_turns": disturbed(self.turns)}

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements."""
        known = {"copy": Figure.of(self.copy, "GB/s", 1e-9)} | figures_of(self.ratios, "")
        for row in self.rows:
            known |= row.figures()
        return known

    def describe(self) -> str:
        """For a person to read."""
        lines = [
            f"model        {parameter_count(self.config):,} parameters, {self.threads} threads",
            f"machine      {machine.processor()}, {usable_cores()} cores",
            f"copy         {times(self.copy, 1e-9)} GB/s read and written",
            f"turns        {len(self.turns)} of {TOKENS} tokens",
        ]
        if others := disturbed(self.turns):
            lines.append(f"WARNING: other programs ran in {others} of these turns: the figures say little")
        lines += ["", f"{'':9}{'texts':>5}{'after':>6}  {'ms a step':21}{'tokens/s':>9}{'MB':>6}  of a copy"]
        for row in self.rows:
            way = f"{row.precision:9}{row.texts:5}{row.position:6}  {times(row.seconds, 1e3):21}"
            lines.append(f"{way}{row.tokens:9.1f}{row.read / 1e6:6.0f}  {times(row.share, 1, 2)}")
        lines.append("")
        for name, spread in self.ratios.items():
            kind, _, precision = name.partition("_")
            lines.append(f"{RATIOS[kind]:30}{precision:10}{times(spread, 1, 2)}")
        return "\n".join(lines)


def measure_generation(
    config: GPT2Config, options: BenchConfig, threads: int, others: Sequence[Side] = ()
) -> Generation:
    """Let the ways to write, a copy of memory and other programs take turns, as many as `options.steps`."""
    threads = threads or usable_cores()
    parameters = initial_parameters(config, options.seed)
    late = max(EARLY, min(LATE, config.positions - TOKENS))
    ours = {
        (precision, texts, position): Writing(weights, texts, position, threads, options.seed)
        for precision in PRECISIONS
        for weights in [Weights(config, parameters, precision)]
        for texts, position in ((1, EARLY), (1, late), (BATCH, EARLY))
    }
    sides: list[Side] = [*ours.values(), Copying(threads), *others]
    for side in sides:
        side.run(min(options.warmup, TOKENS))
    turns = undisturbed(take_turns(sides, options.steps, TOKENS), options.steps)
    columns = list(zip(*(turn.means for turn in turns), strict=True))
    seconds, copies = dict(zip(ours, columns, strict=False)), columns[len(ours)]
    rows = tuple(
        Row(
            *kind,
            Spread.of(seconds[kind]),
            writing.read,
            Spread.of(writing.read / own * byte for own, byte in zip(seconds[kind], copies, strict=True)),
        )
        for kind, writing in ours.items()
    )
    ratios = {}
    for precision in PRECISIONS:
        early, late_ones, batch = (seconds[kind] for kind in ours if kind[0] == precision)
        ratios[f"flat_{precision}"] = Spread.of(b / a for a, b in zip(early, late_ones, strict=True))
        ratios[f"batch_{precision}"] = Spread.of(BATCH * a / b for a, b in zip(early, batch, strict=True))
    return Generation(config, threads, Spread.of(1 / byte for byte in copies), rows, ratios, turns)


def times(spread: Spread, unit: float, digits: int = 1) -> str:
    """Return median, least and largest."""
    low, middle, high = (f"{value * unit:,.{digits}f}" for value in (spread.least, spread.median, spread.largest))
    return f"{middle} ({low} .. {high})"
