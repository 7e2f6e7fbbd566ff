"""Tests of sampling: no cache, thread or other text changes one; and the command."""

import io
import re
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from conftest import SMALL, random_parameters

import daskgpt
from daskgpt import generate
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation import decoder
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import Choice, Texts, shown, window


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(SMALL, np.random.default_rng(5))


def test_seed_determines_the_tokens(parameters):
    first = list(daskgpt.sample(SMALL, parameters, [1, 2], 30, seed=3))
    tokens = daskgpt.sample(SMALL, parameters, np.array([1, 2]), 30, seed=3)
    assert [next(tokens) for _ in range(5)] == first[:5]
    assert list(daskgpt.sample(SMALL, parameters, [1, 2], 30, seed=4)) != first
    assert len(first) == 30  # longer than the positions
    assert list(daskgpt.sample(SMALL, parameters, [4], 0)) == []
    assert all(type(token) is int and 0 <= token < SMALL.vocabulary for token in first)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_cache_changes_no_bit_of_the_scores(parameters, precision):
    weights = Weights(SMALL, parameters, precision)
    texts = Texts(weights, [[3, 1]], threads=2)
    for _ in texts.write(60, Choice()):  # almost four times the positions
        tokens = texts.tokens[0]
        recent = tokens[window(len(tokens), SMALL.positions) :]
        assert len(tokens) <= SMALL.positions or SMALL.positions // 2 < len(recent) <= SMALL.positions
        assert np.array_equal(texts.scores([0]), Texts(weights, [recent], threads=1).scores([0]))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_threads_and_other_texts_change_no_text(parameters, random, precision):
    weights = Weights(SMALL, parameters, precision)
    prompts = [random.integers(0, SMALL.vocabulary, length).tolist() for length in (1, 40, 7, 16, 17, 3, 9, 2, 5)]
    texts, again = (Texts(weights, prompts, threads=threads) for threads in (3, 1))
    assert len(list(texts.write(30, Choice(top_p=0.9), seed=7))) == 30
    for count in (11, 19):  # continued where it was
        assert len(list(again.write(count, Choice(top_p=0.9), seed=7))) == count
    assert again.tokens == texts.tokens
    first = daskgpt.sample(SMALL, parameters, prompts[0], 30, top_p=0.9, seed=7, precision=precision)
    assert texts.tokens[0] == [*prompts[0], *first]
    assert all(len(text) == len(prompt) + 30 for text, prompt in zip(texts.tokens, prompts))
    same = Texts(weights, [prompts[1]] * 3)
    assert len(list(same.write(30, Choice(), seed=7))) == 30
    assert len(set(map(tuple, same.tokens))) == 3  # samples of one prompt are different ones


def test_each_text_ends_separately(parameters):
    texts = Texts(Weights(SMALL, parameters, "float32"), [[1], [2], [3]])
    rows = np.array(list(texts.write(200, Choice(), seed=1, end=7)), object).T
    for row, tokens in zip(rows, texts.tokens):
        written = [token for token in row if token is not None]
        assert written == tokens[1:]
        assert written.index(7) == len(written) - 1 if 7 in written else len(written) == 200
    assert len({len(tokens) for tokens in texts.tokens}) > 1
    assert list(daskgpt.sample(SMALL, parameters, [1], 200, seed=1, end=7)) == texts.tokens[0][1:]


def test_token_frequencies_match_probabilities(random):
    logits = random.normal(size=11).astype(np.float32) * 2
    weights = np.exp(logits.astype(np.float64) / 0.7)
    order = np.argsort(-weights)
    shares = (np.cumsum(weights[chosen]) / weights[chosen].sum() for chosen in (order, order[:4]))
    above, of_four = (1 + np.searchsorted(chosen, 0.8) for chosen in shares)
    cases = {Choice(0.7): 11, Choice(0.7, top_k=4): 4, Choice(1e-60): 1, Choice(1e-30): 1}
    cases |= {Choice(0.7, top_p=0.8): above, Choice(0.7, top_k=4, top_p=0.8): of_four}
    for choice, count in cases.items():
        kept, expected = order[:count], np.zeros(11)
        expected[kept] = weights[kept] / weights[kept].sum()
        draws = np.bincount([choice(logits, random) for _ in range(4000)], minlength=11) / 4000
        assert not draws[expected == 0].any()
        assert np.abs(draws - expected).max() < 5 * 0.5 / np.sqrt(4000)  # five standard deviations


def test_interrupted_reply_can_be_continued(parameters):
    texts = Texts(Weights(SMALL, parameters, "float32"), [[1]], threads=2)
    writing = texts.write(20, Choice(), seed=2)
    assert len([next(writing) for _ in range(5)]) == 5
    writing.close()
    assert len(list(texts.write(15, Choice(), seed=2))) == 15
    assert texts.tokens[0][1:] == list(daskgpt.sample(SMALL, parameters, [1], 20, seed=2))


def test_interrupted_reading_is_done_again(parameters, monkeypatch):
    monkeypatch.setattr(decoder, "MOST_ROWS", 3)
    texts = Texts(Weights(SMALL, parameters, "float32"), [[1, 2, 3, 4, 5]], threads=2)
    step, calls = texts.decoder._step, iter("ab")

    def interrupted(*rows):
        if next(calls) == "b":
            monkeypatch.setattr(texts.decoder, "_step", step)
            raise KeyboardInterrupt
        return step(*rows)

    monkeypatch.setattr(texts.decoder, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(texts.write(5, Choice(), seed=2))
    list(texts.write(5, Choice(), seed=2))
    assert texts.tokens[0][5:] == list(daskgpt.sample(SMALL, parameters, [1, 2, 3, 4, 5], 5, seed=2))


def test_threads_are_those_of_the_decoder_whatever_pool_dask_has(parameters):
    """With fewer threads than shares of a step, which wait for each other, it would never end."""
    with dask.config.set(pool=SimpleNamespace(submit=None, _max_workers=1)):
        assert len(list(daskgpt.sample(SMALL, parameters, [1], 3, threads=2))) == 3


NO_ARGUMENTS = [
    ({"prompt": []}, "prompt must have at least one token"),
    ({"prompt": [1, 29]}, "largest=29, vocabulary=29"),
]
NO_ARGUMENTS += [({"prompt": [-1]}, "least=-1"), ({"top_p": 0}, "top_p=0"), ({"top_p": 1.1}, "top_p=1.1")]
NO_ARGUMENTS += [({"precision": "bfloat"}, "bfloat16?"), ({"threads": -1}, "threads=-1")]
NO_ARGUMENTS += [({"temperature": -1}, "temperature=-1"), ({"count": -1}, "count=-1")]


@pytest.mark.parametrize(("arguments", "told"), NO_ARGUMENTS, ids=str)
def test_bad_sampling_arguments_are_refused(parameters, arguments, told):
    with pytest.raises((ValueError, TypeError), match=re.escape(told)):
        daskgpt.sample(SMALL, parameters, **{"prompt": [1], "count": 1} | arguments)


def test_invalid_model_is_refused(parameters):
    with pytest.raises(ValueError, match=r"ln_f\.bias, which is missing"):
        daskgpt.sample(SMALL, {n: v for n, v in parameters.items() if n != "ln_f.bias"}, [1], 1)
    huge = parameters | {"ln_f.bias": np.full_like(parameters["ln_f.bias"], 3e38)}  # the scores overflow
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="largest=(nan|inf)"):
            list(daskgpt.sample(SMALL, huge, [1], 1, temperature=temperature))
    damaged = parameters["h.0.attn.c_attn.bias"].copy()
    damaged.view(np.uint32)[3] = 0x7FA66666  # 1.3 with another bit: a NaN that `exp` takes for a number
    with pytest.raises(ValueError, match="decoding: every number of h.0.attn.c_attn.bias must be finite"):
        daskgpt.sample(SMALL, parameters | {"h.0.attn.c_attn.bias": damaged}, [1], 1)


CONFIG = daskgpt.ModelConfig(blocks=1, heads=2, channels=16, vocabulary=257, positions=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that writes printable characters and lines."""
    parameters = random_parameters(CONFIG, np.random.default_rng(8))
    parameters["wte.weight"] *= np.float32(0.1)
    parameters["ln_f.bias"] = np.ones(16, np.float32)
    parameters["wte.weight"] += np.where(np.isin(np.arange(257), [*range(97, 123), 10, 32]), 1, -1)[:, None]
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    daskgpt.save(path, CONFIG, parameters, encoding="bytes", sequence_length=32)
    return path


@pytest.fixture
def written(model, capsys):
    """What the command prints on either stream with these flags."""

    def run(*flags):
        generate.main([str(model), *map(str, flags)])
        return capsys.readouterr()

    return run


def test_batch_gives_the_texts_of_single_runs(written):
    arguments = "--tokens", 40, "--seed", 3
    parts = written("--prompt", "abc", "--prompt", "x", "--samples", 2, *arguments).out.split("--- ")[1:]
    names, texts = zip(*(part.split("\n", 1) for part in parts))
    assert names == ("1 of 4", "2 of 4", "3 of 4", "4 of 4")
    assert [text[0] for text in texts] == ["a", "a", "x", "x"]
    assert len(set(texts)) == 4
    for options in ((), ("--threads", 2)):
        alone = written("--prompt", "abc", *arguments, *options)
        assert alone.out == texts[0]
        assert re.search(r"tokens/s \(38 in \d[\d,.]+ ms; ", alone.err)
    assert written("--prompt", "abc", *arguments, "--precision", "bfloat16", "--top-p", 0.5).out != texts[0]


def test_until_ends_a_text(written):
    arguments = "--prompt", "abc", "--tokens", 200, "--seed", 3
    whole = written(*arguments).out
    assert written(*arguments, "--until", whole[60:62]).out == whole[: whole.index(whole[60:62], 3) + 2] + "\n"
    line = written("--prompt", "a\nb", "--tokens", 200, "--until", r"\n").out  # as a shell passes it
    assert line.endswith("\n\n")
    assert line.count("\n") == 3


def test_end_of_text_is_not_shown_and_words_may_span_tokens():
    encoding = get_encoding("bytes")
    assert (end := encoding.eot_token) == 256
    assert list(shown(encoding, [97, 256, 98], end)) == list(shown(encoding, [97, None], end)) == [97]
    assert list(shown(encoding, [97, 256, 98])) == [97, 256, 98]
    assert bytes(shown(encoding, "a né new".encode(), until="né")).decode() == "a né"
    assert list(shown(encoding, [97, 257, 98, 99], until="b")) == [97, 257, 98], "an id beyond the encoding"


def test_chat_continues_one_text(model, written, monkeypatch):
    chat = "-i", "--tokens", 12, "--temperature", 0
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\nxyz\n"))
    said = written(*chat).out
    config, parameters = daskgpt.load(model)
    text, answers = [*b"abc\n"], ""
    for line in (b"", b"", b"xyz\n"):
        text += line
        answer = list(daskgpt.sample(config, parameters, text, 12, temperature=0))
        text += answer
        answers += bytes(answer).decode() + "\n"
    assert said == answers + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert written(*chat).out == "\n"


@pytest.mark.parametrize("flags", [["--prompt", "a"], ["--samples", 2]])
def test_a_chat_takes_no_prompts(flags, written):
    with pytest.raises(ValueError, match=f"-i takes one prompt after the other.*{flags[0][2:]}=.*Leave out"):
        written("-i", *flags)
