"""Automatic choice of chunks and grain: from the cost model, trials without data, and measured kernel times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import dask.local
import numpy as np

from daskgpt.config.errors import number_of
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.calls import KernelCall, call_of
from daskgpt.graph.compiled import Submission
from daskgpt.graph.fuse import FEW_THREADS, GRAINS
from daskgpt.graph.nodes import Key, is_leaf, task
from daskgpt.graph.program import Call, Program, Span
from daskgpt.model.layers import ATTENTION, chosen
from daskgpt.model.optimizer import optimizer_of
from daskgpt.model.parameters import tensors
from daskgpt.model.step import CompiledStep
from daskgpt.schedulers.local import LocalScheduler
from daskgpt.training.cost import Work

Chunk = tuple[int, int]

# One thread gets two chunks as well, so that the activations of half a batch stay in a cache; except of few tokens,
# for which kernels are slower by half.
LEAST_CHUNKS, FEW = 2, 512


@dataclass(frozen=True, order=True)
class Candidate:
    """A size of chunks.

    seconds   expected of a step, except for work that chunks do not divide
    count     how many chunks there are
    """

    seconds: float
    count: int
    chunk: Chunk


def candidates(
    config: ModelConfig,
    batch_shape: Chunk,
    dataflow: DataflowConfig,
    threads: int,
    dropout: float = 0.0,
    work: Work | None = None,
) -> list[Candidate]:
    """Return all sizes of chunks that the given settings leave open, the best one first.

    dropout  with it, attention is not divided by heads
    work     as measured; None for the expected work
    """
    work = work or Work.expected(config, batch_shape)
    heads = 1 if dropout or chosen(config, "attention") is not ATTENTION else config.key_heads
    sizes = [
        [given] if given else [part for part in range(1, whole + 1) if whole % part == 0]
        for whole, given in zip(batch_shape, (dataflow.batch_chunk, dataflow.sequence_chunk))
    ]
    threads = max(threads, LEAST_CHUNKS if math.prod(batch_shape) > FEW else 1)
    sizes_of_chunks = []
    for chunk in product(*sizes):
        sequences, tokens = cut = tuple(whole // part for whole, part in zip(batch_shape, chunk))
        seconds = work.seconds(heads, config.blocks, chunk, cut, threads)
        sizes_of_chunks.append(Candidate(seconds, sequences * tokens, (chunk[0], chunk[1])))
    return sorted(sizes_of_chunks)


# How much of a step, and how many seconds of a run, other chunks must save to be worth recording the step again.
WORTH_SHARE, WORTH_SECONDS = 0.1, 2.0
# How many sizes are tried where memory is short, the fastest first: each takes a second or two for gpt2.
TRIED = 4


class ChunkChoice:
    """The choice of a run's chunks.

    first      the chunks of the first step
    reason     of the choice, for people; empty if chunks were given
    undecided  whether kernel times of the first step may change it; no step overlaps with that one
    """

    def __init__(
        self, config: ModelConfig, batch_shape: Chunk, dataflow: DataflowConfig, threads: int, dropout: float = 0.0
    ) -> None:
        """threads   how many tasks can run at once"""
        self.batch_shape = batch_shape
        self.candidates_by = partial(candidates, config, batch_shape, dataflow, threads, dropout)
        self.candidates = self.candidates_by(None)
        self.first = self.candidates[0].chunk
        self.undecided = len(self.candidates) > 1
        self.reason = ""
        if not (dataflow.batch_chunk and dataflow.sequence_chunk):
            self.reason = f"auto, for {number_of(threads, 'thread')}"

    def fit(self, step: CompiledStep, window: int, available: float) -> tuple[CompiledStep, str]:
        """Return a step that needs no more memory than there is, with other chunks if need be; a warning if none does.

        window      how many steps overlap
        available   bytes
        """
        if window * most_bytes(step) <= available:
            return step, ""  # fits in any order of its tasks
        tried = list[tuple[int, CompiledStep]]()  # with their peaks
        smaller = [one.chunk for one in self.candidates if one.count >= self.candidates[0].count]
        for chunk in smaller[:TRIED]:
            other = step if chunk == self.first else step.with_dials(chunk=chunk)
            tried.append((Trial(other, window).peak, other))
            if tried[-1][0] <= available:
                break
        peak, least = min(tried, key=itemgetter(0))
        if least is not step:
            first, size = described(self.batch_shape, self.first), rounded(tried[0][0])
            self.reason += f"; {first} would take {size} of the {rounded(available)} that are free"
        self.undecided = False  # kernel times do not depend on memory
        if peak <= available:
            return least, ""
        return least, (
            f"a step takes {rounded(peak)}, and {rounded(available)} are free: the system may swap, or end "
            "this process. Try a smaller --batch-size or --sequence-length."
        )

    def choose(self, step: CompiledStep, spans: Sequence[Span], steps: int) -> tuple[CompiledStep, str]:
        """Return the step with other chunks where kernel times show that this pays, and a line on it, else "".

        spans   of the kernel calls of one step
        steps   how many steps remain
        """
        self.undecided = False
        work = Work.measured(step.kernels, spans)
        sizes = self.candidates_by(work)
        best, now = sizes[0], next((one for one in sizes if one.chunk == step.dials.chunk), sizes[0])
        saved = now.seconds - best.seconds
        if saved < WORTH_SHARE * now.seconds or saved * steps < WORTH_SECONDS:
            return step, ""
        size, new, old = described(self.batch_shape, best.chunk), best.seconds * 1e3, now.seconds * 1e3
        line = f"{size} from now on (by measured kernel times, {new:.0f} instead of {old:.0f} ms)"
        return step.with_dials(chunk=best.chunk), line

    def described(self, chunk: Chunk) -> str:
        """Return number and size of chunks, and the reason of the choice, for people."""
        return described(self.batch_shape, chunk) + (f" ({self.reason})" if self.reason else "")


def described(batch_shape: Chunk, chunk: Chunk) -> str:
    """Return number and size of chunks, for people."""
    count = math.prod(whole // part for whole, part in zip(batch_shape, chunk))
    return f"{count} of {chunk[0]} x {chunk[1]}"


# Mean seconds of a task beyond which little time is lost between tasks: each costs Dask's threads 0.1 to 0.2 ms,
# most are shorter than the mean, and a thread may wait for the last one. (gpt2, 4 x 64 tokens, on two cores: 6 % of
# the threads' time with tasks of 18 ms, 2.5 % with 100 ms.)
LONG_ENOUGH = 25e-3
# Tasks of single kernels are for inspection: merging those of one chunk costs no parallelism, and separate ones are
# ordered so that about a quarter more memory is held.
MERGED_GRAINS = GRAINS[GRAINS.index("segment") :]
# Of tasks that Dask's scheduler schedules one by one: each costs 2 to 4 ms, whatever it does.
SCHEDULED = "block"


class GrainChoice:
    """The choice of a run's grain.

    first      the grain of the first step
    undecided  whether that step is still to be measured; no step overlaps with it then
    """

    def __init__(self, grain: str, barrier: str, in_place: bool) -> None:
        self.first, self.undecided = grain, False
        if grain == "auto" and barrier == "layer":
            self.first = "kernel"  # fork-join waits after each layer, which a task of several layers would hide
        elif grain == "auto":
            # Out of place the packs of the state follow the grain, which must be known from the start.
            self.first, self.undecided = (MERGED_GRAINS[0], True) if in_place else (SCHEDULED, False)

    def choose(
        self, step: CompiledStep, spans: Iterable[Span], threads: int, available: float
    ) -> tuple[CompiledStep, str]:
        """Return the step with the finest merged grain whose tasks last long enough, and a line on it.

        spans      of the kernel calls of one step
        available  bytes

        With more threads than chunks, updates must run beside the backward pass: then no chunk is one task. Many
        threads that all have as many chunks wait least if each chunk is one task, where the memory suffices; but not on
        ranks, whose sums would be few tasks.
        """
        self.undecided = False
        seconds: dict[Key, float] = defaultdict(float)
        for span in spans:
            seconds[span.key] += span.end - span.start
        means: dict[str, float] = {}
        whole = step.chunks >= threads and not (step.rank and threads > FEW_THREADS)
        for grain in MERGED_GRAINS if whole else MERGED_GRAINS[:-1]:
            groups = replace(step.dials, grain=grain).fusion(step.rank is not None).groups(step.kernels.graph)
            means[grain] = sum(seconds.values(), 0.0) / len({groups.get(key) or key for key in seconds})
        long_enough = next((grain for grain, mean in means.items() if mean >= LONG_ENOUGH), list(means)[-1])
        alike = threads > FEW_THREADS and whole and step.chunks % threads == 0
        chosen = step.with_dials(grain=MERGED_GRAINS[-1] if alike else long_enough)
        if alike and most_bytes(chosen) > available and Trial(chosen).peak > available:
            chosen = step.with_dials(grain=long_enough)
        grain, others = chosen.dials.grain, ", ".join(f"{grain} {mean * 1e3:.1f}" for grain, mean in means.items())
        return chosen, f"{grain}, tasks of {means[grain] * 1e3:.1f} ms ({others})"


CLASSES = ("parameters", "gradients", "optimizer", "activations")


class StandIn:
    """An array without data; a trial counts its bytes as long as it is referenced."""

    def __init__(self, trial: Trial, name: str, nbytes: int) -> None:
        self.alive, self.name, self.nbytes = trial.alive, name, nbytes
        trial.made[name] += nbytes
        trial.alive[name] += nbytes
        if trial.alive.total() > trial.at_peak.total():
            trial.at_peak = trial.alive.copy()

    def __del__(self) -> None:
        self.alive[self.name] -= self.nbytes


def empty_submission(step: CompiledStep, packs: Sequence[Any], window: int = 1) -> Submission:
    """Return what a scheduler gets for a step, or for several that overlap, whose inputs have a size but no data."""
    values = {n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in step.kernels.inputs.items()}
    return step.submission([values] * window, packs)


class Trial(LocalScheduler):
    """A compiled step that is run without data: each kernel call returns arrays with only a size, stand-ins.

    Dask runs the step's own tasks one by one. The stand-ins are counted while they live, and Dask and the tasks drop
    them when they would drop the real arrays. Each call knows the sizes of its results, so a new layer needs nothing
    here.

    made      bytes of all arrays that were made, by class
    alive     of those that live now
    at_peak   of those that lived when there were most
    """

    def __init__(self, step: CompiledStep, window: int = 1) -> None:
        """Try one step, or several that overlap."""
        super().__init__(dask.local.get_sync, "nothing is run")
        self.step, self.precision, self.tensors = step, step.dials.precision, tensors(step.config)
        self.alive, self.made, self.at_peak = Counter[str](), Counter[str](), Counter[str]()
        packs = step.layout.pack({name: self._state(name) for name in step.kernels.leaves})
        self.run(empty_submission(step, packs, window))

    @property
    def peak(self) -> int:
        """The peak of the bytes of all arrays."""
        return self.at_peak.total()

    def run(self, submission: Submission) -> list[Any]:
        without_data = {
            key: node if is_leaf(node) else task(key, self._without_data(node.func), node.args)
            for key, node in submission.graph.items()
        }
        return super().run(submission._replace(graph=without_data))

    def _state(self, name: str) -> StandIn:
        """Return a tensor of the state by its name there, KIND.NAME."""
        kind, _, parameter = name.partition(".")
        if kind == "weight":
            return StandIn(self, "parameters", self.precision.held_bytes(self.tensors[parameter]))
        shape = self.step.moments[name].shape
        count = sum(rows.stop - rows.start for rows in self.step.owned[parameter])
        return self.array("optimizer", (count, *shape[1:]), self.precision.dtype)

    def _without_data(self, program: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(program, Program):  # a barrier
            return program
        without_data = copy(program)
        without_data.lowered = None
        without_data.calls = tuple(replace(call, function=self._stand_in(call)) for call in program.calls)
        return without_data

    def _stand_in(self, call: Call) -> Callable[..., Any]:
        """Return a function that returns stand-ins for the arrays of a call."""
        function: Any = call.function
        return partial(getattr(function, "__self__", function).stand_in, self, call.key)

    def array(self, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> StandIn:
        """See `graph.calls.Memory`."""
        return StandIn(self, kind, math.prod(shape) * dtype.itemsize)

    def updated(self, parameter: str) -> list[Any]:
        """See `graph.calls.Memory`."""
        row = optimizer_of(self.step.optimizer.optimizer).of(self.tensors[parameter])
        kinds = ["weight", *row.moments]
        return [self._state(f"{kind}.{parameter}") for kind in kinds]


def most_bytes(step: CompiledStep) -> int:
    """Return the bytes of everything that a step holds or makes, as if nothing were dropped: a quick upper bound."""
    table, precision = tensors(step.config), step.dials.precision
    numbers = sum(math.prod(tensor.shape) for tensor in (*table.values(), *step.moments.values()))
    # In place no call returns a gradient, but if it is summed separately, it is made nevertheless.
    size = numbers * precision.dtype.itemsize + sum(precision.held_bytes(tensor) for tensor in table.values())
    for key, node in step.kernels.graph.items():
        if isinstance(call := call_of(node), KernelCall):
            size += sum(map(math.prod, call.shapes(key))) * call.dtype.itemsize
    return size


def rounded(size: float) -> str:
    """Return bytes as text, in MB or GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
