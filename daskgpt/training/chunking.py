"""Into how many chunks a batch is best cut: a rule of its shape, the threads, and what the kernels take.

No bit depends on the chunks where products sum in one order (`kernels.float32.blas.one_order`), so speed and memory
decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.grain import chunk_of
from daskgpt.graph.recording import Recorded
from daskgpt.graph.spans import Span
from daskgpt.model.layers import ATTENTION
from daskgpt.model.parameters import parameter_count

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
    def measured(cls, recorded: Recorded, spans: Iterable[Span]) -> Work:
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
