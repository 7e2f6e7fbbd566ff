"""The steps of a job on a cluster whose workers share each batch: windows of steps, one task a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.config.groups import groups_of_rank
from daskgpt.graph.recording import Layout
from daskgpt.model.parameters import RandomParameters, tensors
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.schedulers.links import end_programs
from daskgpt.training import rank_program
from daskgpt.training.chunk_choice import ChunkChoice
from daskgpt.training.first_state import first_packs
from daskgpt.training.job import Job
from daskgpt.training.step import NO_LIMITS, Batch, Limits, Outcome, State, TrainingStep

WINDOW_SECONDS = 3.0  # of a window, about: many times what it costs to begin one


class LiveState(State):
    """The state on the ranks after some steps. Whoever asks for its packs before the next step gets copies."""

    def __init__(self, steps: RankSteps, step: int) -> None:
        self.steps, self.layout, self.step = steps, steps.layout, step
        self.copies: list[Any] = []

    @property
    def packs(self) -> list[Any]:  # type: ignore[override]
        """Futures of the copies."""
        if not self.copies:
            self.copies = self.steps.copied(self)
        return self.copies


class RankSteps:
    """Runs a job's steps on the workers of a cluster; used like `JobSteps`.

    epoch   of the ranks that have the state: others begin with each change of workers and each loss
    owned   of each rank the rows that it updates
    """

    open = False  # chunks and grain are settled by each rank
    follows = False

    def __init__(self, job: Job, scheduler: ClusterScheduler, say: Callable[[str], None] = print) -> None:
        self.job, self.scheduler, self.say = job, scheduler, say
        dataflow = replace(job.dataflow, precision=job.precision.name)
        self.sent_job = replace(job, dataset=None, dataflow=dataflow)
        self.run_name, self.epoch = f"{scheduler.client.id} {uuid4().hex[:8]}", ""
        self.chunks = ChunkChoice(job.config, job.micro_shape, job.dataflow, job.precision, scheduler.threads)
        self.moments = {
            name: [key for key in job.moments if key.partition(".")[2] == name] for name in tensors(job.config)
        }
        self.layout = Layout(
            (*((f"weight.{name}",) for name in self.moments), *(tuple(own) for own in self.moments.values() if own))
        )
        self.addresses: list[str] = []
        self.owned: list[rank_program.Owned] = []
        self.live: LiveState | None = None
        self.seconds = WINDOW_SECONDS  # of one step; until the first one is made
        self.seen = self.workers = len(scheduler.addresses())

    @property
    def grain(self) -> str:
        """What was asked for."""
        return self.job.dataflow.grain

    @property
    def chunk(self) -> tuple[int, int]:
        """Sequences and tokens in a chunk, where a batch is not shared by ranks."""
        return self.chunks.first

    @property
    def step(self) -> TrainingStep:
        """Errors   ValueError: what looks at tasks of one recorded step has none to look at"""
        rule, advice = "what watches a step needs tasks that Dask's scheduler runs", "Give --engine tasks."
        raise refusal(ValueError, "train", rule, {"engine": "ranks"}, advice)

    @property
    def described_chunks(self) -> str:
        """For people: each rank chooses its own."""
        return "chosen by each worker for its share of the batch"

    @property
    def described_tasks(self) -> str:
        """What a task is, for people."""
        return f"some steps of a worker, about {WINDOW_SECONDS:g} s, are a task"

    def together(self, number: int) -> int:
        """How many steps from this one on are a window."""
        most = max(1, round(WINDOW_SECONDS / max(self.seconds, 1e-6)))
        every = self.job.run.snapshot_every
        if self.job.optimizer.skip_outliers:
            most = 1
        return min(most, every - number % every) if every > 0 else most

    def look(self, workers: int) -> None:
        """Told every few seconds how many workers there are: other ranks begin once it is the same at two looks."""
        if workers == self.seen:
            self.workers = workers
        self.seen = workers

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """A state that ranks can begin with; without moments, which are zeros then, it has packs of weights only."""
        layout = self.layout if moments else Layout(self.layout.packs[: len(self.moments)])
        job, random = self.job, isinstance(parameters, RandomParameters)
        made = (self.scheduler, layout, lambda pack: None, job.config, job.precision, parameters, moments)
        return State(layout, [] if random and not moments else first_packs(*made), step)

    def run(self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS) -> tuple[list[Outcome], State]:
        """A step a batch: what they tell, and the state after them."""
        if state is not self.live or (self.workers != len(self.addresses) and self._others()):
            self._begin(state)
        first, length = state.step, self.job.horizon.at(state.step)
        size = self.job.batch_shape[0] // self.job.groups
        windows = []
        for number, address in enumerate(self.addresses):
            own = groups_of_rank(number, len(self.addresses), self.job.groups)
            rows = slice(own.first * size, (own.first + own.count) * size)
            mine = [tuple(np.ascontiguousarray(part[rows]) for part in batch) for batch in batches]
            given = (self.run_name, self.epoch, first, length, mine, limits)
            windows.append((rank_program.run_window, given, address))
        told = self._each("window", windows)
        outcomes = told[0][0]
        self.seconds = max(seconds for _, seconds, _ in told) / len(batches)
        for line in told[0][2]:
            self.say(f"rank 0     {line}")
        self.live = LiveState(self, first + len(batches))
        return outcomes, self.live

    def close(self) -> None:
        """Forget the state on the workers, and the copies of it."""
        if self.live:
            self.live.copies, self.live = [], None
        with suppress(OSError, RuntimeError, ValueError):  # the cluster is gone
            self.scheduler.client.run(end_programs, self.run_name, on_error="ignore")

    def _others(self) -> bool:
        """Whether other ranks would share the batch if they began now."""
        return self._ranks() != self.addresses

    def _ranks(self) -> list[str]:
        addresses = sorted(self.scheduler.addresses(), key=lambda a: (a not in self.addresses, a))
        return addresses[: self.job.groups]

    def _begin(self, state: State) -> None:
        """Make the workers that are there ranks, with this state."""
        start = time.perf_counter()
        packs, layout = list(state.packs), state.layout
        self.live, self.epoch = None, uuid4().hex[:8]
        before, self.addresses = self.addresses, self._ranks()
        left = self.scheduler.addresses() & set(before) - set(self.addresses)
        if left:
            told = {"workers": list(left), "wait": False, "on_error": "ignore"}
            self.scheduler.client.run(end_programs, self.run_name, **told)
        ranks = [
            (rank_program.begin_rank, (self.run_name, self.sent_job, self.epoch, number, self.addresses), address)
            for number, address in enumerate(self.addresses)
        ]
        self.owned = self._each("begin", ranks)
        loads = []
        for number, address in enumerate(self.addresses):
            chosen = [
                (names, pack)
                for names, pack in zip(layout.packs, packs)
                if names[0].startswith("weight.") or names[0].partition(".")[2] in self.owned[number]
            ]
            names_or_seed = [names for names, _ in chosen] or self.job.run.seed
            given = (self.run_name, self.epoch, state.step, names_or_seed, *(pack for _, pack in chosen))
            loads.append((rank_program.load_rank, given, address))
        self._each("load", loads)
        if before:
            count, seconds = len(self.addresses), time.perf_counter() - start
            self.say(f"workers    {count} share each batch from now on ({seconds:.1f} s)")

    def copied(self, state: LiveState) -> list[Any]:
        """Futures of copies of the packs of the layout."""
        assert state is self.live, "the state of a step before"
        found, at = [], (self.run_name, self.epoch, state.step)
        for place, names in enumerate(self.layout.packs):
            name = names[0].partition(".")[2]
            owners = [rank for rank, owned in enumerate(self.owned) if name in owned]
            if place < len(self.moments) or len(owners) == 1:
                rank = place % len(self.addresses) if place < len(self.moments) else owners[0]
                found.append(self._submit("state.copy", rank_program.copy_state, (*at, names), self.addresses[rank]))
                continue
            rows = [self.owned[rank][name] for rank in owners]
            parts = [
                self._submit("state.rows", rank_program.copy_rows, (*at, names, own), self.addresses[rank])
                for rank, own in zip(owners, rows)
            ]
            joined = (rank_program.join_rows, (rows, *parts), self.addresses[owners[0]])
            found.append(self._submit("state.copy", *joined))
        self.scheduler.settle(found)
        return found

    def _submit(self, name: str, function: Callable[..., Any], given: Sequence[Any], address: str) -> Any:
        key = f"{name}-{uuid4().hex}"
        # On another worker, where there is no such rank, it fails: so a run hears of a lost worker.
        where = {"workers": [address], "allow_other_workers": True}
        return self.scheduler.client.submit(function, *given, key=key, pure=False, **where)

    def _each(self, name: str, calls: Sequence[tuple[Callable[..., Any], Sequence[Any], str]]) -> list[Any]:
        """The results of a task of each rank; where one fails, the others are told, who may wait for it."""
        handles = [self._submit(f"rank.{name}", *call) for call in calls]
        try:
            return self.scheduler.fetch_together(handles)
        except BaseException:
            self.live = None
            self.scheduler.client.run(rank_program.abort, self.run_name, self.epoch, wait=False, on_error="ignore")
            raise
