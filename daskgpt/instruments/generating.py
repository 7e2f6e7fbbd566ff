"""Time how a model writes: the cost of a token early and late in a text, of a batch, and the memory's share in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import PRECISIONS, Choice, Texts
from daskgpt.instruments import machine
from daskgpt.instruments.compare.transformers_process import TransformersSide
from daskgpt.instruments.compare.turns import Side, Turn, disturbed, take_turns, undisturbed
from daskgpt.instruments.records import Figure, figures_of
from daskgpt.instruments.statistics import Spread
from daskgpt.model.parameters import initial_parameters, parameter_count
from daskgpt.schedulers.local import usable_cores
from daskgpt.schedulers.machine import copy_rate

EARLY, LATE, BATCH = 10, 900, 8  # tokens that stand before, and texts
TOKENS = 16  # of a turn
LIKELIEST = Choice(temperature=0)


class _OfThisProcess:
    """What a `compare.turns.Side` says besides its times."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def reset_peak(self) -> None:
        machine.reset_peak_memory()

    def peak(self) -> int:
        return machine.peak_memory()

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
        super().__init__()
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
        super().__init__()
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

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        known = {"precision": self.precision, "texts": self.texts, "position": self.position}
        known |= {"tokens_per_s": round(self.texts / self.seconds.median, 2), "read_mb": round(self.read / 1e6, 1)}
        return known | self.seconds.fields("step_ms", 1e3, 3) | self.share.fields("bandwidth_share", 1, 4)


@dataclass(frozen=True)
class Generation:
    """What was found.

    ratios     what several rows say together, by name: each turn's
    theirs     seconds a token of the other program, and how it is called; None where there is none
    others     turns that other programs disturbed
    """

    config: GPT2Config
    threads: int
    copy: Spread
    rows: tuple[Row, ...]
    ratios: dict[str, Spread]
    theirs: tuple[str, Spread] | None
    turns: int
    others: int

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        known: dict[str, Any] = {"turns": self.turns, "disturbed_turns": self.others, "threads": self.threads}
        known |= self.copy.fields("copy_gb_per_s", 1e-9, 3) | {"rows": [row.record() for row in self.rows]}
        for name, spread in self.ratios.items():
            known |= spread.fields(name, 1, 4)
        if self.theirs:
            known |= {"against": self.theirs[0]} | self.theirs[1].fields("theirs_ms", 1e3, 3)
        return known

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements; a way to write is called by precision, texts, and tokens that stand before."""
        known = {"copy": Figure.of(self.copy, "GB/s", 1e-9)} | figures_of(self.ratios, "")
        for row in self.rows:
            name = f"{row.precision}_{row.texts}_{row.position}"
            known[f"{name}_step"] = Figure.of(row.seconds, "ms", 1e3)
            known[f"{name}_share"] = Figure.of(row.share, "")
            known[f"{name}_tokens"] = Figure.single(row.texts / row.seconds.median, "tokens/s")
            known[f"{name}_read"] = Figure.single(row.read / 1e6, "MB")
        if self.theirs:
            known["theirs"] = Figure.of(self.theirs[1], "ms", 1e3)
        return known

    def describe(self) -> str:
        """For a person to read."""
        lines = [
            f"model        {parameter_count(self.config):,} parameters, {self.threads} threads",
            f"machine      {machine.processor()}, {usable_cores()} cores",
            f"copy         {_times(self.copy, 1e-9)} GB/s read and written",
            f"turns        {self.turns} of {TOKENS} tokens",
        ]
        if self.others:
            lines.append(f"WARNING: other programs ran in {self.others} of these turns: the figures say little")
        lines += ["", f"{'':9}{'texts':>5}{'after':>6}  {'ms a step':21}{'tokens/s':>9}{'MB':>6}  of a copy"]
        for row in self.rows:
            told = f"{row.precision:9}{row.texts:5}{row.position:6}  {_times(row.seconds, 1e3):21}"
            told += f"{row.texts / row.seconds.median:9.1f}{row.read / 1e6:6.0f}"
            lines.append(f"{told}  {_times(row.share, 1, 2)}")
        names = {
            "flat": "a late token / an early one",
            "batch": f"tokens/s of {BATCH} texts / of 1",
            "rate": "tokens/s, daskgpt / theirs",
        }
        lines.append("")
        for name, spread in self.ratios.items():
            kind, _, precision = name.partition("_")
            lines.append(f"{names[kind]:30}{precision:10}{_times(spread, 1, 2)}")
        if self.theirs:
            lines.append(f"{self.theirs[0]}: {_times(self.theirs[1], 1e3)} ms a token, prompt included")
        return "\n".join(lines)


def measure_generation(
    config: GPT2Config, threads: int, seed: int, warmup: int, turns: int, against: bool = False
) -> Generation:
    """Let the ways to write, a copy of memory and, where it is wanted, transformers take turns.

    Errors   RuntimeError where transformers writes another text
    """
    threads = threads or usable_cores()
    parameters = initial_parameters(config, seed)
    late = max(EARLY, min(LATE, config.positions - TOKENS))
    ours = {
        (precision, texts, position): Writing(weights, texts, position, threads, seed)
        for precision in PRECISIONS
        for weights in [Weights(config, parameters, precision)]
        for texts, position in ((1, EARLY), (1, late), (BATCH, EARLY))
    }
    with ExitStack() as running:
        sides: list[Side] = [*ours.values(), Copying(threads)]
        theirs = None
        if against:
            (prompt,) = random_prompts(config, 1, EARLY, seed)
            theirs = running.enter_context(TransformersSide(config, seed, threads, prompt))
            float32 = ours["float32", 1, EARLY].texts.weights
            beside = Writing(float32, 1, EARLY, threads, seed, whole=True)
            sides += [beside, theirs]
        for side in sides:
            side.run(min(warmup, TOKENS))
        if theirs:
            theirs.compare(beside.written[0])
        found = undisturbed(take_turns(sides, turns, TOKENS), turns)
    return _summed_up(config, threads, ours, found, theirs.name if theirs else "")


def _summed_up(
    config: GPT2Config, threads: int, ours: dict[tuple[str, int, int], Writing], found: Sequence[Turn], other: str
) -> Generation:
    columns = list(zip(*(turn.means for turn in found), strict=True))
    by_kind = dict(zip(ours, columns, strict=False))
    copies = columns[len(ours)]
    rows = tuple(
        Row(
            *kind,
            Spread.of(by_kind[kind]),
            writing.read,
            Spread.of(writing.read / seconds * byte for seconds, byte in zip(by_kind[kind], copies, strict=True)),
        )
        for kind, writing in ours.items()
    )
    ratios = {}
    for precision in PRECISIONS:
        early, late, batch = (by_kind[kind] for kind in ours if kind[0] == precision)
        ratios[f"flat_{precision}"] = Spread.of(b / a for a, b in zip(early, late, strict=True))
        ratios[f"batch_{precision}"] = Spread.of(BATCH * a / b for a, b in zip(early, batch, strict=True))
    theirs = None
    if other:
        theirs = other, Spread.of(columns[-1])
        ratios["rate_float32"] = Spread.of(their / our for our, their in zip(*columns[-2:], strict=True))
    copy = Spread.of(1 / byte for byte in copies)
    return Generation(config, threads, copy, rows, ratios, theirs, len(found), disturbed(found))


def _times(spread: Spread, unit: float, digits: int = 1) -> str:
    """Median, least and largest."""
    low, middle, high = (f"{value * unit:,.{digits}f}" for value in (spread.least, spread.median, spread.largest))
    return f"{middle} ({low} .. {high})"
