"""The program of one rank on its worker: windows of steps, each window in one task."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
from distributed import get_worker

from daskgpt.config.errors import require
from daskgpt.data.dataset import Batch
from daskgpt.graph.distribute import Rank
from daskgpt.graph.program import Span, Spans
from daskgpt.model.parameters import RandomParameters, tensors, trained_tensors
from daskgpt.model.precision import values_of
from daskgpt.model.step import Outcome, as_weights, weights_in
from daskgpt.schedulers.dask_internals import thread_count
from daskgpt.schedulers.links import LEFT, LostRank, WorkerLink, end_programs, ranks_of
from daskgpt.schedulers.local import local_scheduler
from daskgpt.schedulers.workers import KEPT
from daskgpt.training.engine import LocalEngine
from daskgpt.training.job import Job

Rows = list[tuple[int, np.ndarray]]  # of an array: ranges of its rows, each with its first row


class Window(NamedTuple):
    """The result of a window of steps on a rank.

    outcomes  of its steps
    seconds   that they took
    messages  lines for the terminal
    tasks     number of tasks of a step
    grain     their size
    """

    outcomes: Any
    seconds: float
    messages: list[str]
    tasks: int
    grain: str


class Pack(tuple[np.ndarray, ...]):
    """Arrays that kernels can read where Dask receives them.

    Dask reads the first buffer of a message into one with the header before it, often not aligned to numbers: another
    one is sent first.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (np.zeros(1), *self)


def _received(first: np.ndarray, *arrays: np.ndarray) -> Pack:
    return Pack(arrays)


class RankProgram:
    """One rank of a job: its engine, whose state has all weights, and the moments of the rows that the rank owns.

    started   whether it has a state
    """

    def __init__(self, job: Job, epoch: str, number: int, addresses: Sequence[str], most_threads: int) -> None:
        """most_threads   of a rank"""
        worker = get_worker()
        self.job, self.epoch, count = job, epoch, len(addresses)
        self.link = WorkerLink(worker, epoch, number, addresses)
        self.scheduler = local_scheduler("threads", thread_count(worker))
        self.messages: list[str] = []
        self.busy = Lock()  # held by a window
        self.inherited: dict[int, dict[str, Rows]] = {}  # rows of ranks that have left, by array
        self.first, self.kept = 0, list[Span]()  # step of the first run, and spans for a timeline
        self.recent = deque[Spans](maxlen=2)  # spans of the last two windows, for the dashboard
        rank = Rank(number, count, self.link, job.groups, *job.batch_shape, most_threads)
        self.engine = LocalEngine(job, self.scheduler, self.messages.append, rank if count > 1 else None)
        self.started = False

    def owned(self) -> dict[str, int]:
        """Return how many rows of each array of the state are updated here."""
        owned = self.engine.step.owned
        rows = {name: sum(r.stop - r.start for r in owned[tensor.name]) for name, tensor in self.job.state.items()}
        return {name: count for name, count in rows.items() if count}

    def load(self, step: int, names: Sequence[Sequence[str]] | int, *packs: Sequence[Any]) -> None:
        """Begin with a state: packs of arrays with these names; `names` is a seed for random weights."""
        if isinstance(names, int):
            values = as_weights(RandomParameters(self.job.config, names))
        else:
            values = {name: value for members, pack in zip(names, packs) for name, value in zip(members, pack)}
        weights = {name: np.require(value, requirements="A") for name, value in weights_in(values).items()}
        # Dask's own arrays serve as constants: they stay as long as they are held here.
        weights |= {name: np.array(weights[name]) for name in trained_tensors(self.job.config)}
        self.engine.start(weights, step=step)
        held = self._held()
        for name, tensor in self.job.moments.items():
            for rows in self.engine.step.owned[tensor.name] if name in values else ():
                held[name][rows] = values[name][rows]
        self.started = True

    def window(self, first: int, length: int, parts: Sequence[np.ndarray], kept: bool) -> Window:
        """Make some steps, one a batch.

        length   of the run in steps
        parts    of batches (steps, sequences, T): tokens and targets as unsigned integers, of pairs loss weights
        kept     whether to keep their kernel calls for a timeline
        """
        tokens, targets, *others = parts
        batches = list(zip(tokens.astype(np.int32), targets.astype(np.int32), *others))
        with self.busy:
            start = time.perf_counter()
            with self.scheduler.record():
                spans = self.scheduler.spans
                assert spans is not None
                self.recent.append(spans)
                try:
                    outcomes = self._run(first, batches, length)
                except BaseException:
                    self.link.fail("a rank has failed")
                    raise
            self.kept += spans if kept else []
            messages, self.messages[:] = self.messages[:], []
            seconds = time.perf_counter() - start
            del spans[:-KEPT]
            step = self.engine.step
            return Window(outcomes, seconds, messages, step.tasks, step.dials.grain)

    def _run(self, first: int, batches: Sequence[Batch], length: int) -> list[Outcome]:
        """Run one step per batch; return their outcomes."""
        self.require_state(first)
        self.first = first - self.scheduler.runs
        outcomes: list[Outcome] = []
        while len(outcomes) < len(batches):
            together = batches[len(outcomes) : len(outcomes) + self.engine.together()]
            outcomes += self.engine.run(together, length)
        return outcomes

    def copy(self, step: int, names: Sequence[str], rank: int) -> list[Rows]:
        """Return copies of what a rank owns of some arrays after some steps: this rank, or one that has left."""
        self.require_state(step)
        if rank in self.inherited:
            return [self.inherited[rank][name] for name in names]
        held, owned, tensor_of = self._held(), self.engine.step.owned, self.job.state
        return [
            [(rows.start, values_of(held[name])[rows].copy()) for rows in owned[tensor_of[name].name]] for name in names
        ]

    def _held(self) -> dict[str, Any]:
        """Return the arrays of the state by name, as this rank holds them."""
        state = self.engine.state()
        return state.layout.unpack(state.packs)

    def leave(self) -> None:
        """Leave the own rows to another rank; a window under way ends first."""
        self.link.announce()
        with self.busy:
            if not self.started or self.link.lost:
                return
            names = list(self.job.state)
            rows = self.copy(self.engine.made, names, self.link.number)
        self.link.hand_over(dict(zip(names, rows)))

    def inherit(self, rank: int) -> None:
        """Take the rows that a rank has left to this one."""
        if (rows := self.link.receive(rank, LEFT)) is None:
            raise LostRank("its state was left to a worker that leaves too")
        self.inherited[rank] = rows

    def require_state(self, step: int) -> None:
        """Errors   LostRank if this rank has not the state after so many steps"""
        if not self.started or self.engine.made != step or self.link.lost:
            raise LostRank(self.link.lost or f"the state after {step} steps is gone")


def call(run: str, epoch: str, method: str, *arguments: Any) -> Any:
    """Call a method of the program that this worker has of a run; `begin` makes one."""
    if method == "begin":
        return begin(run, epoch, *arguments)
    program = ranks_of(get_worker()).programs.get(run)
    if program is None or program.epoch != epoch:
        raise LostRank("its worker is gone")
    return getattr(program, method)(*arguments)


def rows_of(run: str, epoch: str, *arguments: Any) -> list[Rows] | None:
    """Return copies of rows of a rank, see `RankProgram.copy`; None if they are gone.

    Dask makes rows again to replace a copy that was lost with its worker. If that failed with an error, the next task
    that reads the other copy would lose it too: Dask lets a task fail that depends, however indirectly, on an error,
    even where the result between them is in memory.
    """
    with suppress(LostRank):
        return cast(list[Rows], call(run, epoch, "copy", *arguments))
    return None


def begin(run: str, epoch: str, job: Job, *place: Any) -> dict[str, int]:
    """Make this worker a rank, which records its step; return how many rows of each array it owns.

    place   the other arguments of `RankProgram`

    Errors   ValueError if the worker would train another model than the client wants
    """
    rule, got = "a worker must have the client's modules", {"client": job.modules, "worker": job.modules_here()}
    require(got["worker"] == job.modules, "fit", rule, got, "Copy them there, and restart the workers.")
    end_programs(run, get_worker())
    program = ranks_of(get_worker()).programs[run] = RankProgram(job, epoch, *place)
    return program.owned()


def join_rows(*parts: Sequence[Rows] | None) -> tuple[np.ndarray, ...]:
    """Join whole arrays from copies of the rows of each rank.

    Errors   LostRank if a part is gone
    """
    there, arrays = [part for part in parts if part is not None], list[np.ndarray]()
    if len(there) < len(parts):
        raise LostRank("the rows of a copy are gone")
    for of_ranks in zip(*there):
        rows = [values for _, values in sorted(chain(*of_ranks), key=itemgetter(0))]
        arrays.append(np.concatenate(rows) if len(rows) > 1 else rows[0])
    return tuple(arrays)


def hold_pack(job: Job, names: Sequence[str], arrays: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """Return weights as a step holds them."""
    table = tensors(job.config)
    return tuple(job.precision.hold(table[name.partition(".")[2]], array) for name, array in zip(names, arrays))


async def abort(run: str, epoch: str, dask_worker: Any) -> None:
    """Let the tasks of a rank fail that wait for other ranks."""
    program = ranks_of(dask_worker).programs.get(run)
    if program is not None and program.epoch == epoch:
        program.link.fail("another rank has failed")
