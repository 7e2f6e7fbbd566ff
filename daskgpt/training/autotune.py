"""Into how many chunks a batch is best cut: a rule of its shape, the threads, and what the kernels take.

No bit depends on the chunks where products sum in one order (`kernels.float32.blas.one_order`), so speed and memory
decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.fuse import GRAINS, chunk_of
from daskgpt.graph.nodes import Key
from daskgpt.graph.program import Span
from daskgpt.graph.recording import StepGraph
from daskgpt.kernels.float32.blas import one_order
from daskgpt.model.layers import ATTENTION
from daskgpt.model.parameters import parameter_count
from daskgpt.model.precision import Precision
from daskgpt.training.stand_ins import Trial, most_bytes, rounded
from daskgpt.training.step import TrainingStep

Chunk = tuple[int, int]

# What is expected before anything was measured. Only the ratios matter, which differ little between processors.
RATE = 100e9  # operations a second of one thread's products
ATTENTION_SLOWER = 6  # than products, by operation, forward and backward (tiny: 9 of 40 ms)
# Kernels of few rows spend more of their time on weights and calls: an eighth more with 64 rows, all kernels together
# (products alone: nothing at 3,072 x 768, a third at 512 x 128).
FEW_ROWS = 8
# Tokens cut as well: gathering, and sums of few tokens at a time (tiny: 5 % of a step with 32 tokens, 9 % with 16).
FEW_TOKENS = 1.6
TASK = 0.15e-3  # seconds that a task costs besides its kernels
# One thread gets two chunks as well: the activations of half a batch stay in a cache, and its logits in memory. Not of
# few tokens, of which kernels of half as many are the slower ones.
LEAST_CHUNKS, FEW = 2, 512


@dataclass(frozen=True)
class Work:
    """Seconds of one step's kernels on one thread that chunks share out: gradients of weights and updates are not.

    tokens     of layers that work token by token: any chunk shares them out
    attention  only chunks of other sequences do
    """

    tokens: float
    attention: float

    @classmethod
    def expected(cls, config: GPT2Config, batch_shape: tuple[int, int]) -> Work:
        """From the operations of the products, forward and backward with respect to activations."""
        count, length = math.prod(batch_shape), batch_shape[1]
        attention = 6 * config.blocks * config.channels * (length + 1) * ATTENTION_SLOWER
        return cls(4 * parameter_count(config, multiplied=True) * count / RATE, attention * count / RATE)

    @classmethod
    def measured(cls, recorded: StepGraph, spans: Iterable[Span]) -> Work:
        """From the kernel calls of one step."""
        tokens = attention = 0.0
        for span in spans:
            if span.key in recorded.unmerged and chunk_of(recorded.unmerged, span.key, whole=False) is not None:
                own = recorded.origin(span.key)
                seconds = span.end - span.start
                if own is not None and own.layer == ATTENTION.name:
                    attention += seconds
                else:
                    tokens += seconds
        return cls(tokens, attention)


@dataclass(frozen=True)
class Cutting:
    """One way to cut a batch.

    seconds   that a step is expected to take, but for what chunks do not share out
    """

    chunk: Chunk
    count: int
    seconds: float


def cuttings(
    config: GPT2Config, batch_shape: tuple[int, int], dataflow: DataflowConfig, threads: int, work: Work | None = None
) -> list[Cutting]:
    """Every way to cut a batch that the given chunks leave open, the best one first.

    work   what was measured, None for what is to be expected
    """
    work = work or Work.expected(config, batch_shape)
    sizes = [
        [given] if given else [part for part in range(1, whole + 1) if whole % part == 0]
        for whole, given in zip(batch_shape, (dataflow.batch_chunk, dataflow.sequence_chunk))
    ]
    threads = max(threads, LEAST_CHUNKS if math.prod(batch_shape) > FEW else 1)
    found = [_cutting(config, batch_shape, (b, t), threads, work) for b in sizes[0] for t in sizes[1]]
    return sorted(found, key=lambda cutting: (cutting.seconds, cutting.count, cutting.chunk))


def _cutting(config: GPT2Config, batch_shape: tuple[int, int], chunk: Chunk, threads: int, work: Work) -> Cutting:
    sequences, tokens = (whole // part for whole, part in zip(batch_shape, chunk))
    count = sequences * tokens
    slower = 1 + FEW_ROWS / math.prod(chunk)
    if tokens > 1:
        slower += FEW_TOKENS / chunk[1]
    # Chunks of whole sequences can be a task each; others meet in every block, forward and backward.
    tasks = count if tokens == 1 else count * 4 * config.blocks
    seconds = work.tokens * slower * _longest(count, threads) + work.attention * _longest(sequences, threads)
    return Cutting(chunk, count, seconds + tasks * TASK / threads)


def _longest(parts: int, threads: int) -> float:
    """The share of work in so many equal parts that the busiest thread does.

    Parts that stay whole take as many rounds as are needed; those that are several tasks fill the last round with what
    others have left over. A step lies between the two.
    """
    rounds, filled = math.ceil(parts / threads) / parts, max(1 / threads, 1 / parts)
    return (rounds + filled) / 2


# What other chunks must save of a step, and of a whole run in seconds, to be worth recording the step again.
WORTH_SHARE, WORTH_SECONDS = 0.1, 2.0
# How many cuts are looked at where memory is short, fast ones first: a look takes a second or two for gpt2.
TRIED = 4


class ChunkChoice:
    """The choice of one run.

    first   the chunks of its first step
    reason  why these, for people; empty where they were given
    open    whether the kernel times of that step may still change them; no step overlaps with it then
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_shape: tuple[int, int],
        dataflow: DataflowConfig,
        precision: Precision,
        threads: int,
        *,
        in_place: bool = False,
    ) -> None:
        """threads   how many tasks can run at once
        in_place  whether the state has the same layout however the batch is cut, so that the chunks may change
        """
        self.config, self.batch_shape, self.dataflow, self.threads = config, batch_shape, dataflow, threads
        self.ways = cuttings(config, batch_shape, dataflow, threads)
        self.first = self.ways[0].chunk
        self.free = one_order(precision.dtype)
        self.open = in_place and self.free and len(self.ways) > 1
        self.reason = ""
        if not (dataflow.batch_chunk and dataflow.sequence_chunk):
            self.reason = f"auto, for {threads} thread{'s' * (threads != 1)}"
            if not self.free:
                # By measured times or free memory, two runs of one command could differ.
                self.reason += "; with this matrix product other chunks are other bits"

    def fit(self, step: TrainingStep, window: int, available: int | None) -> str:
        """Cut the batch of a recorded step otherwise where it needs more memory than there is; return a warning where
        that does not help, else nothing.

        window      how many steps overlap
        available   bytes, None where the system does not say
        """
        if available is None or window * most_bytes(step) <= available:
            return ""  # fits in any order of its tasks
        peaks: dict[Chunk, int] = {}
        smaller = [way for way in self.ways if way.count >= self.ways[0].count]
        for way in smaller[: TRIED if self.free else 1]:
            if way.chunk != step.chunk:
                step.set_chunk(way.chunk)
            peaks[way.chunk] = Trial(step, window).peak
            if peaks[way.chunk] <= available:
                break
        least = min(peaks, key=lambda chunk: peaks[chunk])
        if step.chunk != least:
            step.set_chunk(least)
        if least != self.first:
            told, size = described(self.batch_shape, self.first), rounded(peaks[self.first])
            self.reason += f"; {told} would take {size} of the {rounded(available)} that are free"
        self.open = False  # kernel times know nothing of memory
        if peaks[least] <= available:
            return ""
        return (
            f"a step takes {rounded(peaks[least])}, and {rounded(available)} are free: the system may swap, or end "
            "this process. Try a smaller --batch-size or --sequence-length."
        )

    def settle(self, step: TrainingStep, spans: Sequence[Span], steps: int) -> str:
        """Cut the batch anew where kernel times say that this pays; say what was found, nothing if it stays.

        spans   of the kernel calls of one step
        steps   how many are to come
        """
        self.open = False
        work = Work.measured(step.recorded, spans)
        best, *others = cuttings(self.config, self.batch_shape, self.dataflow, self.threads, work)
        now = next((way for way in others if way.chunk == step.chunk), best)
        saved = now.seconds - best.seconds
        if saved < WORTH_SHARE * now.seconds or saved * steps < WORTH_SECONDS:
            return ""
        step.set_chunk(best.chunk)
        told, new, old = described(self.batch_shape, best.chunk), best.seconds * 1e3, now.seconds * 1e3
        return f"{told} from now on (by measured kernel times, {new:.0f} instead of {old:.0f} ms)"

    def described(self, chunk: Chunk) -> str:
        """How many of which size, and why, for people."""
        return described(self.batch_shape, chunk) + (f" ({self.reason})" if self.reason else "")


def described(batch_shape: tuple[int, int], chunk: Chunk) -> str:
    """How many chunks of which size."""
    count = math.prod(whole // part for whole, part in zip(batch_shape, chunk))
    return f"{count} of {chunk[0]} x {chunk[1]}"


# Mean seconds of a task from which on little is lost between tasks: each costs the threaded scheduler 0.1 to 0.2 ms,
# most are shorter than the mean, and a thread may wait for the last one. (gpt2, 4 x 64 tokens, on two cores: 6 % of
# the threads' time with tasks of 18 ms, 2.5 % with 100 ms.)
LONG_ENOUGH = 25e-3
# Tasks of single kernels are for looking at: merging those of one chunk costs no parallelism, and separate ones are
# ordered so that about a quarter more memory is held.
MERGED_GRAINS = GRAINS[GRAINS.index("segment") :]
# Where Dask's scheduler schedules each task, one costs 2 to 4 ms, whatever it does.
SCHEDULED = "block"


class GrainChoice:
    """The choice of one run.

    first   the grain of its first step
    open    whether that step is still to be measured; no step overlaps with it then
    """

    def __init__(self, grain: str, barrier: str, in_place: bool) -> None:
        self.first, self.open = grain, False
        if grain != "auto":
            return
        if barrier == "layer":
            # Fork-join means a wait after each layer, which a task of several layers would hide.
            self.first = "kernel"
        elif in_place:
            self.first, self.open = MERGED_GRAINS[0], True
        else:
            # The packs of a cluster's state follow the grain: it is there from the start.
            self.first = SCHEDULED

    def settle(self, step: TrainingStep, spans: Iterable[Span], threads: int) -> str:
        """Give the step the finest merged grain whose tasks last long enough; say what was found.

        spans   of the kernel calls of one step

        Where there are more threads than chunks, updates have to run beside the backward pass: no chunk is one task.
        """
        self.open = False
        means = mean_seconds(step, spans, MERGED_GRAINS if step.chunks >= threads else MERGED_GRAINS[:-1])
        enough = [grain for grain, mean in means.items() if mean >= LONG_ENOUGH]
        step.set_grain(enough[0] if enough else list(means)[-1])
        return (
            f"{step.grain}, tasks of {means[step.grain] * 1e3:.1f} ms ("
            + ", ".join(f"{grain} {mean * 1e3:.1f}" for grain, mean in means.items())
            + ")"
        )


def mean_seconds(step: TrainingStep, spans: Iterable[Span], grains: Iterable[str]) -> Mapping[str, float]:
    """Grain -> mean seconds of a task, from kernel times."""
    seconds: dict[Key, float] = {}
    for span in spans:
        seconds[span.key] = seconds.get(span.key, 0.0) + span.end - span.start
    means: dict[str, float] = {}
    for grain in grains:
        group_of = step.fusion(grain).groups(step.recorded.unmerged)
        means[grain] = sum(seconds.values(), 0.0) / len({group_of(key) or key for key in seconds})
    return means
