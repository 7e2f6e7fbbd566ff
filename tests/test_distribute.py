"""Tests of rank programs: ranks that are threads here train to the bits of one process, whatever they exchange."""

import dataclasses
import hashlib
import queue
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from one_number import MODELS, VARIANTS, outcomes_of_steps, raw_numbers, start_values
from one_number import Dials as AllDials

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph import distribute
from daskgpt.graph.distribute import Rank
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.local import local_scheduler
from daskgpt.training.step import TrainingStep

STEPS, LIMIT = 3, 20


class Queues:
    """Messages between threads: in order, by sender, receiver and channel."""

    def __init__(self):
        self.queues, self.sent = defaultdict(queue.Queue), 0

    def of(self, rank):
        class Link:
            def send(_, other, channel, value):
                self.sent += 1
                self.queues[rank, other, channel].put(value)

            def receive(_, other, channel):
                return self.queues[other, rank, channel].get(timeout=LIMIT)

        return Link()


def train(model, precision, count, chunk, threads=1, grain="block", barrier="step", accumulate=1):
    """Losses, norms and parameters of each rank after some steps."""
    text = raw_numbers(1, (STEPS, model.batch[0], model.batch[1] + 1)) % model.config.vocabulary
    batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in text.astype(np.int32)]
    optimizer = OptimizerConfig(optimizer=model.optimizer, dropout=model.dropout, clip=model.clip)
    links = Queues()

    def program(number):
        rank = Rank(number, count, model.groups, *model.batch, links.of(number))
        own = {"grain": grain, "barrier": barrier, "in_place": True, "accumulate": accumulate, "rank": rank}
        own |= {"groups": model.groups}
        step = TrainingStep(model.config, model.batch, chunk, optimizer, precision_of(precision), **own)
        scheduler = local_scheduler("threads" if threads > 1 else "sync", threads)
        state = step.initial(start_values(model.config))
        mine = [tuple(part[slice(*step.sequences)] for part in batch) for batch in batches]
        if barrier == "none":
            outcomes, state = step.window(scheduler, state, mine, STEPS)
        else:
            outcomes = []
            for batch in mine:
                handles, state = step.submit(scheduler, state, batch, STEPS)
                outcomes.append(step.outcome(scheduler, handles))
        moments = {name: a for name, a in state.layout.unpack(state.packs).items() if not name.startswith("weight.")}
        return outcomes, state.parameters(scheduler), moments, step

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(program, range(count))), links


def digest(outcomes, parameters):
    numbers = [(outcome.loss.hex(), outcome.norm) for outcome in outcomes]
    values = [np.ascontiguousarray(parameters[name]).tobytes() for name in sorted(parameters)]
    return hashlib.sha256(repr(numbers).encode() + b"".join(values)).hexdigest()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["odd", "clipped", "odd with muon", "odd with dropout", "rmsnorm"])
def test_ranks_train_to_the_bits_of_one_process(name, count, monkeypatch):
    model = dataclasses.replace((MODELS | VARIANTS)[name], groups=6)
    random.seed(f"{name} {count}")
    monkeypatch.setattr(distribute, "BUCKET_BYTES", random.choice([1, 4000, 1 << 23]))
    wanted = digest(*outcomes_of_steps(model, "float32", AllDials(model.batch, grain="kernel"), STEPS))
    ranks, _ = train(model, "float32", count, (1, random.choice([20, 10])), threads=random.choice([1, 2]))
    assert {digest(outcomes, parameters) for outcomes, parameters, *_ in ranks} == {wanted}
