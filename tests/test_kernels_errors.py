"""Tests of the kernels' errors: bad arrays are refused before compiled code reads past their ends."""

from functools import partial

import numpy as np
import pytest
from product_cases import using

from daskgpt.graph.update_in_place import Update
from daskgpt.kernels import attention, crossentropy, elementwise, embedding, linear, norms, rotary
from daskgpt.kernels.bfloat16 import attention as bf16_attention
from daskgpt.kernels.bfloat16 import gemm as bfloat16
from daskgpt.kernels.bfloat16.gemm import TrainedWeight
from daskgpt.kernels.bfloat16.isa import Unit, unit
from daskgpt.kernels.bfloat16.rounding import from_bfloat16, to_bfloat16
from daskgpt.kernels.bfloat16.update import linear_update
from daskgpt.kernels.dropout import dropped, streams
from daskgpt.kernels.optimizers import adamw_inplace, muon_inplace

X, DY, WEIGHT = np.ones((2, 5, 8)), np.ones((2, 5, 6)), np.ones(8)
TOKENS, POSITIONS = np.zeros((2, 5), "i4"), np.zeros(5, "i4")
TABLE, LOGITS, LOSSES = np.ones((9, 8)), np.ones((2, 5, 9)), np.ones((2, 5))
QKV, Y, LOGSUMEXP = np.ones((2, 7, 24), "f4"), np.ones((2, 7, 8), "f4"), np.ones((2, 2, 7), "f4")
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MUON = {"beta": 0.9, "scale": 0.2, "weight_decay": 0.1, "maps": 1}
HYPER = np.ones(3)
# Of bfloat16 products; the checks are those of every unit.
SMALL_X, SMALL_DY, NARROW, BIAS = (np.ones(shape, "f4") for shape in ((4, 6), (4, 64), (64, 6), (64,)))


def update(dy=SMALL_DY, x=SMALL_X, weight=NARROW, m=NARROW, v=NARROW, groups=(0,), start=None):
    """One chunk's; nothing is written over that other tests need."""
    if unit() is Unit.PORTABLE:
        pytest.skip("without a unit, gradient and update are two kernels")
    trained = TrainedWeight.of(weight.copy())
    linear_update([(dy, x)], groups, start, (trained, m.copy(), v.copy(), HYPER), 0, len(weight), **ADAMW)


def product_of_rows(first, count):
    total = np.empty((count, 6), "f4")
    bfloat16.backward_weight(SMALL_DY, SMALL_X, total=total, accumulate=False, first_row=first)


def repacked(rows, first):
    return TrainedWeight.of(NARROW).pack(np.ones((rows, 6), "f4"), first)


def total_last(kernel, *options):
    """A summing kernel whose last argument is the total."""
    return lambda *arrays: kernel(*arrays[:-1], *options, total=arrays[-1], accumulate=False)


def rows_from(first, kernel, *arrays):
    return lambda: kernel(*arrays, total=np.ones((3, 8)), accumulate=False, first_row=first)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Kernels with arguments that fit. The last one of a sum is its total.
SUMS = {
    "linear weight": (total_last(linear.backward_weight), DY, X, np.ones((6, 8))),
    "linear bias": (total_last(linear.backward_bias), DY, np.ones(6)),
    "layernorm weight": (total_last(norms.layernorm_backward_weight), X, X, WEIGHT.copy()),
    "rmsnorm weight": (total_last(norms.rmsnorm_backward_weight), X, X, WEIGHT.copy()),
    "embedding wte": (total_last(embedding.backward), X, TOKENS, TABLE.copy()),
    "embedding wpe": (total_last(embedding.backward), X, POSITIONS, TABLE.copy()),
    "crossentropy wte": (total_last(crossentropy.backward_wte), LOSSES, LOGITS, X, TABLE.copy()),
    "mean": (total_last(crossentropy.mean_forward), LOSSES, LOSSES, np.ones(())),
}
FITTING = SUMS | {
    "add": (elementwise.add, X, X),
    "gelu": (elementwise.gelu_backward, X, X),
    "relu2": (elementwise.relu2_backward, X, X),
    "linear": (linear.forward, X, TABLE, np.ones(9)),
    "linear without bias": (linear.forward, X, TABLE),
    "linear x": (linear.backward_x, LOGITS, TABLE),
    "layernorm": (norms.layernorm, X, WEIGHT, WEIGHT),
    "layernorm x": (norms.layernorm_backward_x, X, X, WEIGHT),
    "rmsnorm": (norms.rmsnorm, X, WEIGHT),
    "rmsnorm x": (norms.rmsnorm_backward_x, X, X, WEIGHT),
    "embedding": (embedding.forward, TOKENS, TABLE, POSITIONS, TABLE),
    "crossentropy": (lambda x, wte, targets: crossentropy.forward(x, wte, targets, 9), X, TABLE, TOKENS),
    "crossentropy x": (crossentropy.backward_x, LOSSES, LOGITS, TABLE),
    "dropout": (lambda *arrays: dropped(*arrays, 0, 0.1), X, streams(0, 0, 2), POSITIONS),
    "adamw": (partial(Update(adamw_inplace), **ADAMW), X, X, X, X, HYPER),
    "muon": (lambda *arrays: Update(muon_inplace)(*arrays, HYPER, **MUON), TABLE, TABLE, TABLE),
}
FITTING |= {
    "bfloat16": (lambda x, bias: bfloat16.forward(x, TrainedWeight.of(NARROW), bias), SMALL_X, BIAS),
    "bfloat16 x": (lambda dy: bfloat16.backward_x(dy, TrainedWeight.of(NARROW)), SMALL_DY),
    "bfloat16 weight": (total_last(bfloat16.backward_weight), SMALL_DY, SMALL_X, NARROW.copy()),
    "bfloat16 update": (update, SMALL_DY, SMALL_X, NARROW, NARROW, NARROW),
    "bfloat16 repacked": (lambda weight: TrainedWeight.of(NARROW).pack(weight), NARROW),
}
for module, name in ((attention, "attention"), (bf16_attention, "bfloat16 attention")):
    FITTING[f"{name} backward"] = (partial(module.backward, heads=2), Y, QKV, Y, LOGSUMEXP)
    FITTING[f"{name} dropped"] = (partial(module.forward, heads=2, place=1, rate=0.1), QKV, streams(0, 0, 2))

HALVES = {"divided": (4,), "parts": 2}
REFUSED = [
    (lambda: crossentropy.forward(X, TABLE, TOKENS, 0), "vocabulary must be from 1 to the 9 rows"),
    (lambda: crossentropy.forward(X, TABLE, TOKENS, 10), "vocabulary must be from 1 to the 9 rows"),
    (lambda: adamw_inplace(read_only(X), X, X, X, HYPER, **ADAMW), "weight must be a writable"),
    (lambda: adamw_inplace(X, X, read_only(X), X, HYPER, **ADAMW), "m must be a writable"),
    (lambda: adamw_inplace(X, X, X, read_only(X), HYPER, **ADAMW), "v must be a writable"),
    (lambda: muon_inplace(TABLE, TABLE, TABLE.astype("f4"), HYPER, **MUON), "m must be a writable"),
    (lambda: attention.forward(QKV, heads=3), "qkv must have a column per channel"),
    (lambda: attention.forward(QKV, heads=0), "qkv must have a column per channel"),
    (lambda: bf16_attention.forward(QKV[..., 1:], heads=2), "qkv must have a column per channel"),
    (lambda: attention.forward(QKV, heads=3, key_heads=-1), "qkv must have a column per channel"),
    (lambda: attention.forward(QKV, np.zeros(2, int), heads=2, rate=1.0), "rate must be at least 0 and below 1"),
    (lambda: attention.gather([X, X[:1]], None), "a chunk must have shape (2, 5, 8)"),
    (lambda: attention.gather([X], None, np.array([2], "i4"), **HALVES), "part must be from 0 to 1; got part=2"),
    (lambda: attention.gather([X], None, np.array([-1], "i4"), **HALVES), "part must be from 0 to 1; got part=-1"),
    (lambda: attention.gather([X], None, np.zeros(0, "i4"), **HALVES), "part must have shape (1,)"),
    (lambda: attention.gather([X], None, divided=(4,), parts=3), "parts must divide each number of heads"),
    (lambda: attention.gather([X], None, divided=(3,)), "which must have equal numbers of channels"),
    (lambda: attention.gather([X], None, parts=2), "parts must divide each number of heads"),
    (lambda: attention.split([X, X[:1]], POSITIONS, **HALVES), "a part must have shape (2, 5, 8)"),
    (lambda: attention.split(X, POSITIONS, **HALVES), "there must be an array for each part; got arrays=1, parts=2"),
    (lambda: attention.split(X, np.array([2, 0], "i4")), "positions must be consecutive"),
    (lambda: attention.forward(np.stack([QKV, QKV], 1), np.zeros(2, int), heads=2), "streams must have shape (4,)"),
    (lambda: norms.qk_norm(X, WEIGHT, WEIGHT, heads=6, key_heads=-1, norm_eps=1e-5), "there must be a head"),
    (lambda: rotary.forward(X, POSITIONS, heads=4, key_heads=-1, rope=(1e4,) * 5), "there must be a head"),
    (lambda: rotary.forward(X, POSITIONS, heads=2, key_heads=1, rope=(1e4,)), "rope must have five numbers"),
    (lambda: crossentropy.mean_backward(np.ones(0), LOSSES, LOSSES), "dy must have shape ()"),
    (lambda: repacked(32, 16), "rows=(16, 48)"),
    (lambda: repacked(32, 64), "rows=(64, 96)"),
    (lambda: product_of_rows(2, 63), "total must be some of the 64 rows; got first_row=2"),
    *((rows_from(first, linear.backward_weight, DY, X), "must be some of the 6 rows") for first in (-1, 4)),
    *((rows_from(first, crossentropy.backward_wte, LOSSES, LOGITS, X), "of the 9 rows") for first in (-1, 7)),
    (lambda: update(groups=[1]), "got groups=[1]"),
    (lambda: linear_update([], [], None, (None,) * 4, 0, 64, **ADAMW), "got parts=[]"),
]
WRONG_TYPES = [
    (lambda: embedding.forward(TOKENS.astype("i8"), TABLE, POSITIONS, TABLE), "got dtypes=int64"),
    (lambda: to_bfloat16(X), "to_bfloat16: x must be float32"),
    (lambda: from_bfloat16(X.astype("f4")), "from_bfloat16: x must be bfloat16"),
    (lambda: update(start=np.zeros((64, 6))), "start must be float32"),
]
BAD = [(*row, ValueError) for row in REFUSED] + [(*row, TypeError) for row in WRONG_TYPES]


def refuses(call, arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return " must " in str(error)
    return False


@pytest.mark.parametrize("name", FITTING)
def test_truncated_arguments_are_refused(name):
    """Along its first or its last axis: what may be longer or shorter along one may not along the other."""
    call, *arguments = FITTING[name]
    call(*arguments)
    for position, array in enumerate(arguments):
        cuts = [array[:-1], np.ascontiguousarray(array[..., :-1])] if array.ndim else [array[None]]
        assert any(refuses(call, [*arguments[:position], cut, *arguments[position + 1 :]]) for cut in cuts), position


@pytest.mark.parametrize(("call", "message", "kind"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_values_and_wrong_types_are_refused(call, message, kind):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("name", SUMS)
def test_bad_totals_are_refused(name):
    call, *arrays, total = FITTING[name]
    gaps = np.ones((*total.shape, 2))[..., 0] if total.ndim else read_only(total)  # a single number is contiguous
    for bad in (read_only(total), total.astype("f4"), gaps):
        before = bad.copy()
        with pytest.raises(ValueError, match="total must be a writable contiguous float64 array"):
            call(*arrays, bad)
        np.testing.assert_array_equal(bad, before)


def test_rows_of_a_table_without_tokens_are_zero():
    total = np.ones((3, 8))
    embedding.backward(X, TOKENS, total=total, accumulate=False, first_row=14)
    assert not total.any()


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("name", ["tokens", "positions", "targets"])
def test_an_index_outside_of_its_table_is_refused(name, bad):
    wrong = POSITIONS.copy() if name == "positions" else TOKENS.copy()
    wrong[..., -1] = bad
    calls = {
        "tokens": lambda: embedding.forward(wrong, TABLE, POSITIONS, TABLE),
        "positions": lambda: embedding.forward(TOKENS, TABLE, wrong, TABLE),
        "targets": lambda: crossentropy.forward(X, np.ones((12, 8)), wrong, 9),
    }
    with pytest.raises(ValueError, match=rf"{name} must be from 0 to 8; got {name}={bad}\."):
        calls[name]()


@pytest.mark.parametrize("name", [name for name in FITTING if name.startswith("bfloat16")])
def test_float64_is_refused_where_operands_are_rounded(name):
    call, *arguments = FITTING[name]
    for position, array in enumerate(arguments):
        if array.dtype.kind == "f":
            with pytest.raises((TypeError, ValueError), match="float32"):
                call(*arguments[:position], array.astype("f8"), *arguments[position + 1 :])


def test_a_weight_in_another_layout_is_refused():
    with using("portable"):
        packed = TrainedWeight.of(NARROW)
    with using("avx512"), pytest.raises(RuntimeError, match="packed for the unit that multiplies"):
        bfloat16.forward(SMALL_X, packed)
