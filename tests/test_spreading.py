"""Tests of a step that is spread over workers: the same bits, and nothing but weights, totals and losses on the way."""

from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from one_number import MODELS, Dials, bits_after_steps
from test_one_number import needs_own_product

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.bands import BandedUpdate
from daskgpt.graph.grain import GRAINS
from daskgpt.graph.nodes import is_leaf
from daskgpt.graph.spreading import Join, PartSum, PartTotal, Sent, part_of
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import precision_of
from daskgpt.training.placement import Ownership, homes_of
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


def test_what_another_worker_waits_for_goes_first():
    """And what is fetched from there; a worker's own updates do not."""
    step = spread_step((24, 12), (12, 12), parts=2, groups=2)
    homes, graph, awaited = step.runnable.homes, step.runnable.graph, step.runnable.awaited
    edges = [(key, source) for key, node in graph.items() for source in node.dependencies if source in graph]
    assert {source for key, source in edges if homes[source] != homes[key] and not is_leaf(graph[source])} <= awaited
    assert {key for key in graph if str(key[0]).startswith("weights.fetch")} <= awaited
    assert not awaited & set(step.runnable.updates)
    assert {homes[key] for key in awaited if str(key[0]).startswith("tokens.backward")} == {0, 1}, "totals of both"


def test_state_is_shared_out_by_its_size():
    config = replace(SMALL, blocks=6)
    step = spread_step(parts=3, config=config)
    layout, homes = step.runnable.layout, step.runnable.homes
    held = [0, 0, 0]
    for number, names in enumerate(layout.packs):
        kinds = {name.partition(".")[0] for name in names}
        assert kinds in ({"weight"}, {"m", "v"}), "moments go nowhere: they are not packed with what does"
        held[homes["state", number]] += sum(np.prod(step.recorded.state[name].shape) for name in names)
    assert max(held) < 1.5 * min(held)


def test_the_last_updates_are_shared_out():
    """With two workers the tables are one's, and so would all blocks of the beginning be the other's, whose gradients
    come last: the first blocks are in turns.
    """
    config = replace(SMALL, blocks=12, vocabulary=72 * SMALL.channels, padded_vocabulary=0)
    step = spread_step((2, 12), parts=2, config=config)
    homes = {key: home for key, home in step.runnable.homes.items() if str(key[0]).startswith("adamw-h.")}
    owners = [{home for key, home in homes.items() if f"-h.{block}." in str(key[0])} for block in range(12)]
    assert all(len(own) == 1 for own in owners), owners
    assert [own != after for own, after in pairwise(owners[:4])] == [True] * 3, owners


@pytest.mark.parametrize(("parts", "accumulate"), [(2, 1), (3, 1), (2, 3)])
def test_where_a_chunk_is_one_task_more_blocks_are_no_more_tasks(parts, accumulate):
    configs, options = (replace(SMALL, blocks=n * parts) for n in (1, 2)), {"grain": "chunk", "accumulate": accumulate}
    few, many = (spread_step((24, 12), (2, 12), parts, config, **options) for config in configs)
    assert few.runnable.tasks == many.runnable.tasks
    assert len(many.runnable.layout.packs) == 2 * parts, "weights and moments of each owner"


def test_sums_follow_the_sequences():
    step = spread_step((48, 12), (16, 12), parts=3)
    graph = step.recorded.unmerged
    assert {(own.share.part, own.first_piece) for own in functions(step, PartSum)} == {(0, 0), (1, 1), (2, 2)}
    sizes = dict.fromkeys(random_parameters(SMALL, np.random.default_rng(0)), 1)
    home_of = homes_of(graph, Ownership(graph, 3, sizes, one_task=False), 3, tables_stay=False)
    sums = {key: node.func for key, node in graph.items() if isinstance(getattr(node, "func", None), PartSum)}
    assert all(home_of(key) == function.share.part for key, function in sums.items())


def test_parts_are_consecutive_and_as_equal_as_can_be():
    assert [part_of(chunk, 5, 2) for chunk in range(5)] == [0, 0, 0, 1, 1]
    assert [part_of(chunk, 4, 4) for chunk in range(4)] == [0, 1, 2, 3]


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
