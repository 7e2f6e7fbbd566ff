"""Tests of a step that is spread over workers: the same bits, and nothing but weights, totals and losses on the way."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from one_number import MODELS, Dials, bits_after_steps
from test_one_number import needs_own_product

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.bands import BandedUpdate
from daskgpt.graph.grain import GRAINS
from daskgpt.graph.nodes import is_leaf
from daskgpt.graph.spreading import Join, PartSum, PartTotal, Sent
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import precision_of
from daskgpt.training.stand_ins import Trial
from daskgpt.training.step import TrainingStep


def spread_step(batch=(6, 12), chunk=(1, 12), parts=2, config=SMALL, **options):
    return TrainingStep(config, batch, chunk, OptimizerConfig(), parts=parts, **options)


SPREAD = [("odd", "float32", 10**9), ("odd in 2 groups", "float32", 1), ("odd in 2 groups", "bfloat16", 10**9)]


@needs_own_product
@pytest.mark.parametrize(("name", "precision", "large"), SPREAD)
def test_no_number_of_workers_changes_a_bit(name, precision, large, monkeypatch):
    """Nor whether tokens are looked up by the tables' owner."""
    monkeypatch.setattr("daskgpt.training.step.LARGE_TABLE", large)
    wanted = bits_after_steps(MODELS[name], precision, Dials((6, 20)))
    ways = [((3, 20), 2), ((2, 20), 2), ((2, 20), 3), ((1, 10), 4), ((1, 20), 6), ((3, 4), 6)]
    for (chunk, parts), barrier, grain in zip(ways, cycle(["step", "phase", "layer"]), cycle(GRAINS)):
        dials = Dials(chunk, barrier, grain, in_place=False, parts=parts)
        assert bits_after_steps(MODELS[name], precision, dials) == wanted, dials


def sent(step):
    """Bytes that pass between workers in a step, each result once to each worker that reads it, without the weights."""
    sizes = Trial(step).results
    graph, homes = step.runnable.graph, step.runnable.homes
    inner = {key: node.dependencies for key, node in graph.items() if not is_leaf(node)}
    sent = {(dependency, homes[key]) for key, needs in inner.items() for dependency in needs if dependency in inner}
    return sum(sizes.get(key, 0) for key, home in sent if homes[key] != home)


def functions(step, kind):
    found = [getattr(node, "func", None) for node in step.recorded.unmerged.values()]
    return [function for function in found if isinstance(function, kind)]


def test_with_few_tokens_activations_pass_and_with_many_totals():
    few, many = spread_step((2, 1), (1, 1)), spread_step((64, 12), (8, 12))
    assert not functions(few, PartSum | PartTotal)
    assert {function.share.unit for function in functions(many, Sent)} == {"loss"}
    parameters = sum(value.nbytes for value in random_parameters(SMALL, np.random.default_rng(0)).values())
    assert sent(few) < parameters / 4
    # Totals from the first worker to the second, and half of them back to who updates them.
    assert parameters < sent(many) < 2 * parameters + 64 * 12 * 4
    grown = sent(spread_step((128, 12), (16, 12))) - sent(many)
    assert grown == 64 * 12 * 4 / 2, "twice the sequences are twice the losses, and nothing else"


PARTS = [(2, 1, False), (2, 2, True), (2, 4, True), (3, 2, False), (4, 2, False), (4, 4, True)]


@pytest.mark.parametrize(("parts", "groups", "joined"), PARTS)
def test_parts_of_whole_groups_sum_at_the_same_time(parts, groups, joined):
    step = spread_step((24, 12), (2, 12), parts=parts, groups=groups)
    assert bool(functions(step, Join)) == bool(functions(step, PartTotal)) == joined
    assert bool(functions(step, PartSum)) == (not joined)


def test_every_task_has_a_home_and_every_sequence_stays_at_its_own():
    step = spread_step((6, 12), (1, 6), parts=3)
    homes, graph = step.runnable.homes, step.runnable.graph
    assert {key for key, node in graph.items() if not is_leaf(node)} <= homes.keys()
    assert set(homes.values()) == {0, 1, 2}
    tokens = [key for key in homes if str(key[0]).startswith("tokens-")]
    assert {key[1]: homes[key] for key in tokens} == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


@needs_own_product
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "chunk", "groups"), [((2, 1), (1, 1), 1), ((16, 20), (2, 20), 4)])
def test_gradients_are_summed_where_they_are_used_a_band_at_a_time(batch, chunk, groups, precision, monkeypatch):
    """Whether inputs are gathered or totals joined; but for the tied table's, of which one sum can be made early."""
    monkeypatch.setattr("daskgpt.graph.calls.ROWS_ELEMENTS", 64)  # several bands of 64 rows
    model = replace(MODELS["odd"], batch=batch, groups=groups)
    step = spread_step(batch, chunk, config=model.config, groups=groups, precision=precision_of(precision))
    updates = functions(step, BandedUpdate)
    assert len(updates) == len(tensors(model.config)) - 1
    assert any(each.others for each in updates) == (batch != (2, 1))
    assert max(len(each.total.bands()) for each in updates) > 1
    wanted = bits_after_steps(model, precision, Dials(batch))
    assert bits_after_steps(model, precision, Dials(chunk, in_place=False, parts=2)) == wanted
