"""Which chunks a run's batches are cut into: what the flags say, or what threads and kernel times lead to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.spans import Span
from daskgpt.kernels.float32.blas import one_order
from daskgpt.model.precision import Precision
from daskgpt.training.chunking import Chunk, Work, cuttings
from daskgpt.training.stand_ins import Trial, most_bytes, rounded
from daskgpt.training.step import TrainingStep

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
