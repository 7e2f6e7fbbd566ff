"""Tests of groups of sequences: their separate sums are added in a binary tree, with any chunks."""

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import SMALL

import daskgpt
from daskgpt.graph.calls import apply
from daskgpt.graph.sum_order import Groups, groups_of_batch
from daskgpt.kernels import embedding, linear
from daskgpt.training.inference import loss_and_gradients

B, T, C, V = 12, 6, 5, 7
CHUNKS = [(12, 6), (12, 3), (4, 2), (2, 6), (3, 1), (1, 3), (1, 1), ((5, 7), (6,)), ((1, 10, 1), (4, 2))]


def tree(terms, groups, start):
    """Sum in the canonical order of DESIGN.md, by recursion; within a group one number after the other."""
    size = len(terms) // groups

    def total(low, high):
        if high - low == 1:
            result = start.copy() if low == 0 else np.zeros_like(start)
            for term in terms[low * size : high * size].reshape(-1, *start.shape):
                result += term
            return result
        middle = low + 2 ** ((high - low - 1).bit_length() - 1)
        return total(low, middle) + total(middle, high)

    return total(0, groups)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("started", [False, True])
def test_groups_are_added_in_a_binary_tree(random, groups, started):
    dy = (random.normal(size=(B, T, C)) * 10.0 ** random.integers(-3, 4, (B, T, 1))).astype(np.float32)
    tokens = random.integers(0, V, (B, T)).astype(np.int32)
    rows = np.zeros((B, T, V, C), np.float32)
    rows[np.arange(B)[:, None], np.arange(T), tokens] = dy
    bias, table = (random.normal(size=shape).astype(np.float32) * started for shape in ((C,), (V, C)))
    wanted = tree(dy, groups, bias), tree(rows, groups, table)
    for chunks in CHUNKS:
        arrays = [da.from_array(value, chunks=(*chunks, C)[: value.ndim]) for value in (dy, tokens)]
        starts = [da.from_array(value, chunks=-1) if started else None for value in (bias, table)]
        bias_sum, table_sum = ({"start": start, "groups": Groups(groups)} for start in starts)
        (db,) = apply("db", linear.backward_bias, "btC -> C", arrays[:1], **bias_sum)
        (dw,) = apply("dw", embedding.backward, "btC, bt -> VC", arrays, new_axes={"V": V}, **table_sum)
        for one, other in zip(dask.compute(db, dw, scheduler="sync"), wanted):
            np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32), err_msg=str(chunks))
    # Numbers of many sizes: each number of groups rounds in its own way.
    assert len({tree(rows, other, table).tobytes() for other in (1, 2, 3, 4, 6, 12)}) == 6


def test_groups_follow_from_the_shape():
    batches = {(12, 64): 2, (4, 16): 1, (8, 256): 4, (12, 128): 6, (7, 4096): 7, (9, 130): 3, (7, 20): 1, (24, 64): 6}
    assert {batch: groups_of_batch(*batch) for batch in batches} == batches
    assert {groups_of_batch(*batch, 2) for batch in batches} == {2}


def test_groups_that_do_not_divide_the_batch_are_refused():
    for groups, near in ((5, 6), (8, 6), (24, 12)):
        with pytest.raises(ValueError, match=rf"divide batch_size; got groups={groups}, .* Try groups={near}\."):
            daskgpt.DataConfig(batch_size=12, groups=groups)
    tokens = da.zeros((6, 8), dtype=np.int32, chunks=(2, 8))
    with pytest.raises(ValueError, match=r"groups must divide sequences; got groups=4, sequences=6"):
        loss_and_gradients(SMALL, daskgpt.initial_parameters(SMALL, 0), tokens, tokens, groups=4)
