"""Dropout: masks that follow from seed, step and place alone, the mean kept, gradients, and off outside of training."""

from __future__ import annotations

import json
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
import reference_gpt2
from command_lines import refused, run, write_text
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from one_number import MODELS, Dials, bits_after_steps
from product_cases import UNITS, exact, using
from reference_dropout import factors, of_batch
from reference_gpt2 import expected
from small_runs import FLAGS, fit, losses_of, stopping_at, tensors_of
from test_one_number import needs_own_product
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels import attention
from daskgpt.kernels.bfloat16 import rounded_attention
from daskgpt.kernels.dropout import dropped
from daskgpt.kernels.philox import streams, words
from daskgpt.model.gpt2 import lazy_inputs, mean_loss
from daskgpt.model.layers import DROPOUT
from daskgpt.model.tape import Tape
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inputs import Moment
from daskgpt.training.step import TrainingStep, gradients_of

RATES = (0.1, 0.5, 0.9)
MODEL = MODELS["odd with dropout"]
TORCH = json.loads((GOLDEN / "training.json").read_text())["dropout"]


@pytest.mark.parametrize(
    ("counter", "key", "found"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_those_of_the_generator_s_authors(counter, key, found):
    """The known answers of Random123."""
    assert words(counter, key) == found


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
@pytest.mark.parametrize("step", [0, 3, 2**32 + 1])
def test_what_is_dropped_is_what_an_independent_program_drops(seed, step):
    """Tokens from the middle of a sequence, and channels that are no multiple of anything."""
    x = np.ones((3, 5, 21))
    found = dropped(x, streams(seed, step, 3), np.arange(4, 9, dtype=np.int32), 6, 0.3)
    for sequence in range(3):
        np.testing.assert_array_equal(found[sequence], factors(seed, step, sequence, 6, 0, 9, 21, 0.3)[4:])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_is_kept(rate, dtype):
    x = np.ones((8, 64, 256), dtype)
    y = dropped(x, streams(1, 2, 8), np.arange(64, dtype=np.int32), 3, rate)
    assert set(np.unique(y)) == {0, np.dtype(dtype).type(1 / (1 - rate))}
    assert y.dtype == dtype
    deviation = (rate / (1 - rate) / x.size) ** 0.5
    assert abs(y.mean(dtype=np.float64) - 1) < 4 * deviation
    for axis in range(3):  # no sequence, token or channel is treated otherwise than others
        others = tuple({0, 1, 2} - {axis})
        assert np.abs(y.mean(others, dtype=np.float64) - 1).max() < 5 * deviation * x.shape[axis] ** 0.5


@pytest.mark.parametrize("rate", TORCH)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_kept_is_scaled_as_torch_scales_it(rate, dtype):
    """Forward and backward, and of a probability: of the one token that a sequence of one token can look at."""
    golden, keys = TORCH[rate][dtype], streams(1, 2, 500)

    def the_other(values):
        zero, other = np.unique(values)
        assert zero == 0
        return other

    tape, ones = Tape(), da.ones((500, 1, 8), dtype, chunks=-1)
    key, positions = (da.from_array(each, chunks=-1) for each in (keys, np.zeros(1, "int32")))
    y = tape("here.0", DROPOUT, ones, key, positions, place=3, rate=float(rate))
    found, gradient = dask.compute(y, tape.backward(y, da.ones((500, 1, 8), dtype, chunks=-1))[ones.name])
    assert the_other(found) == pytest.approx(golden["value"], rel=1e-6)
    assert the_other(gradient) == pytest.approx(golden["gradient"], rel=1e-6)
    for kernels in (attention, rounded_attention) if dtype == "float32" else (attention,):
        attended, _ = kernels.forward_dropped(np.ones((500, 1, 12), dtype), keys, 2, 1, float(rate))
        assert the_other(attended) == pytest.approx(golden["attention"], rel=1e-6)


def test_every_part_of_the_key_makes_another_mask():
    rate, x, tokens = 0.5, np.ones((2, 32, 64)), np.arange(32, dtype=np.int32)
    one = dropped(x, streams(1, 2, 2), tokens, 3, rate)
    others = [
        dropped(x, streams(0, 2, 2), tokens, 3, rate),
        dropped(x, streams(1, 3, 2), tokens, 3, rate),
        dropped(x, streams(1, 2, 2)[::-1], tokens, 3, rate),
        dropped(x, streams(1, 2, 2), tokens + 32, 3, rate),
        dropped(x, streams(1, 2, 2), tokens, 4, rate),
        np.roll(one, 1, -1),
        np.roll(one, 4, -1),
    ]
    for other in others:
        assert abs(((one > 0) == (other > 0)).mean() - 0.5) < 4 * (0.25 / x.size) ** 0.5
    np.testing.assert_array_equal(one, dropped(x, streams(1, 2, 2), tokens, 3, rate))


def attention_case(tokens, channels, heads, rate):
    """qkv, dy, streams of two sequences, and the factors of the probabilities."""
    random = np.random.default_rng(tokens)
    qkv = random.normal(size=(2, tokens, 3 * channels)).astype(np.float32)
    dy = random.normal(size=(2, tokens, channels)).astype(np.float32)
    masks = [[factors(3, 4, s, 7, head, tokens, tokens, rate) for head in range(heads)] for s in range(2)]
    return qkv, dy, streams(3, 4, 2), np.array(masks)


@pytest.mark.parametrize("tokens", [1, 5, 33, 130])
@pytest.mark.parametrize(("channels", "heads"), [(6, 1), (48, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probabilities_are_dropped_as_an_independent_program_does(tokens, channels, heads, dtype):
    qkv, dy, keys, masks = attention_case(tokens, channels, heads, 0.3)
    y, kept = reference_gpt2.attention(qkv.astype("f8"), heads, masks)
    qkv_own, dy_own = qkv.astype(dtype), dy.astype(dtype)
    found, logsumexp = attention.forward_dropped(qkv_own, keys, heads, 7, 0.3)
    np.testing.assert_allclose(found, y, **TOLERANCES[f"kernel {dtype}"])
    np.testing.assert_array_equal(logsumexp, attention.forward(qkv_own, heads)[1])
    gradient = attention.backward_dropped(dy_own, qkv_own, found, logsumexp, keys, heads, 7, 0.3)
    wanted = reference_gpt2.attention_backward(dy.astype("f8"), kept)
    np.testing.assert_allclose(gradient, wanted, **TOLERANCES[f"kernel {dtype}"])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("tokens", [1, 5, 33, 130])
@pytest.mark.parametrize(("channels", "heads"), [(6, 1), (48, 3), (160, 2)])
def test_bfloat16_drops_the_same_probabilities(unit, tokens, channels, heads):
    qkv, dy, keys, masks = attention_case(tokens, channels, heads, 0.3)
    with using(unit):
        found, logsumexp = rounded_attention.forward_dropped(qkv, keys, heads, 7, 0.3)
        gradient = rounded_attention.backward_dropped(dy, qkv, found, logsumexp, keys, heads, 7, 0.3)
    y, kept = reference_gpt2.attention(exact(qkv), heads, masks)
    for own, wanted in ((found, y), (gradient, reference_gpt2.attention_backward(exact(dy), kept))):
        largest = np.abs(wanted).max() or 1
        np.testing.assert_allclose(own / largest, wanted / largest, **TOLERANCES["bfloat16 attention"])


def test_attention_refuses_streams_that_do_not_fit():
    for kernels, name in ((attention, "attention"), (rounded_attention, "rounded_attention")):
        with pytest.raises(ValueError) as error:
            kernels.forward_dropped(np.ones((2, 3, 12), "f4"), streams(0, 0, 3), 2, 1, 0.1)
        assert str(error.value) == (
            f"{name}.forward_dropped: streams must have shape (2,); got shape=(3,). Check the order of the arguments."
        )


DIALS = [
    Dials((1, 20)),
    Dials((3, 10), grain="kernel"),
    Dials((2, 5), grain="segment", scheduler="threads", threads=2),
    Dials((6, 4), grain="chunk", scheduler="threads", threads=5),
    Dials((1, 1), barrier="layer"),
    Dials((2, 10), barrier="phase", scheduler="threads", threads=2),
    Dials((3, 20), barrier="none", scheduler="threads", threads=2),
    Dials((2, 20), in_place=False),
    Dials((1, 10), in_place=False, parts=2),
    Dials((1, 20), in_place=False, parts=3, barrier="phase"),
    Dials((1, 20), accumulate=3),
    Dials((1, 5), accumulate=2, in_place=False, parts=2, barrier="layer"),
]


@pytest.fixture(scope="module")
def bits():
    return bits_after_steps(MODEL, "float32", Dials(MODEL.batch))


@needs_own_product
@pytest.mark.parametrize("dials", DIALS, ids=str)
def test_no_dial_changes_a_bit(dials, bits):
    assert bits_after_steps(MODEL, "float32", dials) == bits


@needs_own_product
def test_no_dial_changes_a_bit_in_bfloat16():
    found = {bits_after_steps(MODEL, "bfloat16", dials) for dials in (Dials(MODEL.batch), *DIALS[1:12:3])}
    assert len(found) == 1


@pytest.mark.slow
@needs_own_product
def test_workers_drop_the_same(bits):
    assert bits_after_steps(MODEL, "float32", Dials((1, 10), scheduler="local", threads=2)) == bits


def test_without_dropout_a_step_has_no_more_tasks_and_inputs():
    step = TrainingStep(SMALL, (4, 12), (2, 12), OptimizerConfig(), grain="kernel")
    assert "streams" not in step.recorded.inputs
    assert not any("dropout" in key[0] for key in step.recorded.unmerged)
    assert bits_after_steps(replace(MODEL, dropout=0.0), "float32", Dials(MODEL.batch)) == bits_after_steps(
        MODELS["odd in 2 groups"], "float32", Dials((1, 20))
    )


def lazy_loss(parameters, batch, rate, chunk, step=5):
    tape = Tape()
    lazy = {name: da.from_array(value, chunks=-1) for name, value in parameters.items()}
    tokens, targets = (da.from_array(part, chunks=chunk) for part in batch)
    keys = da.from_array(streams(11, step, len(batch[0])), chunks=chunk[0])
    loss = mean_loss(tape, SMALL, lazy, {**lazy_inputs(tape, tokens, targets), "streams": keys}, rate)
    return loss, gradients_of(tape, lazy, loss)


@pytest.mark.parametrize("chunk", [(4, 12), (1, 4)], ids=str)
def test_loss_and_gradients_are_those_of_an_independent_program(random, chunk):
    parameters, batch = random_parameters(SMALL, random, "float64"), random_batch(SMALL, random)
    masks = of_batch(11, 5, (4, 12), SMALL.blocks, SMALL.channels, SMALL.heads, 0.3)
    wanted = expected(parameters, *batch, SMALL.heads, SMALL.vocabulary, masks)
    loss, gradients = dask.compute(*lazy_loss(parameters, batch, 0.3, chunk), scheduler="sync")
    tolerance = TOLERANCES["whole model, float64"]["of largest"]
    assert abs(loss - wanted.loss) < tolerance * wanted.loss
    for name, gradient in gradients.items():
        largest = np.abs(wanted.gradients[name]).max()
        np.testing.assert_allclose(gradient, wanted.gradients[name], rtol=0, atol=tolerance * largest, err_msg=name)


def test_the_gradient_agrees_with_a_numeric_derivative_in_a_random_direction(random):
    parameters, batch = random_parameters(SMALL, random, "float64"), random_batch(SMALL, random)
    direction = {name: random.normal(size=value.shape) for name, value in parameters.items()}

    def at(distance):
        moved = {name: value + distance * direction[name] for name, value in parameters.items()}
        return lazy_loss(moved, batch, 0.4, (2, 4))

    numeric = (at(1e-6)[0] - at(-1e-6)[0]).compute(scheduler="sync") / 2e-6
    (gradients,) = dask.compute(at(0.0)[1], scheduler="sync")
    exact = sum((gradients[name] * direction[name]).sum() for name in parameters)
    assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


def test_a_step_drops_by_its_number_and_the_run_s_seed(random):
    """So a step that is made again, after a loss or a resume, is the same step."""
    parameters, batch = random_parameters(SMALL, random), random_batch(SMALL, random)

    def loss_of(seed, number):
        step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(dropout=0.3), seed=seed)
        with open_scheduler("sync", 1) as scheduler:
            return step(scheduler, step.initial(parameters, step=number), *batch, 10)[0]

    losses = [loss_of(0, 3), loss_of(0, 4), loss_of(1, 3)]
    assert len(set(losses)) == 3
    assert loss_of(0, 3) == losses[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


DROPPING = OptimizerConfig(dropout=0.2, warmup=3)


def test_stopped_and_resumed_is_the_run_that_was_not_stopped(text, tmp_path):
    fit(text, tmp_path / "whole", optimizer=DROPPING)
    fit(text, tmp_path / "run", optimizer=DROPPING, on_step=stopping_at(7), dataflow={"batch_chunk": 1})
    daskgpt.fit(resume=tmp_path / "run", dataflow={"barrier": "none"}, quiet=True)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")


def test_a_model_is_measured_without_it(text, tmp_path):
    """Nothing is learned here: what differs is what is dropped."""
    still = {"learning_rate": 0, "final_learning_rate": 0}
    plain, other = (
        fit(text, tmp_path / str(rate), optimizer=OptimizerConfig(dropout=rate, warmup=3, **still), steps=4)
        for rate in (0.0, 0.3)
    )
    assert plain.validation_loss == other.validation_loss
    assert not set(plain.losses) & set(other.losses)


def test_replicas_drop_what_one_model_would(text):
    """Nothing is learned, so that the mean of the replicas' losses is the loss of all sequences."""
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16, groups=1)
    optimizer = OptimizerConfig(learning_rate=0, final_learning_rate=0, dropout=0.3, warmup=3)
    found = [
        daskgpt.fit(
            SMALL_TEXT, data, optimizer, {"scheduler": scheduler, "threads": 2}, RUN, local=local, quiet=True
        ).losses
        for scheduler, local in (
            ("sync", None),
            ("sync", {"local_steps": 3, "replicas": 2}),
            ("threads", {"local_steps": 3, "replicas": 2}),
        )
    ]
    np.testing.assert_allclose(found[1], found[0], **TOLERANCES["chunkings"])
    assert found[1] == found[2]


SMALL_TEXT = replace(SMALL, vocabulary=257, padded_vocabulary=257)
RUN = {"steps": 5, "validation_batches": 1, "sample_tokens": 0}


def test_sequences_take_their_keys_with_them():
    tokens = np.arange(8, dtype=np.int32).reshape(4, 2)
    part = Moment(tokens, None, np.zeros(3), streams(0, 1, 4)).of(2, 4)
    np.testing.assert_array_equal(part.tokens, tokens[2:])
    np.testing.assert_array_equal(part.streams, streams(0, 1, 4)[2:])
    assert part.targets is None
    assert len(part.hyper) == 3


def test_shapes_that_do_not_fit_are_refused():
    x, tokens = np.ones((2, 3, 4)), np.arange(3, dtype=np.int32)
    for keys, positions, name, shape in (
        (streams(0, 0, 3), tokens, "streams", (2,)),
        (streams(0, 0, 2), tokens[1:], "positions", (3,)),
    ):
        got = keys.shape if name == "streams" else positions.shape
        with pytest.raises(ValueError) as error:
            dropped(x, keys, positions, 0, 0.1)
        assert str(error.value) == (
            f"dropout.dropped: {name} must have shape {shape}; got shape={got}. Check the order of the arguments."
        )


def test_the_flag(text):
    for rate in ("1", "-0.1"):
        assert "dropout must lie in [0, 1)" in refused(run("train", "--data", text, "--dropout", rate))
    shown = run("train", *FLAGS.split(), "--data", text, "--dropout", "0.1", "--steps", 2)
    assert shown.returncode == 0, shown.stderr
