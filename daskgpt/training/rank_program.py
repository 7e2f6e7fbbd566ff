"""What a worker runs of a job that several of them share: one rank's steps, a window of them in one task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from distributed import get_worker

from daskgpt.graph.distribute import Rank
from daskgpt.model.parameters import RandomParameters, tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.links import LostRank, WorkerLink, end_programs, programs_of
from daskgpt.schedulers.local import local_scheduler
from daskgpt.training.job import Job
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.step import Batch, Limits, Outcome, State

Owned = dict[str, list[tuple[int, int]]]  # rows of each tensor that a rank updates


class RankProgram:
    """One rank of a job on its worker: the recorded step, the weights, and the moments that it owns."""

    def __init__(self, job: Job, epoch: str, number: int, addresses: Sequence[str]) -> None:
        worker = get_worker()
        self.job, self.epoch = job, epoch
        self.link = WorkerLink(worker, epoch, number, addresses)
        rank = Rank(number, len(addresses), job.groups, *job.batch_shape, self.link)
        threads = worker.state.nthreads
        scheduler = local_scheduler("threads" if threads > 1 else "sync", threads)
        self.said: list[str] = []
        self.steps = JobSteps(job, scheduler, self.said.append, rank=rank if len(addresses) > 1 else None)
        self.state: State | None = None

    def owned(self) -> Owned:
        """The rows of each tensor that are updated here."""
        shapes = {name: tensor.shape for name, tensor in tensors(self.job.config).items()}
        rows = {name: self.steps.step.owned_rows(name) for name in shapes}
        return {name: [own.indices(shapes[name][0])[:2] for own in some] for name, some in rows.items() if some}

    def load(self, values: Mapping[str, Any], step: int) -> None:
        """Begin with a state: all weights, and the moments that are owned, or none for zeros."""
        parameters = {name.removeprefix("weight."): np.array(v) for name, v in values.items() if name[:7] == "weight."}
        self.state = self.steps.initial(parameters, None, step)
        held = self.state.layout.unpack(self.state.packs)
        for name, value in values.items():
            if not name.startswith("weight."):
                for rows in self.steps.step.owned_rows(name.partition(".")[2]):
                    held[name][rows] = value[rows]

    def run(self, first: int, length: int, batches: Sequence[Batch], limits: Limits) -> list[Outcome]:
        """A step a batch."""
        state = self._state_after(first)
        outcomes: list[Outcome] = []
        while len(outcomes) < len(batches):
            together = min(self.steps.together(state.step), len(batches) - len(outcomes))
            some = batches[len(outcomes) : len(outcomes) + together]
            told, state = self.steps.run(state, some, limits, length)
            outcomes += told
        self.state = state
        return outcomes

    def copy(self, step: int, names: Sequence[str], rows: slice | None = None) -> tuple[np.ndarray, ...]:
        """Arrays of the state after some steps, or some of their rows."""
        state = self._state_after(step)
        held, table = state.layout.unpack(state.packs), tensors(self.job.config)
        copies = {name: values_of(held[name])[rows or slice(None)].copy() for name in names}
        whole = [name for name in names if name.startswith("weight.")]
        return tuple((copies | {n: self.job.precision.hold(table[n[7:]], copies[n]) for n in whole}).values())

    def _state_after(self, step: int) -> State:
        if self.state is None or self.state.step != step or self.link.lost:
            raise LostRank(self.link.lost or f"the state after {step} steps is gone")
        return self.state


def programs() -> dict[str, RankProgram]:
    """The programs of this worker by run."""
    found: dict[str, RankProgram] = programs_of(get_worker())
    return found


def _program(run: str, epoch: str) -> RankProgram:
    program = programs().get(run)
    if program is None or program.epoch != epoch:
        raise LostRank("its worker is gone")
    return program


def begin_rank(run: str, job: Job, epoch: str, number: int, addresses: Sequence[str]) -> Owned:
    """Make this worker a rank: it records its step. Returns the rows that it owns."""
    if get_worker().address != addresses[number]:
        raise LostRank("its worker is gone")
    end_programs(run, get_worker())
    program = programs()[run] = RankProgram(job, epoch, number, addresses)
    return program.owned()


def load_rank(run: str, epoch: str, step: int, names: Sequence[Sequence[str]] | int, *packs: Sequence[Any]) -> None:
    """Let a rank begin with a state, of which it is given these packs; names: a seed for random weights."""
    program = _program(run, epoch)
    if isinstance(names, int):
        random = RandomParameters(program.job.config, names)
        values = {f"weight.{name}": value for name, value in random.items()}
    else:
        values = {name: values_of(value) for own, pack in zip(names, packs) for name, value in zip(own, pack)}
    program.load(values, step)


def run_window(
    run: str, epoch: str, first: int, length: int, batches: Sequence[Batch], limits: Limits
) -> tuple[list[Outcome], float, list[str]]:
    """Make some steps: what they tell, how long they took, and what is to be said."""
    program, start = _program(run, epoch), time.perf_counter()
    try:
        outcomes = program.run(first, length, batches, limits)
    except BaseException:
        program.link.fail("a rank has failed")
        raise
    said, program.said[:] = program.said[:], []
    return outcomes, time.perf_counter() - start, said


def copy_state(
    run: str, epoch: str, step: int, names: Sequence[str], rows: slice | None = None
) -> tuple[np.ndarray, ...]:
    """A copy of arrays of the state, or of some of their rows."""
    return _program(run, epoch).copy(step, names, rows)


def join_rows(places: Sequence[Sequence[tuple[int, int]]], *parts: Sequence[Sequence[np.ndarray]]) -> tuple[Any, ...]:
    """Whole arrays from rows of several ranks; places: of each part, from which row to which."""
    count = max(last for own in places for _, last in own)
    arrays = []
    for number in range(len(parts[0][0])):
        first = parts[0][0][number]
        whole = np.empty((count, *first.shape[1:]), first.dtype)
        for own, part in zip(places, parts):
            for (low, high), rows in zip(own, part):
                whole[low:high] = rows[number]
        arrays.append(whole)
    return tuple(arrays)


def copy_rows(run: str, epoch: str, step: int, names: Sequence[str], places: Sequence[tuple[int, int]]) -> list[Any]:
    """Copies of some rows of arrays, for each of some places."""
    return [copy_state(run, epoch, step, names, slice(*place)) for place in places]


def abort(run: str, epoch: str, dask_worker: Any) -> None:
    """Let a rank that waits for others fail."""
    program = programs_of(dask_worker).get(run)
    if program is not None and program.epoch == epoch:
        program.link.fail("another rank has failed")
