"""Tests of rank programs: ranks train to the bits of one process with any messages and owners."""

import random
from dataclasses import replace

import numpy as np
import pytest
import rank_threads
from conftest import SMALL
from one_number import MODELS, SEED, VARIANTS, Dials, bits_after_steps, bits_of, seed, start_values
from steps import step_of

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph import distribute, update_in_place
from daskgpt.graph.distribute import Rank
from daskgpt.graph.fuse import GRAINS
from daskgpt.model.precision import precision_of

STEPS = 3


def train(model, precision, count, chunk, threads=1, **options):
    arguments = model.config, model.batch, chunk, model.optimizer_config, precision_of(precision)
    options |= {"groups": model.groups}
    return rank_threads.train(count, start_values(model.config), model.batches(STEPS), arguments, options, threads)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    "name", ["odd", "clipped", "odd with muon", "odd with dropout", "llama", "llama with adapters"]
)
def test_ranks_train_to_the_bits_of_one_process(name, count, monkeypatch):
    model = replace((MODELS | VARIANTS)[name], groups=6)
    print(f"{SEED}={(number := seed())}")
    choose = random.Random(f"{number} {name} {count}").choice
    monkeypatch.setattr(distribute, "BUCKET_BYTES", choose([1, 4000, 1 << 23]))
    precision, barrier = choose(["float32", "bfloat16"]), choose(["layer", "phase", "step", "none"])
    monkeypatch.setattr(update_in_place, "TASK_ELEMENTS", choose([1 << 8, 1 << 22]))
    for constant in ("LEAST_ELEMENTS", "THREADS_OF_PIECE"):
        monkeypatch.setattr(update_in_place, constant, 1)
    dials = {"threads": choose([1, 2, 5]), "grain": choose(["kernel", "segment", "block", "chunk"]), "barrier": barrier}
    if count == 3:
        dials["accumulate"] = choose([1, 2])
    print(dials, precision)
    wanted = bits_after_steps(model, precision, Dials(model.batch, grain="kernel"), STEPS)
    ranks, _ = train(model, precision, count, (1, choose([20, 10])), **dials)
    assert {bits_of(rank_of_run.outcomes, rank_threads.owned(ranks)) for rank_of_run in ranks} == {wanted}
    if precision == "float32":
        assert {bits_of(rank_of_run.outcomes, rank_of_run.parameters) for rank_of_run in ranks} == {wanted}


@pytest.mark.parametrize("grain", GRAINS)
def test_tasks_of_a_rank_of_many_chunks(grain):
    config, rank = replace(SMALL, blocks=3), Rank(0, 2, None, 2, 16, 16)
    step = step_of(config, (16, 16), (1, 16), OptimizerConfig(), rank=rank, grain=grain, in_place=True, groups=2)
    assert step.chunks == 8
    assert step.tasks > 8


def test_moments_on_owners_and_one_message_per_bucket():
    ranks, messages = train(MODELS["odd in 2 groups"], "float32", 2, (3, 20))
    for name, moment in ranks[0].moments.items():
        for largest in zip(*(np.abs(rank.moments[name]).reshape(len(moment), -1).max(1) for rank in ranks)):
            assert min(largest) == 0, f"both ranks have updated a row of {name}"
    assert sum(np.abs(rank.moments["m.wte.weight"]).max() > 0 for rank in ranks) >= 1
    # Losses, totals, weights both ways, and what the tied table is summed from where that is.
    assert len(messages.sent) <= STEPS * (3 * 2 + 2)
