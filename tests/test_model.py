"""The whole of GPT-2: golden values, gradients in a random direction, schedulers, chunkings, what building does."""

from __future__ import annotations

import json
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from dask.base import key_split
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.graph.calls import KernelCall
from daskgpt.graph.nodes import graph_of, is_leaf
from daskgpt.model.gpt2 import lazy_inputs, mean_loss
from daskgpt.model.layers import LAYERS
from daskgpt.model.precision import FLOAT32, FLOAT64
from daskgpt.model.tape import Tape
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inference import Inference, loss_and_gradients
from daskgpt.training.step import State, TrainingStep
from daskgpt.verify import TOLERANCE, compare

CHUNKS = [(4, 32), (1, 8), (2, 16), (4, 1)]


def lazy_batch(batch, chunk):
    return tuple(da.from_array(array, chunks=chunk) for array in batch)


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_golden_logits_loss_and_gradients(chunk, scheduler):
    for precision, tolerance in TOLERANCE.items():
        dataflow = DataflowConfig(
            batch_chunk=chunk[0], sequence_chunk=chunk[1], scheduler=scheduler, threads=2, precision=precision
        )
        comparisons = compare(GOLDEN / "gpt2_small.bin", GOLDEN / "gpt2_small_debug_state.bin", dataflow)
        assert len(comparisons) == 18
        assert {c.name: c.difference for c in comparisons if c.difference > tolerance} == {}, precision


@pytest.mark.parametrize(("decay", "losses"), [("all", "losses_decay_all"), ("matrices", "losses_decay_2d")])
def test_golden_adamw_losses(decay, losses, golden_model, golden_state):
    config, parameters = golden_model
    expected = json.loads((GOLDEN / "gpt2_small.json").read_text())
    rule = expected["adamw"]
    optimizer = OptimizerConfig(schedule="constant", decay=decay, **rule)
    step, found = TrainingStep(config, (4, 32), (2, 16), optimizer), []
    state = step.initial(parameters)
    with open_scheduler("threads", 2) as scheduler:
        for _ in range(10):
            loss, state = step(scheduler, state, golden_state.tokens, golden_state.targets, 10)
            found.append(loss)
    np.testing.assert_allclose(found, expected[losses], **TOLERANCES["golden losses"])
    assert (
        abs(expected["losses_decay_all"][-1] / expected["losses_decay_2d"][-1] - 1) > 5e-5
    )  # the rules can be told apart


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(FLOAT64, "golden losses, float64"), (FLOAT32, "golden losses")], ids=str
)
def test_golden_muon_losses(precision, tolerance, golden_model, golden_state):
    """Muon for the matrices of the blocks, AdamW for the rest, beside PyTorch's of both."""
    config, parameters = golden_model
    expected = json.loads((GOLDEN / "gpt2_small.json").read_text())
    rule, rest = expected["muon"], expected["adamw"]
    own = {"muon_beta": rule["beta"], "muon_scale": rule["scale"]}
    assert rule["learning_rate"] == rest["learning_rate"]
    assert rule["weight_decay"] == rest["weight_decay"]
    optimizer = OptimizerConfig(optimizer="muon", schedule="constant", **own, **rest)
    step, found = TrainingStep(config, (4, 32), (2, 16), optimizer, precision), []
    state = step.initial(parameters)
    with open_scheduler("threads", 2) as scheduler:
        for _ in range(10):
            loss, state = step(scheduler, state, golden_state.tokens, golden_state.targets, 10)
            found.append(loss)
    np.testing.assert_allclose(found, expected["losses_muon"], **TOLERANCES[tolerance])


def test_gradient_in_a_random_direction_in_float64(random):
    parameters = random_parameters(SMALL, random, "float64")
    batch = random_batch(SMALL, random)
    direction = {name: random.normal(size=value.shape) for name, value in parameters.items()}

    def at(distance):
        moved = {name: value + distance * direction[name] for name, value in parameters.items()}
        return loss_and_gradients(SMALL, moved, *lazy_batch(batch, (2, 4)))

    numeric = (at(1e-6)[0] - at(-1e-6)[0]).compute(scheduler="sync") / 2e-6
    (gradients,) = dask.compute(at(0.0)[1], scheduler="sync")
    exact = sum((gradients[name] * direction[name]).sum() for name in parameters)
    assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


def losses_and_parameters(scheduler, threads, chunk, steps=3, grain="block", in_place=None, **options):
    random = np.random.default_rng(5)
    losses = []
    with open_scheduler(scheduler, threads) as opened:
        in_place = opened.in_place if in_place is None else in_place
        step = TrainingStep(SMALL, (4, 12), chunk, OptimizerConfig(), grain=grain, in_place=in_place, **options)
        state = step.initial(random_parameters(SMALL, random))
        for _ in range(steps):
            loss, state = step(opened, state, *random_batch(SMALL, random), steps)
            losses.append(loss)
        return losses, state.parameters(opened)


@pytest.mark.parametrize("chunk", [(2, 12), (1, 4)], ids=str)
def test_every_scheduler_gives_the_same_bits(chunk):
    expected_losses, expected = losses_and_parameters("sync", 1, chunk)
    for scheduler, threads in (("threads", 1), ("threads", 2), ("local", 2)):
        losses, parameters = losses_and_parameters(scheduler, threads, chunk)
        assert losses == expected_losses, scheduler
        for name, value in parameters.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=f"{scheduler} {name}")


def test_other_chunks_agree_within_rounding_with_a_library_s_product(monkeypatch):
    monkeypatch.setenv("DASKGPT_BLAS", "numpy")
    expected, _ = losses_and_parameters("sync", 1, (4, 12))
    for chunk in ((2, 12), (1, 4), (4, 1)):
        losses, _ = losses_and_parameters("sync", 1, chunk)
        np.testing.assert_allclose(losses, expected, **TOLERANCES["chunkings, whole model"])


def test_padded_rows_of_the_vocabulary_get_no_probability_and_no_gradient(random):
    parameters, batch = random_parameters(SMALL, random), random_batch(SMALL, random)
    losses = []
    for padding in (0, 5, -5):
        parameters["wte.weight"][SMALL.vocabulary :] = padding
        loss, gradients = dask.compute(
            *loss_and_gradients(SMALL, parameters, *lazy_batch(batch, (2, 6))), scheduler="sync"
        )
        losses.append(float(loss))
        assert not gradients["wte.weight"][SMALL.vocabulary :].any()
        assert gradients["wte.weight"][: SMALL.vocabulary].any(axis=1).all()
    assert losses[0] == losses[1] == losses[2]


def test_building_a_graph_runs_no_kernel(random, monkeypatch):
    called = []
    original = KernelCall.__call__
    monkeypatch.setattr(KernelCall, "__call__", lambda self, *chunks: called.append(self) or original(self, *chunks))
    loss, gradients = loss_and_gradients(
        SMALL, random_parameters(SMALL, random), *lazy_batch(random_batch(SMALL, random), (2, 6))
    )
    TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig())
    assert len(gradients) == 28
    assert called == []
    loss.compute(scheduler="sync")
    assert called


def test_keys_say_layer_and_pass(random):
    batch = lazy_batch(random_batch(SMALL, random), (2, 6))
    loss, gradients = loss_and_gradients(SMALL, random_parameters(SMALL, random), *batch)
    graph = graph_of([loss, *gradients.values()])
    prefixes = {key_split(key) for key, node in graph.items() if not is_leaf(node)}
    layers = {layer.name for layer in LAYERS}
    allowed = {f"{layer}.{way}" for layer in layers for way in ("forward", "backward")} | {"array"}  # the batch
    assert prefixes <= allowed
    assert {"linear.forward", "linear.backward", "attention.backward", "gather.forward", "add.backward"} <= prefixes


def test_neither_attention_matrix_nor_logits_of_more_than_a_chunk_leave_a_task(random):
    batch = lazy_batch(random_batch(SMALL, random), (1, 4))
    seen = {}

    class Sizes(dask.callbacks.Callback):
        def _posttask(self, key, result, dsk, state, worker):
            chunks = result if isinstance(result, tuple) else (result,)
            seen[key] = max(getattr(chunk, "size", 0) for chunk in chunks)

    with Sizes():
        dask.compute(*loss_and_gradients(SMALL, random_parameters(SMALL, random), *batch), scheduler="sync")
    activations = {key: size for key, size in seen.items() if ".forward" in key[0]}
    assert max(activations.values()) <= 4 * max(SMALL.padded_vocabulary, 12 * 3 * SMALL.channels // 4)


def test_mean_loss_refuses_sequences_beyond_the_positions(random):
    tokens, targets = lazy_batch(random_batch(SMALL, random, (2, 20)), (2, 20))
    parameters = {name: da.from_array(value, name=name) for name, value in random_parameters(SMALL, random).items()}
    tape = Tape()
    with pytest.raises(ValueError) as error:
        mean_loss(tape, SMALL, parameters, lazy_inputs(tape, tokens, targets))
    assert str(error.value) == (
        "loss: a sequence must not be longer than the model's positions; got sequence_length=20, positions=16. "
        "Shorten the sequence or use a model with more positions."
    )


def test_gradients_of_a_recording_are_those_of_the_lazy_arrays(random):
    parameters, batch = random_parameters(SMALL, random), random_batch(SMALL, random)
    (lazy,) = dask.compute(loss_and_gradients(SMALL, parameters, *lazy_batch(batch, (2, 6)))[1], scheduler="sync")
    state = State.of_weights(SMALL, parameters)
    with open_scheduler("threads", 2) as scheduler:
        recorded = Inference(SMALL, (4, 12), (2, 6), state.layout, ("gradients",))(scheduler, state, *batch)
    for name, gradient in lazy.items():
        np.testing.assert_array_equal(recorded[name], gradient, err_msg=name)


def test_public_names():
    assert callable(daskgpt.fit)
    assert callable(daskgpt.load)
    assert callable(daskgpt.save)
    assert callable(daskgpt.sample)
    for name in daskgpt.__all__:
        assert getattr(daskgpt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        daskgpt.nothing  # noqa: B018


def test_importing_the_package_is_cheap():
    code = "import sys, daskgpt; print('dask' in sys.modules, 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "False",
        "False",
    ]


def test_a_digest_knows_every_bit_of_a_model(random):
    parameters = random_parameters(SMALL, random)
    found = daskgpt.digest(parameters)
    assert len(found) == 64
    assert daskgpt.digest({name: value.copy() for name, value in reversed(parameters.items())}) == found
    changed = parameters["h.1.mlp.c_fc.weight"].copy()
    changed.view(np.uint32)[3, 4] ^= 1  # the last bit of one number
    others = [{"h.1.mlp.c_fc.weight": changed}, {"ln_f.weight": parameters["ln_f.weight"][None]}]
    others.append({"wpe.weight": parameters["wpe.weight"].astype("float64")})
    assert found not in [daskgpt.digest(parameters | other) for other in others]
