"""Time how a model writes: `python benchmarks/generation.py --preset gpt2 --threads 2`.

One text after 10 and after 900 tokens, and eight at once, a token at a time, in float32 and bfloat16: milliseconds of a
step, how many bytes of weights, keys and values it reads, and which share of the rate of a copy on as many threads
(bytes read and written) that is; in --steps turns of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from compare.turns import Side, Turn, disturbed, take_turns, undisturbed
from copies import copy_rate
from records import Figure, add_record_flag, check_record, record

from daskgpt.config.errors import require, text_table
from daskgpt.config.flags import Parser, add_flags, from_flags, given_flags, run_command
from daskgpt.config.model import PRESETS, ModelConfig, preset
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import PRECISIONS, Choice, Texts
from daskgpt.model.parameters import initial_parameters, parameter_count
from daskgpt.profiling.measure import BenchConfig, Spread
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.training.job import compile_kernels

EARLY, LATE, BATCH = 10, 900, 8  # tokens that stand before, and texts
TOKENS = 16  # of a turn
COPIED = 1 << 27  # bytes: more than the caches of most machines
LIKELIEST = Choice(temperature=0)


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
        decoder = self.texts.decoder
        config, positions = decoder.weights.config, len(self.prompts) * (self.position + TOKENS // 2 + 1)
        numbers: int = config.blocks * config.key_heads * (config.head_channels + decoder.row.shape[1])
        return decoder.weights.bytes + positions * numbers * int(decoder.keys.itemsize)


class Copying(_OfThisProcess):
    """Copies of memory: a step is the time of one byte, read or written."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def run(self, count: int) -> list[float]:
        return [1 / (self.threads * copy_rate(self.threads, 2 * COPIED // self.threads))]


def random_prompts(config: ModelConfig, texts: int, length: int, seed: int) -> list[list[int]]:
    """Tokens, uniform over the vocabulary; the same for the same seed."""
    tokens = np.random.default_rng([seed, texts]).integers(0, config.vocabulary, (texts, length))
    prompts: list[list[int]] = tokens.tolist()
    return prompts


class Measured(NamedTuple):
    """What was measured: texts to print, settings, figures, and a table whose first line is the head."""

    facts: Mapping[str, str]
    settings: Mapping[str, Any]
    figures: Mapping[str, Figure]
    table: Sequence[Sequence[str]]

    def describe(self) -> str:
        return "\n".join([*(f"{name:12} {text}" for name, text in self.facts.items()), "", text_table(self.table)])


def measure_generation(
    config: ModelConfig, options: BenchConfig, threads: int, others: Sequence[Side] = ()
) -> tuple[Measured, Sequence[Turn]]:
    """Let the ways to write, a copy of memory and other programs take turns, as many as `options.steps`.

    A way to write is called by precision, texts, and tokens that stand before: `float32_1_10`. Its share is that of a
    copy's rate at which its bytes were read; `flat` is a late token's time over an early one's, `batch` the tokens a
    second of some texts over those of one.
    """
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
    columns = [np.array(column) for column in zip(*(turn.means for turn in turns), strict=True)]
    seconds, copies = dict(zip(ours, columns, strict=False)), columns[len(ours)]
    figures = {"copy": Figure.of(Spread.of(1 / copies), "GB/s", 1e-9)}
    for precision in PRECISIONS:
        early, late_ones, batch = (times for kind, times in seconds.items() if kind[0] == precision)
        figures[f"flat_{precision}"] = Figure.of(Spread.of(late_ones / early), "")
        figures[f"batch_{precision}"] = Figure.of(Spread.of(BATCH * early / batch), "")
    table = [["", "texts", "after", "a step", "", "read", "of a copy"]]
    for (precision, texts, position), writing in ours.items():
        step, name = seconds[precision, texts, position], f"{precision}_{texts}_{position}"
        row = {
            "step": Figure.of(Spread.of(step), "ms", 1e3),
            "share": Figure.of(Spread.of(writing.read / step * copies), ""),
            "tokens": Figure.single(texts / float(np.median(step)), "tokens/s"),
            "read": Figure.single(writing.read / 1e6, "MB"),
        }
        figures |= {f"{name}_{what}": figure for what, figure in row.items()}
        cells = (row["step"].text(1), row["tokens"].text(1), row["read"].text(0), row["share"].text(2))
        table.append([precision, str(texts), str(position), *cells])
    facts = {
        "model": f"{parameter_count(config):,} parameters, {threads} threads",
        "machine": f"{machine.processor()}, {usable_cores()} cores",
        "copy": f"{figures['copy'].text(1)} read and written",
        "turns": f"{len(turns)} of {TOKENS} tokens",
        **{f"late / early, {name}": figures[f"flat_{name}"].text(2) for name in PRECISIONS},
        **{f"{BATCH} texts / 1, {name}": f"{figures[f'batch_{name}'].text(2)} tokens/s" for name in PRECISIONS},
    }
    if met := disturbed(turns):
        facts["WARNING"] = f"other programs ran in {met} of these turns: the figures say little"
    return Measured(facts, {"threads": threads, "disturbed_turns": disturbed(turns)}, figures, table), turns


def main(arguments: list[str]) -> int:
    """Check everything, measure, print and record it."""
    flags = Parser(prog="generation", description=__doc__)
    flags.add_argument("--preset", default="tiny", help=f"size of the model: {', '.join(PRESETS)} (default: tiny)")
    flags.add_argument("--threads", type=int, default=0, help="0 = one per core")
    add_record_flag(flags)
    add_flags(flags, ModelConfig)
    add_flags(flags, BenchConfig)
    values = flags.parse_args(arguments)
    config = preset(values.preset, **given_flags(ModelConfig, values))
    rule, least = "a model that writes must have enough positions", EARLY + TOKENS
    require(config.positions >= least, "generation", rule, {"positions": config.positions}, f"Give {least} or more.")
    check_record(values.record)
    compile_kernels()
    measured, _ = measure_generation(config, from_flags(BenchConfig, values), values.threads)
    settings = {"preset": values.preset, **measured.settings}
    record(values.record, "benchmarks/generation.py", arguments, measured.figures, "a token at a time", **settings)
    print(measured.describe())
    return 0


if __name__ == "__main__":
    run_command(main)
