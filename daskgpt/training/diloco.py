"""A whole run of a recorded graph as one program, to be called again and again inside one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import prod
from operator import itemgetter
from time import perf_counter
from typing import Any

import numpy as np

from daskgpt.config.groups import share_of_rank
from daskgpt.config.run import LocalConfig
from daskgpt.graph.distribute import own_part
from daskgpt.graph.messages import Peers
from daskgpt.graph.nodes import Graph, Key, is_leaf, slices_of, task, value_of
from daskgpt.graph.program import Call, Program
from daskgpt.graph.recording import STATE, CompiledStep, GraphRun, Layout
from daskgpt.kernels.floating_point import flush_to_zero
from daskgpt.kernels.nesterov import nesterov
from daskgpt.model.optimizer import hyper_of
from daskgpt.model.parameters import Tensor, tensors
from daskgpt.model.precision import Precision, copy_of, values_of
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.job import OUTER, Job, of_replica
from daskgpt.training.step import (
    NO_LIMITS,
    Batch,
    Limits,
    Outcome,
    State,
    StepInputs,
    StepOptions,
    TrainingStep,
    held_weights,
    input_values,
    streams_of,
)


class Repeated:
    """Runs a graph once a call, on data of its own, and writes over a state that it is given.

    It carries no arrays and no graph, so that it can be sent to where the state is.

    names   of the state's arrays, in their order
    """

    def __init__(self, runnable: CompiledStep) -> None:
        """runnable   one task, whose state is written over, and whose outputs have one chunk each"""
        ((key, node),) = ((key, node) for key, node in runnable.graph.items() if not is_leaf(node))
        program: Program = node.func
        (self.names,) = runnable.layout.packs
        assert runnable.recorded.in_place
        self.outputs: dict[str, int | None] = {}
        for name, (place,) in runnable.places.items():
            assert place.key == key
            self.outputs[name] = place.number
        inputs = {
            chunk: (name, index)
            for name, array in runnable.recorded.inputs.items()
            for chunk, index in slices_of(array).items()
        }
        self.program = program
        keys = [reference.key for reference in node.args]
        self.state = next(number for number, own in enumerate(keys) if own[0] == STATE)
        self.inputs = {number: inputs[own] for number, own in enumerate(keys) if own in inputs}
        constants = (runnable.graph.get(own) for own in keys)
        self.constants = {number: value_of(leaf) for number, leaf in enumerate(constants) if leaf is not None}

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls of one run."""
        return self.program.calls

    def __call__(self, state: tuple[Any, ...], values: Mapping[str, np.ndarray], run: int) -> dict[str, Any]:
        """One run: its outputs by name.

        values   whole inputs by name
        run      its place among the runs of a graph, for who records
        """
        program = copy(self.program)
        program.run = run
        arguments = {self.state: state, **self.constants}
        arguments |= {number: values[name][index] for number, (name, index) in self.inputs.items()}
        results = program(*(arguments[number] for number in range(len(arguments))))
        return {name: results if number is None else results[number] for name, number in self.outputs.items()}


class InnerSteps:
    """Some steps of one replica, which returns what they tell and how long they took; its weights; its moments.

    The moments are written over, and so are weights that are the replica's own.
    """

    run = 0

    def __init__(
        self,
        step: Repeated,
        given: Layout,
        moments: Sequence[StepInputs],
        *,
        copied: tuple[str, ...],
    ) -> None:
        """given     names of what the task is called with
        moments   what each step is given, of the replica's sequences only
        copied    kinds of arrays that it works on copies of
        """
        self.step, self.given, self.moments, self.copied = step, given, moments, copied

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls of each step."""
        return self.step.calls

    def __call__(self, *packs: tuple[Any, ...]) -> tuple[tuple[list[Outcome], float], tuple[Any, ...], tuple[Any, ...]]:
        begin = perf_counter()
        values = self.given.unpack(packs)
        state = tuple(
            copy_of(values[name]) if name.startswith(self.copied) else values[name] for name in self.step.names
        )
        outcomes = [
            Outcome.of(self.step(state, input_values(moment), self.run + number))
            for number, moment in enumerate(self.moments)
        ]
        named = dict(zip(self.step.names, state))
        weights = tuple(value for name, value in named.items() if name.startswith("weight."))
        moments = tuple(value for name, value in named.items() if not name.startswith("weight."))
        return (outcomes, perf_counter() - begin), weights, moments


class Shard:
    """Takes the values of some weights, which are sent to who makes their outer step."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)

    def __call__(self, result: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        return tuple(values_of(result[1][place]) for place in self.places)


class OuterStep:
    """The outer step of some tensors: new weights as a step holds them, and the new momentum."""

    def __init__(self, tensors: Sequence[Tensor], precision: Precision, local: LocalConfig) -> None:
        self.tensors, self.precision = tuple(tensors), precision
        self.options = {"rate": local.outer_learning_rate, "beta": local.outer_momentum}

    def __call__(
        self, weights: tuple[Any, ...], momenta: tuple[np.ndarray, ...], *ends: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """ends   of each replica, by its number"""
        made = []
        with flush_to_zero():
            for tensor, start, momentum, *own in zip(self.tensors, weights, momenta, *ends):
                new, kept = nesterov(values_of(start), momentum, own, **self.options)
                made.append((self.precision.hold(tensor, new), kept))
        return tuple(new for new, _ in made), tuple(kept for _, kept in made)


TASK_SECONDS = 1.5  # of a task, about: a thousand times what it costs a cluster, and short enough to see steps go on
SOME_STEPS = f"some steps of a replica, about {TASK_SECONDS:g} s, are a task"


def replica_step(job: Job, chunk: tuple[int, int]) -> TrainingStep:
    """A step of one replica, recorded: one task, which writes over the state."""
    return TrainingStep(
        job.config,
        job.replica_shape,
        chunk,
        job.optimizer,
        job.precision,
        StepOptions(grain="step", in_place=True, groups=job.groups),
    )


class LocalSteps:
    """Runs a job's steps by replicas, a stretch at a time; used like `JobSteps`.

    step     of one replica, recorded
    layout   of the state; of the last packs, the replicas' weights, there are none where they meet; those that are at
             home with another rank are None
    shards   names of the tensors of each
    """

    open = False  # nothing is measured that later steps depend on
    recovers = False  # from the loss of a worker
    recorded = None  # kernel calls are recorded where they run

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Callable[[str], None] = print, peers: Peers | None = None
    ) -> None:
        """peers   where other ranks have some of the replicas"""
        self.job, self.scheduler, self.replicas, self.peers = job, scheduler, job.local.replicas, peers
        self.chunks = ChunkChoice(job.config, job.replica_shape, job.dataflow, job.precision, 1, in_place=True)
        self.step = replica_step(job, self.chunks.first)
        free, at_once = available_memory(), min(self.replicas, scheduler.threads)
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

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """The state where the replicas meet; see `JobSteps.initial`."""
        job, layout = self.job, Layout(self.layout.packs[: -self.replicas])
        values: dict[str, Any] = held_weights(job.config, parameters, job.precision)
        for key, tensor in job.moments.items():
            values[key] = moments[key] if moments else np.full(tensor.shape, 0, job.precision.dtype)
        return State(self.layout, layout.pack(values), step)

    def run(
        self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS, length: int = 0
    ) -> tuple[list[Outcome], State]:
        """A step a batch, all of one round: what they tell, means over the replicas, and the state after them."""
        told, state = self.run_own(state, batches, length)
        return self.mean([told]), state

    def run_own(
        self, state: State, batches: Sequence[Batch], length: int = 0
    ) -> tuple[dict[int, tuple[list[Outcome], float]], State]:
        """The same for the replicas that are here: outcomes and seconds of each.

        batches   their sequences
        """
        end = state.step + len(batches)
        stretch = _Stretch(self, state, batches, length or self.job.horizon.at(state.step))
        told_of, packs = [stretch.told(r) for r in range(self.replicas)], stretch.packs(meet=self.job.meets(end))
        leaves = {(STATE, number): pack for number, pack in enumerate(state.packs) if pack is not None}
        graph, keys = stretch.graph, [*told_of, *packs]
        if self.peers:
            homes = stretch.homes | {(STATE, number): self.home(number) for number in range(len(state.packs))}
            ranks = {key: self.rank_of(home) for key, home in homes.items()}
            keys = [key for key in keys if ranks[key] == self.peers.number]
            graph, sent = own_part(graph, ranks, self.peers)
            keys.append(sent)
        given = {key: pack for key, pack in leaves.items() if any(key in node.dependencies for node in graph.values())}
        found = dict(zip(keys, self.scheduler.run(GraphRun(graph, given, keys, len(batches)))))
        made = [found.get(key) for key in packs]
        if not self.job.meets(end):
            made = [*state.packs[: 2 * len(self.shards)], *made]
        told = {replica: found[key] for replica, key in enumerate(told_of) if key in found}
        return told, State(self.layout, made, end)

    def mean(self, told: Sequence[Mapping[int, tuple[list[Outcome], float]]]) -> list[Outcome]:
        """What the replicas of all ranks tell, as one outcome a step."""
        by_replica = {replica: own for each in told for replica, own in each.items()}
        self.seconds = max(seconds / len(outcomes) for outcomes, seconds in by_replica.values())
        return [self._mean(own) for own in zip(*(by_replica[replica][0] for replica in range(self.replicas)))]

    def _mean(self, own: Sequence[Outcome]) -> Outcome:
        """Of what the replicas tell of a step."""
        norms = [each.norm for each in own if each.norm is not None]
        return Outcome(sum(each.loss for each in own) / self.replicas, sum(norms) / self.replicas if norms else None)

    def close(self) -> None:
        """See `JobSteps.close`."""

    def meets(self, state: State) -> bool:
        """Whether a round begins with a state."""
        return len(state.packs) < len(self.layout.packs)

    def rank_of(self, replica: int) -> int:
        """The rank that has a replica."""
        if not self.peers:
            return 0
        ranks = range(self.peers.count)
        return next(rank for rank in ranks if replica in share_of_rank(rank, len(ranks), self.replicas))

    def home(self, pack: int) -> int:
        """The replica that a pack is at home with."""
        shards = len(self.shards)
        return pack % shards if pack < 2 * shards else (pack - 2 * shards) % self.replicas


class _Stretch:
    """The graph of some steps of a round.

    homes   the replica that a task is at home with: its own, or that of its shard's number
    """

    def __init__(self, steps: LocalSteps, state: State, batches: Sequence[Batch], length: int) -> None:
        self.steps, self.begins = steps, steps.meets(state)
        self.graph: Graph = {}
        self.homes: dict[Key, int] = {}
        job, row, peers = steps.job, steps.step.row, steps.peers
        here = share_of_rank(peers.number, peers.count, steps.replicas) if peers else range(steps.replicas)
        size = job.replica_shape[0]
        self.first = size * here.start  # sequence of the batch that is here
        own = slice(self.first, size * here.stop)
        moments = []
        for number, batch in enumerate(batches, state.step):
            random = streams_of(job.optimizer, job.run.seed, number, job.batch_shape[0])
            hyper = hyper_of(job.optimizer, row, number, length)
            moments.append(StepInputs(*batch, hyper, None if random is None else random[own]))
        self.inner = [self._inner(replica, moments) for replica in range(steps.replicas)]

    def told(self, replica: int) -> Key:
        """The task that returns losses and seconds of a replica."""
        return self._add("inner.loss", itemgetter(0), [self.inner[replica]], replica)

    def packs(self, *, meet: bool) -> list[Key]:
        """The tasks that return what is new of the state: where the replicas meet, or while they are on their own."""
        steps, replicas = self.steps, range(self.steps.replicas)
        moments = [self._add("inner.moments", itemgetter(2), [self.inner[r]], r) for r in replicas]
        if not meet:
            return moments + [self._add("inner.weights", itemgetter(1), [self.inner[r]], r) for r in replicas]
        outer = [self._outer(shard) for shard in range(len(steps.shards))]
        weights = [self._add("outer.weights", itemgetter(0), [key], shard) for shard, key in enumerate(outer)]
        return weights + [self._add("outer.momentum", itemgetter(1), [key], s) for s, key in enumerate(outer)] + moments

    def _inner(self, replica: int, moments: Sequence[StepInputs]) -> Key:
        steps, shards = self.steps, len(self.steps.shards)
        size, low = steps.job.replica_shape[0], replica * steps.job.replica_shape[0] - self.first
        mine = [moment.of(low, low + size) for moment in moments] if low >= 0 else []  # another rank's
        numbers = list(range(shards)) if self.begins else [2 * shards + steps.replicas + replica]
        weights = steps.layout.packs[:shards] if self.begins else (steps.weights,)
        copied = ("weight.",) if self.begins else ()  # which all replicas begin with
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
