"""Tests of the whole model: golden values with any scheduler and chunk, padded rows, and digests."""

import json
from itertools import cycle

import dask
import dask.array as da
import numpy as np
import pytest
from batch_results import results_of
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from product_cases import UNITS, multiplying
from reference_dropout import of_batch
from reference_gpt2 import expected
from steps import run_step, state_of, step_of
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels.dropout import streams
from daskgpt.model import layers
from daskgpt.model.precision import FLOAT32, FLOAT64, precision_of
from daskgpt.model.step import gradients_of, input_values
from daskgpt.model.tape import Tape
from daskgpt.model.transformer import lazy_inputs, mean_loss
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.inference import loss_and_gradients


def lazy_batch(batch, chunk):
    return tuple(da.from_array(array, chunks=chunk) for array in batch)


# Chunks and schedulers change no bit (`test_one_number.py`), so each precision has one of them.
CUTS = [((4, 32), "sync"), ((1, 8), "threads"), ((2, 16), "threads")]


@pytest.mark.parametrize(("precision", "cut"), list(zip(["float32", "float64", *UNITS], cycle(CUTS))))
def test_golden_logits_loss_and_gradients(precision, cut, golden_model, golden_state):
    chunk, scheduler = cut
    config, parameters = golden_model
    batch = golden_state.tokens, golden_state.targets
    with multiplying(precision) as name, open_scheduler(scheduler, 2) as opened:
        results = results_of(opened, config, parameters, batch, chunk, precision_of(name))
    logits = results["logits"][..., : config.vocabulary]
    pairs = {"logits": (logits, golden_state.logits), "loss": (results["loss"], np.array(golden_state.loss))}
    pairs |= {tensor: (results[tensor], gradient) for tensor, gradient in golden_state.gradients.items()}
    assert pairs.keys() == results.keys()
    largest = TOLERANCES[f"golden state, {name}"]["of largest"]
    for tensor, (values, reference) in pairs.items():
        error = np.abs(values - reference.astype(np.float64)).max()
        assert error <= largest * np.abs(reference).max(), tensor


EXPECTED = json.loads((GOLDEN / "gpt2_small.json").read_text())
MUON = {f"muon_{name}": EXPECTED["muon"][name] for name in ("beta", "scale")} | {"optimizer": "muon"}


TEN_STEPS = [({"decay": "all"}, FLOAT32, "losses_decay_all", "golden losses")]
TEN_STEPS += [({"decay": "matrices"}, FLOAT32, "losses_decay_2d", "golden losses")]
TEN_STEPS += [(MUON, FLOAT64, "losses_muon", "golden losses, float64"), (MUON, FLOAT32, "losses_muon", "golden losses")]


@pytest.mark.parametrize(("options", "precision", "losses", "tolerance"), TEN_STEPS, ids=str)
def test_golden_losses_of_ten_steps(options, precision, losses, tolerance, golden_model, golden_state):
    """AdamW's and Muon's (for the matrices of the blocks) beside those of PyTorch."""
    config, parameters = golden_model
    optimizer = OptimizerConfig(schedule="constant", **EXPECTED["adamw"] | options)
    step, told = step_of(config, (4, 32), (2, 16), optimizer, precision), []
    state = state_of(step, parameters)
    with open_scheduler("threads", 2) as scheduler:
        for _ in range(10):
            outcome, state = run_step(scheduler, step, state, (golden_state.tokens, golden_state.targets), 10)
            told.append(outcome.loss)
    np.testing.assert_allclose(told, EXPECTED[losses], **TOLERANCES[tolerance])


@pytest.mark.parametrize(("rate", "chunk"), [(0, (4, 12)), (0.3, (1, 4))], ids=str)
def test_loss_and_gradients_match_an_independent_program(random, chunk, rate):
    """Of some targets alone, without dropout and with it."""
    parameters, (tokens, targets) = random_parameters(SMALL, random, "float64"), random_batch(SMALL, random)
    counted = random.random(tokens.shape) < 0.4
    counted[2] = False  # a sequence without any
    masks = of_batch(11, 5, (4, 12), SMALL.blocks, SMALL.channels, SMALL.heads, rate) if rate else None
    wanted = expected(parameters, tokens, targets, SMALL.heads, SMALL.vocabulary, masks, counted)
    tape, shares = Tape(), input_values(tokens, targets, counted * (counted.size / counted.sum()))["shares"]
    lazy = {name: da.from_array(value, chunks=-1) for name, value in parameters.items()}
    inputs = lazy_inputs(tape, *lazy_batch((tokens, targets), chunk)) | {"shares": da.from_array(shares, chunks=chunk)}
    inputs |= {"streams": da.from_array(streams(11, 5, 4), chunks=chunk[0])} if rate else {}
    lazy_loss = mean_loss(tape, SMALL, lazy, inputs, rate)
    loss, gradients = dask.compute(lazy_loss, gradients_of(tape, SMALL, lazy, lazy_loss), scheduler="sync")
    tolerance = TOLERANCES["whole model, float64"]["of largest"]
    assert abs(loss - wanted.loss) < tolerance * wanted.loss
    for name, gradient in gradients.items():
        largest = np.abs(wanted.gradients[name]).max()
        np.testing.assert_allclose(gradient, wanted.gradients[name], rtol=0, atol=tolerance * largest, err_msg=name)


def test_a_call_that_the_result_does_not_use_gets_no_gradient():
    tape, (x, other, dy) = Tape(), (da.full((2, 4, 8), value, dtype="f4", chunks=(1, 4, 8)) for value in (1, 2, 3))
    y = tape("used", layers.ADD, x, other)
    tape("unused", layers.ADD, y, other)
    gradients = tape.backward(y, dy)
    assert gradients.keys() == {x.name, other.name}
    np.testing.assert_array_equal(gradients[x.name].compute(scheduler="sync"), 3)


def test_gradients_do_not_depend_on_how_parameters_lie_in_memory(random):
    """Dask names arrays by their values, and those of norms begin equal: each has its own gradient."""
    parameters, batch = daskgpt.initial_parameters(SMALL, 0), random_batch(SMALL, random)
    swapped = {name: np.asfortranarray(value, ">f4") for name, value in parameters.items()}
    bytes_of = {name: np.frombuffer(b"x" + value.tobytes(), "f4", offset=1) for name, value in parameters.items()}
    odd = {name: values.reshape(parameters[name].shape) for name, values in bytes_of.items()}
    lazy = [{name: da.from_array(value, chunks=1) for name, value in given.items()} for given in (parameters, swapped)]
    first, *others = (
        dask.compute(loss_and_gradients(SMALL, given, *lazy_batch(batch, (2, 6)))[1], scheduler="sync")[0]
        for given in (parameters, swapped, odd, *lazy)
    )
    assert not odd["wte.weight"].flags.aligned
    assert [daskgpt.digest(other) for other in others] == [daskgpt.digest(first)] * 4


def test_arguments_of_other_kinds_are_refused(random):
    parameters = daskgpt.initial_parameters(SMALL, 0)
    tokens, targets = lazy_batch(random_batch(SMALL, random), (2, 6))
    for wrong in (tokens.compute(), tokens.astype("int64")):
        with pytest.raises(TypeError, match=r"must be dask arrays of int32; got .*Array of int32\."):
            loss_and_gradients(SMALL, parameters, wrong, targets)
    with pytest.raises(TypeError, match=r"groups must be a whole number; got groups=1\.5"):
        loss_and_gradients(SMALL, parameters, tokens, targets, 1.5)
    with pytest.raises(TypeError, match="must be a ModelConfig"):
        daskgpt.initial_parameters("tiny", 0)
    with pytest.raises(ValueError, match="which is missing"):
        loss_and_gradients(SMALL, {}, tokens, targets)


def test_digest_depends_on_every_bit(random):
    parameters = random_parameters(SMALL, random)
    digest = daskgpt.digest(parameters)
    assert daskgpt.digest({name: value.copy() for name, value in reversed(parameters.items())}) == digest
    changed = parameters["h.1.mlp.c_fc.weight"].copy()
    changed.view(np.uint32)[3, 4] ^= 1  # the last bit of one number
    others = [{"h.1.mlp.c_fc.weight": changed}, {"ln_f.weight": parameters["ln_f.weight"][None]}]
    others.append({"wpe.weight": parameters["wpe.weight"].astype("float64")})
    others.append({"wpe.weight": parameters["wpe.weight"][:0]})
    assert len({digest} | {daskgpt.digest(parameters | other) for other in others}) == 5
