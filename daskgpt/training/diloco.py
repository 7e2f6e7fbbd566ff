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
from daskgpt.data.dataset import Batch
from daskgpt.graph.messages import Peers, own_part
from daskgpt.graph.nodes import Graph, Key, task, with_leaves
from daskgpt.graph.recording import STATE, CompiledStep, GraphRun, Layout
from daskgpt.kernels.floating_point import flush_to_zero
from daskgpt.kernels.optimizers import nesterov
from daskgpt.model.parameters import Tensor, tensors
from daskgpt.model.precision import Precision, copy_of, values_of
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.job import OUTER, Arrays, Job, Say, of_replica
from daskgpt.training.job_steps import Steps
from daskgpt.training.step import NO_LIMITS, Limits, Outcome, State, of_sequences, replica_step

TASK_SECONDS = 1.5  # of a task, about: a thousand times what it costs a cluster, and short enough to show progress
SOME_STEPS = f"some steps of a replica, about {TASK_SECONDS:g} s, are a task"

Pack = tuple[Any, ...]  # of a state
Timed = tuple[list[Outcome], float]  # outcomes of a replica's steps, and how long they took


def inner_steps(
    runnable: CompiledStep, names: Layout, inputs: Sequence[Arrays], shared: bool, *packs: Pack
) -> tuple[Timed, Pack, Pack]:
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
        run = runnable.submission(each, state)
        handles, _ = runnable.split(list(get_sync(with_leaves(run.graph, run.leaves), run.keys)), state)
        outcomes.append(Outcome.of(runnable.output(handles)))
    weights = tuple(value for name, value in named.items() if name.startswith("weight."))
    moments = tuple(value for name, value in named.items() if not name.startswith("weight."))
    return (outcomes, perf_counter() - begin), weights, moments


def end_of_round(places: Sequence[int], result: tuple[Timed, Pack, Pack]) -> Pack:
    """Return some weights that a replica has at the end of a round, from the result of its `inner_steps`."""
    return tuple(values_of(result[1][place]) for place in places)


def outer_step(
    tensors: Sequence[Tensor], precision: Precision, local: LocalConfig, weights: Pack, momenta: Pack, *ends: Pack
) -> tuple[Pack, Pack]:
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


class LocalSteps(Steps):
    """Runs a job's steps by replicas, a stretch of a round at a time.

    step     of one replica, recorded
    layout   of the state: weights and momenta by shards, moments by replicas, and weights by replicas, which exist
             within a round only. The packs of other ranks are None
    shards   names of the tensors whose outer steps are made together
    """

    described_tasks = SOME_STEPS

    def __init__(self, job: Job, scheduler: Scheduler, say: Say = print, peers: Peers | None = None) -> None:
        """peers   set where other ranks have some of the replicas"""
        self.job, self.scheduler, self.replicas, self.peers = job, scheduler, job.local.replicas, peers
        self.rank, self.rank_count = (peers.number, peers.count) if peers else (0, 1)
        self.chunks = ChunkChoice(job.config, job.replica_shape, job.dataflow, job.precision, 1)
        self.step = replica_step(job, self.chunks.first)
        share = available_memory() // min(self.replicas, scheduler.threads)
        if scheduler.in_place and (warning := self.chunks.fit(self.step, 1, share)):
            say(f"memory     {warning}")
        self.table = tensors(job.config)
        (names,) = self.step.runnable.layout.packs
        self.weights = tuple(name for name in names if name.startswith("weight."))
        self.moments = tuple(name for name in names if not name.startswith("weight."))
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

    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        """Return the state at the beginning of a round; see `JobSteps.initial`."""
        weights = {f"weight.{name}": parameters[name] for name in self.table}
        return self.state_of({**weights, **(moments or {})}, step)

    def state_of(self, values: Arrays, step: int) -> State:
        """Return the state after some steps from its arrays; moments that are missing are zeros.

        Without weights of replicas, a round begins.
        """
        precision, moments, replicas = self.job.precision, self.job.moments, self.layout.packs[-self.replicas :]

        def held(name: str) -> Any:
            if name in moments:
                return values[name] if name in values else np.full(moments[name].shape, 0, precision.dtype)
            return precision.hold(self.table[name.partition(".")[2]], values[name])

        apart = any(names[0] in values for names in replicas)
        layout = self.layout.packs if apart else self.layout.packs[: -self.replicas]
        packs = [tuple(map(held, names)) if self.is_here(n) else None for n, names in enumerate(layout)]
        return State(self.layout, packs, step)

    def run(self, state: State, batches: Sequence[Batch], limits: Limits = NO_LIMITS) -> tuple[list[Outcome], State]:
        """Make a step a batch, all of one round; return the means of the replicas' outcomes, and the next state."""
        timed, state = self.run_own(state, batches)
        return self.mean([timed]), state

    def run_own(self, state: State, batches: Sequence[Batch]) -> tuple[dict[int, Timed], State]:
        """Make the steps of the replicas that are here; return the outcomes of each.

        batches   their sequences
        """
        end, shards = state.step + len(batches), len(self.shards)
        meets = self.job.meets(end)
        graph, inner, outer = self._stretch(state, batches, meets)
        keys = [*inner, *outer]
        if self.peers:
            # The second part of a task's key is the replica whose rank runs it.
            ranks = {key: self.rank_of(key[1]) for key in graph}
            ranks |= {(STATE, pack): self.rank_of(self.home(pack)) for pack in range(len(state.packs))}
            keys = [key for key in keys if ranks[key] == self.rank]
            graph, sent = own_part(graph, ranks, self.peers)
            keys.append(sent)
        read = {key for node in graph.values() for key in node.dependencies}
        leaves = {(STATE, number): pack for number, pack in enumerate(state.packs) if (STATE, number) in read}
        run = GraphRun(graph, leaves, keys, len(batches), self.step.recorded.recorder)
        found = dict(zip(keys, self.scheduler.run(run)))

        def parts(tasks: Sequence[Key], place: int) -> list[Any]:
            return [found[key][place] if key in found else None for key in tasks]

        packs = [*parts(outer, 0), *parts(outer, 1)] if meets else state.packs[: 2 * shards]
        packs += [*parts(inner, 2), *([] if meets else parts(inner, 1))]
        timed = {replica: found[key][0] for replica, key in enumerate(inner) if key in found}
        return timed, State(self.layout, packs, end)

    def _stretch(self, state: State, batches: Sequence[Batch], meets: bool) -> tuple[Graph, list[Key], list[Key]]:
        """Return the graph of some steps of a round, the tasks of the replicas' steps, and those of the outer step.

        meets   whether the round ends with them
        """
        job, shards, graph = self.job, len(self.shards), Graph()
        begins = len(state.packs) < len(self.layout.packs)
        size, here = job.replica_shape[0], share_of_rank(self.rank, self.rank_count, self.replicas)
        rows, length = slice(size * here.start, size * here.stop), job.horizon.at(state.step)
        inputs = [self.step.inputs(own, n, length, rows=rows) for n, own in enumerate(batches, state.step)]
        names = Layout((*(self.layout.packs[:shards] if begins else [self.weights]), self.moments))

        def add(kind: str, function: Callable[..., Any], needs: Sequence[Key], home: int, part: int = 0) -> Key:
            key = (f"{kind}-replicas_-{self.step.recorded.token}", home, part)
            graph[key] = task(key, function, needs)
            return key

        inner, outer = list[Key](), list[Key]()
        for replica in range(self.replicas):
            own = slice(size * (replica - here.start), size * (replica - here.start + 1))
            mine = [of_sequences(each, own) for each in inputs] if replica in here else []
            steps = partial(inner_steps, self.step.runnable, names, mine, begins)
            weights = range(shards) if begins else [2 * shards + self.replicas + replica]
            needs = [(STATE, number) for number in (*weights, 2 * shards + replica)]
            inner.append(add("inner.steps", steps, needs, replica))
        places = {name: place for place, name in enumerate(self.table)}
        for shard, members in enumerate(self.shards if meets else ()):
            take = partial(end_of_round, [places[name] for name in members])
            ends = [add("inner.end", take, [key], replica, shard) for replica, key in enumerate(inner)]
            step = partial(outer_step, [self.table[name] for name in members], job.precision, job.local)
            needs = [(STATE, shard), (STATE, shards + shard), *ends]
            outer.append(add("outer.step", step, needs, shard))
        return graph, inner, outer

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
        ranks = range(self.rank_count)
        return next(rank for rank in ranks if replica in share_of_rank(rank, self.rank_count, self.replicas))

    def home(self, pack: int) -> int:
        """Return the replica whose rank has a pack of the state."""
        shards = len(self.shards)
        return pack % shards if pack < 2 * shards else (pack - 2 * shards) % self.replicas

    def is_here(self, pack: int) -> bool:
        """Return whether this rank has a pack of the state."""
        return self.rank_of(self.home(pack)) == self.rank


def _shards(sizes: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
    """Divide tensors into at most `count` parts of about one size: the largest first, each to the smallest part."""
    held, shards = [0] * count, [list[str]() for _ in range(count)]
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        least = held.index(min(held))
        shards[least].append(name)
        held[least] += size
    return [tuple(own) for own in shards if own]
