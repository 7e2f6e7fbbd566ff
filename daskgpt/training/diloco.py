"""Local steps (DiLoCo): replicas make rounds of steps of their own, and an outer step at the end of each joins them.

A stretch of steps of one replica is one task. At the end of a round each tensor's outer step is made once, with
Nesterov momentum, from the mean of what the replicas have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from dask.local import get_sync

from daskgpt.config.groups import share_of_rank
from daskgpt.config.run import LocalConfig
from daskgpt.graph.messages import Peers, own_part
from daskgpt.graph.nodes import Graph, Key, task, with_leaves
from daskgpt.graph.recording import STATE, CompiledStep, GraphRun, Layout
from daskgpt.kernels.floating_point import flush_to_zero
from daskgpt.kernels.optimizers import nesterov
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
    Steps,
    TrainingStep,
    held_weights,
    input_values,
    streams_of,
)

TASK_SECONDS = 1.5  # of a task, about: a thousand times what it costs a cluster, and short enough to show progress
SOME_STEPS = f"some steps of a replica, about {TASK_SECONDS:g} s, are a task"

Timed = tuple[list[Outcome], float]  # outcomes of a replica's steps, and how long they took


def inner_steps(
    runnable: CompiledStep,
    names: Layout,
    inputs: Sequence[StepInputs],
    shared: bool,
    *packs: tuple[Any, ...],
) -> tuple[Timed, tuple[Any, ...], tuple[Any, ...]]:
    """Make some steps of one replica; return their outcomes and duration, the weights, and the moments.

    The moments are updated in place, and so are the weights, unless replicas share them.

    runnable   the recorded step, which updates its state in place
    names      of the arrays in each pack
    inputs     of each step, for the replica's sequences
    shared     whether other replicas begin with the same weights, which are copied first then
    """
    begin, values = perf_counter(), names.unpack(packs)
    (own,) = runnable.layout.packs
    named = {n: copy_of(values[n]) if shared and n.startswith("weight.") else values[n] for n in own}
    state, outcomes = [tuple(named.values())], []
    for each in inputs:
        run = runnable.submission(input_values(each), state)
        handles, _ = runnable.split(list(get_sync(with_leaves(run.graph, run.leaves), run.keys)), state)
        outcomes.append(Outcome.of(runnable.output(handles)))
    weights = tuple(value for name, value in named.items() if name.startswith("weight."))
    moments = tuple(value for name, value in named.items() if not name.startswith("weight."))
    return (outcomes, perf_counter() - begin), weights, moments


def end_of_round(places: Sequence[int], result: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """Return some weights that a replica has at the end of a round, from the result of its `inner_steps`."""
    return tuple(values_of(result[1][place]) for place in places)


def outer_step(
    tensors: Sequence[Tensor],
    precision: Precision,
    local: LocalConfig,
    weights: tuple[Any, ...],
    momenta: tuple[np.ndarray, ...],
    *ends: tuple[np.ndarray, ...],
) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
    """Make the outer step of some tensors; return the new weights as a step holds them, and the new momenta.

    ends   the weights that each replica has at the end of the round, in the order of the replicas
    """
    new, kept = [], []
    with flush_to_zero():
        for tensor, start, momentum, *own in zip(tensors, weights, momenta, *ends):
            rate, beta = local.outer_learning_rate, local.outer_momentum
            weight, momentum = nesterov(values_of(start), momentum, own, rate=rate, beta=beta)
            new.append(precision.hold(tensor, weight))
            kept.append(momentum)
    return tuple(new), tuple(kept)


def replica_step(job: Job, chunk: tuple[int, int]) -> TrainingStep:
    """Record a step of one replica, as one task that writes over the state."""
    options = StepOptions(grain="step", in_place=True, groups=job.groups)
    return TrainingStep(job.config, job.replica_shape, chunk, job.optimizer, job.precision, options)


class LocalSteps(Steps):
    """Runs a job's steps by replicas, a stretch of a round at a time.

    step     of one replica, recorded
    layout   of the state: weights and momenta by shards, moments by replicas, and weights by replicas, which exist
             within a round only. A pack that another rank has is None
    shards   names of the tensors whose outer steps are made together
    """

    described_tasks = SOME_STEPS

    def __init__(
        self, job: Job, scheduler: Scheduler, say: Callable[[str], None] = print, peers: Peers | None = None
    ) -> None:
        """peers   set where other ranks have some of the replicas"""
        self.job, self.scheduler, self.replicas, self.peers = job, scheduler, job.local.replicas, peers
        self.chunks = ChunkChoice(job.config, job.replica_shape, job.dataflow, job.precision, 1, in_place=True)
        self.step = replica_step(job, self.chunks.first)
        free, at_once = available_memory(), min(self.replicas, scheduler.threads)
        if scheduler.in_place and (warning := self.chunks.fit(self.step, 1, free and free // at_once)):
            say(f"memory     {warning}")
        self.table = tensors(job.config)
        (names,) = self.step.runnable.layout.packs
        self.weights, self.moments = (
            tuple(name for name in names if name.startswith("weight.") == wanted) for wanted in (True, False)
        )
        self.shards = _shards({name: prod(tensor.shape) for name, tensor in self.table.items()}, self.replicas)
        by_shard = [tuple(f"{kind}.{n}" for n in names) for kind in ("weight", OUTER) for names in self.shards]
        both = (self.moments, self.weights)
        by_replica = [tuple(of_replica(n, r) for n in names) for names in both for r in range(self.replicas)]
        self.layout = Layout((*by_shard, *by_replica))
        self.seconds = TASK_SECONDS  # of one step; until the first one is made

    def together(self, number: int) -> int:
        """Return how many steps from this one on are a stretch: about equal parts of the rest of the round."""
        left = self.job.round_end(number) - number
        most = max(1, round(TASK_SECONDS / max(self.seconds, 1e-6)))
        return -(-left // -(-left // most))

    def initial(
        self, parameters: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray] | None = None, step: int = 0
    ) -> State:
        """Return the state at the beginning of a round; see `JobSteps.initial`."""
        job, layout = self.job, Layout(self.layout.packs[: -self.replicas])
        values: dict[str, Any] = held_weights(job.config, parameters, job.precision)
        for key, tensor in job.moments.items():
            values[key] = moments[key] if moments else np.full(tensor.shape, 0, job.precision.dtype)
        return State(self.layout, layout.pack(values), step)

    def run(
        self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS, length: int = 0
    ) -> tuple[list[Outcome], State]:
        """Make a step a batch, all of one round; return the means of the replicas' outcomes, and the next state."""
        timed, state = self.run_own(state, batches, length)
        return self.mean([timed]), state

    def run_own(self, state: State, batches: Sequence[Batch], length: int = 0) -> tuple[dict[int, Timed], State]:
        """Make the steps of the replicas that are here; return the outcomes of each.

        batches   their sequences
        """
        end, shards = state.step + len(batches), len(self.shards)
        meets = self.job.meets(end)
        stretch = _Stretch(self, state, batches, length or self.job.horizon.at(state.step))
        outer = [stretch.outer(shard) for shard in range(shards)] if meets else []
        graph, keys = stretch.graph, [*stretch.inner, *outer]
        if self.peers:
            homes = stretch.homes | {(STATE, number): self.home(number) for number in range(len(state.packs))}
            ranks = {key: self.rank_of(home) for key, home in homes.items()}
            keys = [key for key in keys if ranks[key] == self.peers.number]
            graph, sent = own_part(graph, ranks, self.peers)
            keys.append(sent)
        read = {key for node in graph.values() for key in node.dependencies}
        leaves = {(STATE, number): pack for number, pack in enumerate(state.packs) if (STATE, number) in read}
        found = dict(zip(keys, self.scheduler.run(GraphRun(graph, leaves, keys, len(batches)))))

        def parts(tasks: Sequence[Key], place: int) -> list[Any]:
            return [found[key][place] if key in found else None for key in tasks]

        packs = [*parts(outer, 0), *parts(outer, 1)] if meets else state.packs[: 2 * shards]
        packs += [*parts(stretch.inner, 2), *([] if meets else parts(stretch.inner, 1))]
        timed = {replica: found[key][0] for replica, key in enumerate(stretch.inner) if key in found}
        return timed, State(self.layout, packs, end)

    def mean(self, timed: Sequence[Mapping[int, Timed]]) -> list[Outcome]:
        """Return the mean outcome of each step over the replicas of all ranks."""
        by_replica = {replica: own for each in timed for replica, own in each.items()}
        self.seconds = max(seconds / len(outcomes) for outcomes, seconds in by_replica.values())
        means = []
        for own in zip(*(by_replica[replica][0] for replica in range(self.replicas))):
            norms = [each.norm for each in own if each.norm is not None]
            norm = sum(norms) / self.replicas if norms else None
            means.append(Outcome(sum(each.loss for each in own) / self.replicas, norm))
        return means

    def rank_of(self, replica: int) -> int:
        """Return the rank that has a replica."""
        count = self.peers.count if self.peers else 1
        return next(rank for rank in range(count) if replica in share_of_rank(rank, count, self.replicas))

    def home(self, pack: int) -> int:
        """Return the replica whose rank has a pack of the state."""
        shards = len(self.shards)
        return pack % shards if pack < 2 * shards else (pack - 2 * shards) % self.replicas


class _Stretch:
    """The graph of some steps of a round.

    inner   the tasks of the replicas' steps
    homes   task -> the replica whose rank runs it: its own, or the one with the number of its shard
    """

    def __init__(self, steps: LocalSteps, state: State, batches: Sequence[Batch], length: int) -> None:
        self.steps, self.begins = steps, len(state.packs) < len(steps.layout.packs)
        self.graph: Graph = {}
        self.homes: dict[Key, int] = {}
        job, peers, size = steps.job, steps.peers, steps.job.replica_shape[0]
        here = share_of_rank(peers.number, peers.count, steps.replicas) if peers else range(steps.replicas)
        inputs = []
        for number, batch in enumerate(batches, state.step):
            random = streams_of(job.optimizer, job.run.seed, number, job.batch_shape[0])
            own = None if random is None else random[size * here.start : size * here.stop]
            inputs.append(StepInputs(*batch, hyper_of(job.optimizer, steps.step.row, number, length), own))
        self.inner = []
        for replica in range(steps.replicas):
            first = size * (replica - here.start)
            mine = [each.of(first, first + size) for each in inputs] if replica in here else []
            self.inner.append(self._inner(replica, mine))

    def _inner(self, replica: int, inputs: Sequence[StepInputs]) -> Key:
        """Add the steps of a replica, whose inputs are needed only where it is here."""
        steps, shards = self.steps, len(self.steps.shards)
        numbers = list(range(shards)) if self.begins else [2 * shards + steps.replicas + replica]
        weights = steps.layout.packs[:shards] if self.begins else (steps.weights,)
        names = Layout((*weights, steps.moments))
        function = partial(inner_steps, steps.step.runnable, names, inputs, self.begins)
        needs = [(STATE, number) for number in [*numbers, 2 * shards + replica]]
        return self._add("inner.steps", function, needs, replica)

    def outer(self, shard: int) -> Key:
        """Add the outer step of a shard; return its task."""
        steps, names = self.steps, self.steps.shards[shard]
        places = {name: place for place, name in enumerate(steps.table)}
        take = partial(end_of_round, [places[name] for name in names])
        ends = [self._add("inner.end", take, [key], r, shard) for r, key in enumerate(self.inner)]
        own = [steps.table[name] for name in names]
        function = partial(outer_step, own, steps.job.precision, steps.job.local)
        return self._add("outer.step", function, [(STATE, shard), (STATE, len(steps.shards) + shard), *ends], shard)

    def _add(self, kind: str, function: Callable[..., Any], needs: Sequence[Key], home: int, part: int = 0) -> Key:
        key = (f"{kind}-replicas_-{self.steps.step.recorded.token}", home, part)
        self.graph[key], self.homes[key] = task(key, function, needs), home
        return key


def _shards(sizes: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
    """Divide tensors into at most `count` parts of about one size: the largest first, each to the smallest part."""
    held, shards = [0] * count, [list[str]() for _ in range(count)]
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        least = held.index(min(held))
        shards[least].append(name)
        held[least] += size
    return [tuple(own) for own in shards if own]
