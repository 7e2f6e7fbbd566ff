"""Local steps: replicas that make some steps on their own, and a step of all along their mean change (DiLoCo).

The sequences of each step are dealt to R replicas, consecutive ones to each. A replica makes the steps of a *round* on
its own, with its own moments; then the mean of (start - end) over the replicas is the gradient of one Nesterov step on
the weights that all of them start the next round with.

    a stretch    some steps of a round: one task a replica, so long that what a task costs a cluster does not matter
    a shard      some tensors, whose outer step is one task, on the worker where the replica of that number is

The state is packed: weights by shard, their momentum by shard, the moments of each replica, and while a round lasts,
the weights of each. No bit depends on who computes it, nor on how a round is cut into stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from daskgpt.graph.nodes import Graph, Key, as_it_is, task
from daskgpt.graph.recording import STATE, Layout, Submission
from daskgpt.graph.repeated import Repeated
from daskgpt.model.optimizer import hyper_of
from daskgpt.model.parameters import tensors
from daskgpt.schedulers.machine_memory import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.chunk_choice import ChunkChoice
from daskgpt.training.first_state import first_packs
from daskgpt.training.inner_steps import InnerSteps, OuterStep, Shard
from daskgpt.training.inputs import Moment
from daskgpt.training.job import OUTER, Job, of_replica
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.step import NO_LIMITS, Batch, Limits, Outcome, State, TrainingStep, held_weights, streams_of

TASK_SECONDS = 1.5  # of a task, about: a thousand times what it costs a cluster, and short enough to see steps go on
SOME_STEPS = f"some steps of a replica, about {TASK_SECONDS:g} s, are a task"


def steps_of(job: Job, scheduler: Scheduler, say: Callable[[str], None] = print) -> Any:
    """The steps that a job asks for; say is told what was found."""
    if job.local.local_steps:
        return LocalSteps(job, scheduler, say)
    if job.dataflow.engine == "ranks" and not scheduler.in_place:
        from daskgpt.schedulers.cluster import ClusterScheduler  # which needs `distributed`
        from daskgpt.training.rank_steps import RankSteps

        assert isinstance(scheduler, ClusterScheduler)
        return RankSteps(job, scheduler, say)
    return JobSteps(job, scheduler, say)


def replica_step(job: Job, chunk: tuple[int, int]) -> TrainingStep:
    """A step of one replica, recorded: one task, which writes over the state."""
    return TrainingStep(
        job.config,
        job.replica_shape,
        chunk,
        job.optimizer,
        precision=job.precision,
        grain="step",
        in_place=True,
        groups=job.groups,
    )


class LocalSteps:
    """Runs a job's steps by replicas, a stretch at a time; used like `JobSteps`.

    step     of one replica, recorded
    layout   of the state; of the last packs, the replicas' weights, there are none where they meet
    shards   names of the tensors of each
    """

    open = False  # nothing is measured that later steps depend on
    follows = False  # replicas are as many as was asked for, whoever makes their steps

    def __init__(self, job: Job, scheduler: Scheduler, say: Callable[[str], None] = print) -> None:
        self.job, self.scheduler, self.replicas = job, scheduler, job.local.replicas
        self.chunks = ChunkChoice(job.config, job.replica_shape, job.dataflow, job.precision, 1, in_place=True)
        self.step = replica_step(job, self.chunks.first)
        free = available_memory()
        at_once = min(self.replicas, scheduler.threads)
        if scheduler.in_place and (warning := self.chunks.fit(self.step, 1, free and free // at_once)):
            say(f"memory     {warning}")
        self.repeated = Repeated(self.step.runnable)
        self.table = tensors(job.config)
        self.weights, self.moments = (
            tuple(name for name in self.repeated.names if name.startswith("weight.") == wanted)
            for wanted in (True, False)
        )
        self.shards = _shards({name: prod(tensor.shape) for name, tensor in self.table.items()}, self.replicas)
        self.layout = self._layout()
        self.seconds = TASK_SECONDS  # of one step; until the first one is made

    def _layout(self) -> Layout:
        replicas = range(self.replicas)
        return Layout(
            (
                *(tuple(f"weight.{name}" for name in names) for names in self.shards),
                *(tuple(f"{OUTER}.{name}" for name in names) for names in self.shards),
                *(tuple(of_replica(name, r) for name in self.moments) for r in replicas),
                *(tuple(of_replica(name, r) for name in self.weights) for r in replicas),
            )
        )

    @property
    def grain(self) -> str:
        """What was asked for: tasks are stretches, whatever that is."""
        return self.job.dataflow.grain

    @property
    def chunk(self) -> tuple[int, int]:
        """Sequences and tokens in a chunk."""
        return self.step.chunk

    @property
    def described_chunks(self) -> str:
        """How many of which size a replica works on, and why, for people."""
        return self.chunks.described(self.chunk)

    @property
    def described_tasks(self) -> str:
        """What a task is, for people."""
        return SOME_STEPS

    def together(self, number: int) -> int:
        """How many steps from this one on are to be run at once: as long as a task should take, or to the round's end.

        The stretches of a round are about equal.
        """
        left = self.job.round_end(number) - number
        most = max(1, round(TASK_SECONDS / max(self.seconds, 1e-6)))
        return -(-left // -(-left // most))

    def look(self, workers: int) -> None:
        """Told how many workers there are, as `JobSteps` is."""

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """The state where the replicas meet; see `JobSteps.initial`."""
        job, layout = self.job, Layout(self.layout.packs[: -self.replicas])
        if not self.scheduler.in_place:
            made = (self.scheduler, layout, self.home, job.config, job.precision, parameters, moments)
            return State(self.layout, first_packs(*made), step)
        values: dict[str, Any] = held_weights(job.config, parameters, job.precision)
        for key, tensor in job.moments.items():
            values[key] = moments[key] if moments else np.full(tensor.shape, 0, job.precision.dtype)
        return State(self.layout, layout.pack(values), step)

    def run(self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS) -> tuple[list[Outcome], State]:
        """A step a batch, all of one round: what they tell, means over the replicas, and the state after them."""
        end = state.step + len(batches)
        stretch = _Stretch(self, state, batches)
        told_of, packs = [stretch.told(r) for r in range(self.replicas)], stretch.packs(meet=self.job.meets(end))
        leaves = {(STATE, number): pack for number, pack in enumerate(state.packs)}
        given = {
            key: pack for key, pack in leaves.items() if any(key in n.dependencies for n in stretch.graph.values())
        }
        homes = stretch.homes | {key: self.home(key[1]) for key in given}
        handles = self.scheduler.run(Submission(stretch.graph, given, told_of + packs, len(batches), homes))
        made = handles[self.replicas :]
        if not self.job.meets(end) and not stretch.begins:
            made = [*state.packs[: 2 * len(self.shards)], *made]
        told = self.scheduler.fetch(handles[: self.replicas])
        self.seconds = max(seconds for _, seconds in told) / len(batches)
        outcomes = [self._mean(own) for own in zip(*(outcomes for outcomes, _ in told))]
        return outcomes, State(self.layout, made, end)

    def _mean(self, own: Sequence[Outcome]) -> Outcome:
        """Of what the replicas tell of a step."""
        norms = [each.norm for each in own if each.norm is not None]
        return Outcome(sum(each.loss for each in own) / self.replicas, sum(norms) / self.replicas if norms else None)

    def close(self) -> None:
        """See `JobSteps.close`."""

    def meets(self, state: State) -> bool:
        """Whether a round begins with a state."""
        return len(state.packs) < len(self.layout.packs)

    def home(self, pack: int) -> int:
        """The number of the worker where a pack is at home."""
        shards = len(self.shards)
        return pack % shards if pack < 2 * shards else (pack - 2 * shards) % self.replicas


class _Stretch:
    """The graph of some steps of a round.

    homes   number of the worker where a task is at home: where its replica is, or the replica of its shard's number
    """

    def __init__(self, steps: LocalSteps, state: State, batches: Sequence[Batch]) -> None:
        self.steps, self.begins = steps, steps.meets(state)
        self.graph: Graph = {}
        self.homes: dict[Key, int] = {}
        job, row = steps.job, steps.step.row
        length = job.horizon.at(state.step)
        moments = [
            Moment(
                *batch,
                hyper_of(job.optimizer, row, number, length),
                streams_of(job.optimizer, job.run.seed, number, len(batch[0])),
            )
            for number, batch in enumerate(batches, state.step)
        ]
        self.inner = [self._inner(replica, moments) for replica in range(steps.replicas)]

    def told(self, replica: int) -> Key:
        """The task that returns losses and seconds of a replica."""
        return self._add("inner.loss", itemgetter(0), [self.inner[replica]], replica)

    def packs(self, *, meet: bool) -> list[Key]:
        """The tasks that return what is new of the state: where the replicas meet, or while they are on their own."""
        steps, replicas = self.steps, range(self.steps.replicas)
        moments = [self._add("inner.moments", itemgetter(2), [self.inner[r]], r) for r in replicas]
        if not meet:
            # A run begins with arrays of this process, which a cluster then has as well.
            shared = [] if not self.begins else range(2 * len(steps.shards))
            kept = [self._add("outer.kept", as_it_is, [(STATE, n)], steps.home(n), n) for n in shared]
            own = [self._add("inner.weights", itemgetter(1), [self.inner[r]], r) for r in replicas]
            return kept + moments + own
        outer = [self._outer(shard) for shard in range(len(steps.shards))]
        weights = [self._add("outer.weights", itemgetter(0), [key], shard) for shard, key in enumerate(outer)]
        return weights + [self._add("outer.momentum", itemgetter(1), [key], s) for s, key in enumerate(outer)] + moments

    def _inner(self, replica: int, moments: Sequence[Moment]) -> Key:
        steps, shards = self.steps, len(self.steps.shards)
        size = steps.job.replica_shape[0]
        mine = [moment.of(replica * size, (replica + 1) * size) for moment in moments]
        numbers = list(range(shards)) if self.begins else [2 * shards + steps.replicas + replica]
        weights = steps.layout.packs[:shards] if self.begins else (steps.weights,)
        copied = ("",) if not steps.scheduler.in_place else ("weight.",) if self.begins else ()
        given = Layout((*weights, steps.moments))
        function = InnerSteps(steps.repeated, given, mine, copied=copied)
        needs = [(STATE, number) for number in [*numbers, 2 * shards + replica]]
        return self._add("inner.steps", function, needs, replica)

    def _outer(self, shard: int) -> Key:
        """The outer step of a shard, from what is sent to it."""
        steps = self.steps
        names, places = steps.shards[shard], {name: place for place, name in enumerate(steps.table)}
        take = Shard([places[name] for name in names])
        ends = [self._add("inner.end", take, [key], r, shard) for r, key in enumerate(self.inner)]
        function = OuterStep([steps.table[name] for name in names], steps.job.precision, steps.job.local)
        return self._add("outer.step", function, [(STATE, shard), (STATE, len(steps.shards) + shard), *ends], shard)

    def _add(self, kind: str, function: Callable[..., Any], needs: Sequence[Key], home: int, part: int = 0) -> Key:
        key = (f"{kind}-replicas_-{self.steps.step.recorded.token}", home, part)
        self.graph[key], self.homes[key] = task(key, function, needs), home
        return key


def _shards(sizes: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
    """The tensors in at most so many parts of about one size: the largest first, each to the least."""
    held, shards = [0] * count, [list[str]() for _ in range(count)]
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        least = held.index(min(held))
        shards[least].append(name)
        held[least] += size
    return [tuple(own) for own in shards if own]
