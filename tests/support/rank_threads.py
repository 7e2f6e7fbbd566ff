"""Ranks as threads of this process: rank programs without a cluster, whose messages are counted and recorded."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from steps import run_window, state_of, step_of

from daskgpt.data.dataset import Batch
from daskgpt.graph.distribute import Channel, Rank
from daskgpt.model.step import CompiledStep, Outcome
from daskgpt.schedulers.local import local_scheduler

LIMIT = 300  # seconds to wait for a message; a rank that compiles kernels takes long on a busy machine


class Messages:
    """Carries values between threads: in order, by sender, receiver and channel."""

    def __init__(self) -> None:
        self.queues: dict[Any, queue.Queue[Any]] = {}
        self.sent: list[tuple[int, int, Channel, int]] = []  # from, to, on which, and bytes of the arrays in it

    def link(self, number: int) -> Any:
        """The link of a rank to the others."""
        return _Link(self, number)

    def between(self, *key: Any) -> queue.Queue[Any]:
        """The queue of a sender, receiver and channel; sender and receiver may ask for it first at the same moment."""
        return self.queues.setdefault(key, queue.Queue())


class _Link:
    def __init__(self, messages: Messages, number: int) -> None:
        self.messages, self.number = messages, number

    def send(self, rank: int, channel: Channel, value: Any) -> None:
        self.messages.sent.append((self.number, rank, channel, _bytes(value)))
        self.messages.between(self.number, rank, channel).put(value)

    def receive(self, rank: int, channel: Channel) -> Any:
        return self.messages.between(rank, self.number, channel).get(timeout=LIMIT)


def _bytes(value: Any) -> int:
    return value.nbytes if hasattr(value, "nbytes") else sum(map(_bytes, value))


class Trained(NamedTuple):
    """What a rank ends with."""

    outcomes: list[Outcome]
    parameters: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    step: CompiledStep


def owned(ranks: Sequence[Trained]) -> dict[str, np.ndarray]:
    """The parameters, each row from who updates it: in bfloat16 others have it rounded."""
    whole = {name: value.copy() for name, value in ranks[0].parameters.items()}
    for rank in ranks:
        for name, value in rank.parameters.items():
            for rows in rank.step.owned.get(name, ()):
                whole[name][rows] = value[rows]
    return whole


def train(
    count: int,
    initial: dict[str, np.ndarray],
    batches: list[Batch],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    threads: int = 1,
) -> tuple[list[Trained], Messages]:
    """Train with some ranks; return the result of each, and the messages.

    arguments, options   of `steps.step_of`
    threads              of each rank
    """
    messages, shape = Messages(), batches[0][0].shape

    def program(number: int) -> Trained:
        rank = Rank(number, count, messages.link(number), options["groups"], *shape, threads)
        step = step_of(*arguments, **options, in_place=True, threads=threads, rank=rank)
        scheduler = local_scheduler("threads", threads)
        values = {name: value.copy() for name, value in initial.items()}  # it is written over
        state, outcomes, rows = state_of(step, values), list[Outcome](), step.sequences
        mine = [(tokens[rows], targets[rows]) for tokens, targets in batches]
        window = len(mine) if options.get("barrier") == "none" else 1
        for first in range(0, len(mine), window):
            more, state = run_window(scheduler, step, state, mine[first : first + window], len(batches))
            outcomes += more
        moments = {name: a for name, a in state.layout.unpack(state.packs).items() if not name.startswith("weight.")}
        return Trained(outcomes, state.parameters(scheduler), moments, step)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(program, range(count))), messages
