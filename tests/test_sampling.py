"""Tokens from a model in Python."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from numpy.testing import assert_allclose
from tolerances import TOLERANCES

import daskgpt
from daskgpt.generation.choosing import Choice
from daskgpt.generation.decoder import Decoder, Weights
from daskgpt.generation.sampling import Texts, window
from daskgpt.training.inference import Inference
from daskgpt.training.step import State


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


def test_no_more_is_kept_of_a_text_than_the_model_has_positions(parameters):
    with pytest.raises(ValueError, match=f"as many positions as are kept; got capacity={SMALL.positions + 1}"):
        Decoder(Weights(SMALL, parameters, "float32"), 1, SMALL.positions + 1)


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


def logits_of(parameters, tokens, config=SMALL):
    """Scores after the last token, from the layers that training has, which keep nothing."""
    state, shape = State.of_weights(config, parameters), (1, len(tokens))
    inference = Inference(config, shape, shape, state.layout, ("logits",), grain="chunk")
    with daskgpt.open_scheduler("sync") as scheduler:
        found = inference(scheduler, state, np.array([tokens], np.int32))
    return found["logits"][0, -1, : config.vocabulary]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_scores_are_those_of_training(norm, random):
    for heads, channels in ((3, 30), (2, 16), (1, 48), (5, 320)):
        config = daskgpt.GPT2Config(
            blocks=2, heads=heads, channels=channels, vocabulary=37, padded_vocabulary=40, positions=90, norm=norm
        )
        parameters = random_parameters(config, random)
        tokens = random.integers(0, 37, 80).tolist()
        (found,) = Texts(Weights(config, parameters, "float32"), [tokens]).scores([0])
        expected = logits_of(parameters, tokens, config)
        assert_allclose(found / abs(expected).max(), expected / abs(expected).max(), **TOLERANCES["kept, float32"])
        (rounded,) = Texts(Weights(config, parameters, "bfloat16"), [tokens]).scores([0])
        assert_allclose(rounded / abs(expected).max(), expected / abs(expected).max(), **TOLERANCES["kept, bfloat16"])
        assert not np.array_equal(rounded, found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_kept_changes_no_bit_of_the_scores_also_beyond_the_context(parameters, precision):
    weights = Weights(SMALL, parameters, precision)
    texts = Texts(weights, [[3, 1]], threads=2)
    for _ in texts.write(60, Choice()):  # almost four times the positions
        tokens = texts.tokens[0]
        recent = tokens[window(len(tokens), SMALL.positions) :]
        assert len(tokens) <= SMALL.positions or SMALL.positions // 2 < len(recent) <= SMALL.positions
        anew = Texts(weights, [recent], threads=1).scores([0])
        assert np.array_equal(texts.scores([0]), anew)


def test_the_text_is_that_of_a_program_that_keeps_nothing(parameters):
    tokens = [5]
    for token in daskgpt.sample(SMALL, parameters, [5], 50, temperature=0):
        recent = tokens[window(len(tokens), SMALL.positions) :]
        assert token == int(logits_of(parameters, recent).argmax())
        tokens.append(token)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_neither_threads_nor_other_texts_change_a_text(parameters, random, precision):
    weights = Weights(SMALL, parameters, precision)
    prompts = [random.integers(0, SMALL.vocabulary, length).tolist() for length in (1, 40, 7, 16, 17, 3, 9, 2, 5)]
    texts = Texts(weights, prompts, threads=3)
    for _ in texts.write(30, Choice(top_p=0.9), seed=7):
        pass
    again = Texts(weights, prompts, threads=1)
    for count in (11, 19):  # gone on with where it was
        for _ in again.write(count, Choice(top_p=0.9), seed=7):
            pass
    assert again.tokens == texts.tokens
    first = daskgpt.sample(SMALL, parameters, prompts[0], 30, top_p=0.9, seed=7, precision=precision)
    assert texts.tokens[0] == [*prompts[0], *first]
    assert all(len(text) == len(prompt) + 30 for text, prompt in zip(texts.tokens, prompts))
    same = Texts(weights, [prompts[1]] * 3)
    for _ in same.write(30, Choice(), seed=7):
        pass
    assert len(set(map(tuple, same.tokens))) == 3  # samples of one prompt are different ones


def test_a_text_ends_at_its_end_and_others_go_on(parameters):
    texts = Texts(Weights(SMALL, parameters, "float32"), [[1], [2], [3]])
    found = np.array(list(texts.write(200, Choice(), seed=1, end=7)), object).T
    for row, tokens in zip(found, texts.tokens):
        written = [token for token in row if token is not None]
        assert written == tokens[1:]
        assert written.index(7) == len(written) - 1 if 7 in written else len(written) == 200
    assert len({len(tokens) for tokens in texts.tokens}) > 1
    assert list(daskgpt.sample(SMALL, parameters, [1], 200, seed=1, end=7)) == texts.tokens[0][1:]


def test_tokens_are_drawn_as_often_as_they_are_likely(random):
    logits = random.normal(size=11).astype(np.float32) * 2
    weights = np.exp(logits.astype(np.float64) / 0.7)
    order = np.argsort(-weights)
    cases = {
        Choice(0.7): order,
        Choice(0.7, top_k=4): order[:4],
        Choice(0.7, top_p=0.8): order[: 1 + np.searchsorted(np.cumsum(weights[order]) / weights.sum(), 0.8)],
        Choice(0.7, top_k=4, top_p=0.8): order[
            : 1 + np.searchsorted(np.cumsum(weights[order[:4]]) / weights[order[:4]].sum(), 0.8)
        ],
        Choice(1e-60): order[:1],
        Choice(1e-30): order[:1],
    }
    for choice, kept in cases.items():
        expected = np.zeros(11)
        expected[kept] = weights[kept] / weights[kept].sum()
        draws = np.bincount([choice(logits, random) for _ in range(4000)], minlength=11) / 4000
        assert not draws[expected == 0].any()
        assert np.abs(draws - expected).max() < 5 * 0.5 / np.sqrt(4000)  # five standard deviations


def test_an_interrupted_answer_leaves_a_text_that_goes_on(parameters):
    texts = Texts(Weights(SMALL, parameters, "float32"), [[1]], threads=2)
    writing = texts.write(20, Choice(), seed=2)
    for _ in range(5):
        next(writing)
    writing.close()
    for _ in texts.write(15, Choice(), seed=2):
        pass
    assert texts.tokens[0][1:] == list(daskgpt.sample(SMALL, parameters, [1], 20, seed=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "sample: the prompt must have a token; got prompt=[]. Give some text."),
        (
            {"prompt": [1, 29]},
            "sample: tokens must lie in the vocabulary; got least=1, largest=29, vocabulary=29. "
            "Use the encoding that the model was trained with.",
        ),
        ({"top_p": 0}, "sample: top_p must lie above 0 and be at most 1; got top_p=0. Give 1 for all."),
        ({"precision": "bfloat"}, "sample: the precision must be known; got precision=bfloat. Did you mean bfloat16?"),
        ({"threads": -1}, "sample: threads must not be negative; got threads=-1. Give 0 or more."),
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


def test_a_model_whose_scores_are_no_numbers_is_refused(parameters):
    broken = parameters | {"ln_f.bias": np.full_like(parameters["ln_f.bias"], np.nan)}
    for temperature in (0, 1):
        with pytest.raises(ValueError, match=r"^sample: a model's scores must be finite; got largest=nan\. "):
            list(daskgpt.sample(SMALL, broken, [1], 1, temperature=temperature))
