"""Arrays whose shapes do not fit are refused before a kernel reads past their ends."""

from __future__ import annotations

import numpy as np
import pytest

from daskgpt.kernels import add, crossentropy, embedding, gelu, layernorm, linear

X, DY = np.ones((2, 5, 8)), np.ones((2, 5, 6))
TOKENS, POSITIONS = np.zeros((2, 5), "i4"), np.zeros(5, "i4")
TABLE, LOGITS, LOSSES = np.ones((9, 8)), np.ones((2, 5, 9)), np.ones((2, 5))


def sum_of(kernel, *arguments, shape):
    return lambda: kernel(*arguments, total=np.empty(shape), accumulate=False)


REFUSED = [
    (lambda: add.forward(X, X[:1]), "add.forward: y must have shape (2, 5, 8); got shape=(1, 5, 8)."),
    (lambda: gelu.backward(X[:1], X), "gelu.backward: dy must have shape (2, 5, 8); got shape=(1, 5, 8)."),
    (lambda: linear.forward(X, DY[0], X[0, 0]), "linear.forward: weight must have shape (5, 8); got shape=(5, 6)."),
    (lambda: linear.forward(X, TABLE, X[0, 0]), "linear.forward: bias must have shape (9,); got shape=(8,)."),
    (
        lambda: linear.forward_without_bias(DY, TABLE),
        "linear.forward_without_bias: weight must have shape (9, 6); got shape=(9, 8).",
    ),
    (lambda: linear.backward_x(DY, TABLE), "linear.backward_x: weight must have shape (6, 8); got shape=(9, 8)."),
    (
        sum_of(linear.backward_weight, DY[:1], X, shape=(6, 8)),
        "linear.backward_weight: dy must have shape (2, 5, 6); got shape=(1, 5, 6).",
    ),
    (
        sum_of(linear.backward_weight, DY, X, shape=(6, 7)),
        "linear.backward_weight: total must have shape (6, 8); got shape=(6, 7).",
    ),
    (sum_of(linear.backward_bias, DY, shape=(8,)), "linear.backward_bias: total must have shape (6,); got shape=(8,)."),
    (
        lambda: layernorm.forward(X, X[0, 0, 1:], X[0, 0]),
        "layernorm.forward: weight must have shape (8,); got shape=(7,).",
    ),
    (
        lambda: layernorm.forward(X, X[0, 0], X[0, 0, 1:]),
        "layernorm.forward: bias must have shape (8,); got shape=(7,).",
    ),
    (
        lambda: layernorm.backward_x(DY, X, X[0, 0]),
        "layernorm.backward_x: dy must have shape (2, 5, 8); got shape=(2, 5, 6).",
    ),
    (
        lambda: layernorm.backward_x(X, X, X[0, 0, 1:]),
        "layernorm.backward_x: weight must have shape (8,); got shape=(7,).",
    ),
    (
        sum_of(layernorm.backward_weight, DY, X, shape=(8,)),
        "layernorm.backward_weight: dy must have shape (2, 5, 8); got shape=(2, 5, 6).",
    ),
    (
        lambda: embedding.forward(TOKENS, TABLE, POSITIONS[1:], TABLE),
        "embedding.forward: positions must have shape (5,); got shape=(4,).",
    ),
    (
        lambda: embedding.forward(TOKENS, TABLE, POSITIONS, TABLE[:, 1:]),
        "embedding.forward: wpe must have shape (9, 8); got shape=(9, 7).",
    ),
    (
        sum_of(embedding.backward_wte, X, TOKENS[:1], shape=(9, 8)),
        "embedding.backward_wte: tokens must have shape (2, 5); got shape=(1, 5).",
    ),
    (
        sum_of(embedding.backward_wpe, X, POSITIONS[1:], shape=(9, 8)),
        "embedding.backward_wpe: positions must have shape (5,); got shape=(4,).",
    ),
    (
        lambda: crossentropy.forward(X, TABLE[:, 1:], TOKENS, 9),
        "crossentropy.forward: wte must have shape (9, 8); got shape=(9, 7).",
    ),
    (
        lambda: crossentropy.forward(X, TABLE, TOKENS[:1], 9),
        "crossentropy.forward: targets must have shape (2, 5); got shape=(1, 5).",
    ),
    (
        lambda: crossentropy.backward_x(LOSSES[:1], LOGITS, TABLE),
        "crossentropy.backward_x: dy must have shape (2, 5); got shape=(1, 5).",
    ),
    (
        lambda: crossentropy.backward_x(LOSSES, LOGITS, TABLE[1:]),
        "crossentropy.backward_x: wte must have shape (9, 8); got shape=(8, 8).",
    ),
    (
        sum_of(crossentropy.backward_wte, LOSSES[:1], LOGITS, X, shape=(9, 8)),
        "crossentropy.backward_wte: dy must have shape (2, 5); got shape=(1, 5).",
    ),
    (
        sum_of(crossentropy.backward_wte, LOSSES, LOGITS, X[:1], shape=(9, 8)),
        "crossentropy.backward_wte: x must have shape (2, 5, 8); got shape=(1, 5, 8).",
    ),
    (
        sum_of(crossentropy.mean_forward, LOSSES, 10, shape=(1,)),
        "crossentropy.mean_forward: total must have shape (); got shape=(1,).",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message.split(";")[0] for _, message in REFUSED])
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == f"{message} Check the order of the arguments."


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("name", ["tokens", "positions"])
def test_an_index_outside_of_its_table_is_refused(name, bad):
    indices = {"tokens": TOKENS.copy(), "positions": POSITIONS.copy()}
    indices[name][..., -1] = bad
    with pytest.raises(ValueError) as error:
        embedding.forward(indices["tokens"], TABLE, indices["positions"], TABLE)
    assert str(error.value) == (
        f"embedding.forward: {name} must be from 0 to 8; got {name}={bad}. "
        "Check the vocabulary and the sequence length."
    )


def test_indices_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="index arrays int32; got dtypes=int64. Convert them first."):
        embedding.forward(TOKENS.astype("i8"), TABLE, POSITIONS, TABLE)
