"""Tokens from a model in Python."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import SMALL, random_parameters

import daskgpt


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(SMALL, np.random.default_rng(5))


def test_the_likeliest_token_is_that_of_the_logits(parameters, random):
    import dask.array as da

    prompt = random.integers(0, SMALL.vocabulary, 7).tolist()
    (token,) = daskgpt.sample(SMALL, parameters, prompt, 1, temperature=0)
    losses = []
    for candidate in range(SMALL.vocabulary):  # the loss of the last token alone, by difference of two means
        tokens = np.array([prompt], np.int32)
        targets = np.array([[*prompt[1:], candidate]], np.int32)
        loss, _ = daskgpt.loss_and_gradients(SMALL, parameters, da.from_array(tokens), da.from_array(targets))
        losses.append(float(loss.compute(scheduler="sync")))
    assert token == int(np.argmin(losses))


def test_a_seed_gives_the_same_tokens_whatever_was_read_of_them(parameters):
    first = list(daskgpt.sample(SMALL, parameters, [1, 2], 30, seed=3))
    tokens = daskgpt.sample(SMALL, parameters, np.array([1, 2]), 30, seed=3)
    assert [next(tokens) for _ in range(5)] == first[:5]
    tokens.close()
    assert list(daskgpt.sample(SMALL, parameters, [1, 2], 30, seed=4)) != first
    assert len(first) == 30  # longer than the positions
    assert all(type(token) is int and 0 <= token < SMALL.vocabulary for token in first)


def test_one_likeliest_token_leaves_no_choice(parameters):
    greedy = list(daskgpt.sample(SMALL, parameters, [4], 12, temperature=0))
    assert list(daskgpt.sample(SMALL, parameters, [4], 12, top_k=1, seed=9)) == greedy
    assert list(daskgpt.sample(SMALL, parameters, [4], 0)) == []


def test_a_model_that_was_saved_says_the_same(parameters, tmp_path):
    for name in ("model.safetensors", "model.bin"):
        daskgpt.save(tmp_path / name, SMALL, parameters)
        config, loaded = daskgpt.load(tmp_path / name)
        assert config == SMALL
        assert list(daskgpt.sample(config, loaded, [7], 10)) == list(daskgpt.sample(SMALL, parameters, [7], 10))


def test_threads_of_blas_are_given_back(parameters):
    from threadpoolctl import threadpool_info

    before = threadpool_info()
    tokens = daskgpt.sample(SMALL, parameters, [1], 3)
    next(tokens)
    tokens.close()
    assert threadpool_info() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "sample: the prompt must have a token; got prompt=[]. Give some text."),
        (
            {"prompt": [1, 29]},
            "sample: tokens must lie in the vocabulary; got least=1, largest=29, vocabulary=29. "
            "Use the encoding that the model was trained with.",
        ),
        ({"temperature": -1}, "sample: temperature must not be negative; got temperature=-1. Give 0 or more."),
        ({"count": -1}, "sample: count must not be negative; got count=-1. Give 0 or more."),
        ({"prompt": "text"}, "sample: the prompt must be token ids; got prompt=str. "),
    ],
)
def test_what_cannot_be_sampled_is_refused_at_once(parameters, arguments, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        daskgpt.sample(SMALL, parameters, **{"prompt": [1], "count": 1} | arguments)
    with pytest.raises(ValueError, match=r"^check_parameters: .* ln_f\.bias, which is missing"):
        daskgpt.sample(SMALL, {n: v for n, v in parameters.items() if n != "ln_f.bias"}, [1], 1)
