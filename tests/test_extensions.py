"""A layer and an optimizer from outside of the package: a kernel and a row each, and everything else follows.

The examples of CONTRIBUTING.md: a squared ReLU in the place of GELU, and an optimizer that goes by the gradient's sign.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.instruments.measure import Steps, measure
from daskgpt.instruments.memory import predict
from daskgpt.instruments.random_tokens import BenchConfig, job_of
from daskgpt.instruments.timeline import StepRecorder, summarise
from daskgpt.model import layers
from daskgpt.model.layers import Layer, Row
from daskgpt.model.optimizer import OPTIMIZERS, Optimizer
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import FLOAT32
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inference import loss_and_gradients
from daskgpt.training.step import TrainingStep


def squared_relu(x):
    return np.maximum(x, 0) ** 2


def squared_relu_backward(dy, x):
    return dy * 2 * np.maximum(x, 0)


SQUARED_RELU = Layer(
    name="squared_relu",
    forward=Row(squared_relu, "btC -> btC", "x"),
    outputs="y",
    backward={"x": Row(squared_relu_backward, "btC, btC -> btC", "dy x")},
)


def sign(weight, gradient, hyper):
    return weight - (hyper[0] * np.sign(gradient)).astype(weight.dtype)


def sign_inplace(weight, gradient, hyper):
    weight[...] = sign(weight, gradient, hyper)


SIGN = Optimizer(
    name="sign",
    kernel=sign,
    in_place=sign_inplace,
    moments=(),
    options=lambda config, tensor: {},
    hyper=lambda config, step, steps: np.array([config.learning_rate]),
    hyper_size=1,
)


@pytest.fixture
def extended(monkeypatch):
    monkeypatch.setattr(layers, "GELU", SQUARED_RELU)  # the line of the model
    monkeypatch.setitem(OPTIMIZERS, SIGN.name, SIGN)


def job(config, optimizer, grain):
    made = job_of(config, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(grain=grain))
    return replace(made, optimizer=OptimizerConfig(optimizer=optimizer, schedule="constant"))


@pytest.mark.usefixtures("extended")
def test_gradients_agree_with_a_numeric_derivative(random):
    parameters = random_parameters(SMALL, random, "float64")
    batch = tuple(da.from_array(array, chunks=(2, 4)) for array in random_batch(SMALL, random))
    direction = {name: random.normal(size=value.shape) for name, value in parameters.items()}

    def at(distance):
        moved = {name: value + distance * direction[name] for name, value in parameters.items()}
        return loss_and_gradients(SMALL, moved, *batch)

    numeric = (at(1e-6)[0] - at(-1e-6)[0]).compute(scheduler="sync") / 2e-6
    (gradients,) = dask.compute(at(0.0)[1], scheduler="sync")
    exact = sum((gradients[name] * direction[name]).sum() for name in parameters)
    assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


@pytest.mark.slow
@pytest.mark.usefixtures("extended")
def test_it_trains_and_no_dial_changes_a_bit(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    config = replace(SMALL, vocabulary=257, padded_vocabulary=0)
    data = DataConfig(data=str(text), batch_size=4, sequence_length=12)
    optimizer = OptimizerConfig(optimizer="sign", learning_rate=3e-3, schedule="constant")
    results = [
        daskgpt.fit(config, data, optimizer, DataflowConfig(**dials), RunConfig(steps=40), quiet=True)
        for dials in (
            {"scheduler": "threads"},
            {"scheduler": "sync", "grain": "kernel", "barrier": "layer"},
            {"scheduler": "threads", "batch_chunk": 1, "sequence_chunk": 6, "barrier": "none"},
            {"scheduler": "local", "threads": 2},
        )
    ]
    assert results[0].losses[-1] < results[0].losses[0] - 1
    for other in results[1:]:
        assert other.losses == results[0].losses
        for name, value in other.parameters.items():
            np.testing.assert_array_equal(value, results[0].parameters[name])


@pytest.mark.usefixtures("extended")
def test_it_is_planned_measured_and_drawn():
    planned = predict(job(SMALL, "sign", "block"))
    assert planned.made["optimizer"] == 0
    assert planned.made["activations"] > 0
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(job(SMALL, "sign", "kernel"), scheduler, 0)
        found = measure(steps, warmup=1, timed=1, recorded=1)
        assert min(found.busy.values()) > 0
        recorder = StepRecorder(steps.step, scheduler)
        with recorder.window((9,)):
            steps.run(1)
        summary = summarise(recorder.finish())
    assert ("squared_relu", "forward") in summary.kernels
    assert ("squared_relu", "backward") in summary.kernels
    assert ("sign", "update") in summary.kernels


# What the package ships in the same way: another normalisation and another optimizer.

RMS = replace(SMALL, norm="rmsnorm")


def test_rmsnorm_is_a_value_of_the_configuration():
    names = daskgpt.initial_parameters(RMS, 0)
    assert "ln_f.weight" in names
    assert not any("ln_" in name and name.endswith("bias") for name in names)
    assert len(daskgpt.initial_parameters(SMALL, 0)) - len(names) == 2 * SMALL.blocks + 1
    with pytest.raises(ValueError, match="GPT2Config: norm must be known; got norm=rmsnrm. Did you mean rmsnorm?"):
        replace(SMALL, norm="rmsnrm")


def test_a_model_with_rmsnorm_and_momentum_trains_to_the_same_bits_everywhere(random):
    optimizer = OptimizerConfig(optimizer="momentum", learning_rate=0.05, schedule="constant")
    batches = [random_batch(SMALL, random)] * 12
    results = []
    for scheduler, chunk, options in (
        ("sync", (4, 12), {"grain": "kernel", "barrier": "phase"}),
        ("threads", (2, 6), {"grain": "segment"}),
        ("threads", (2, 12), {"grain": "chunk", "precision": FLOAT32}),
        ("local", (2, 12), {}),
    ):
        with open_scheduler(scheduler, 2) as opened:
            step = TrainingStep(RMS, (4, 12), chunk, optimizer, in_place=opened.in_place, **options)
            state = step.initial(daskgpt.initial_parameters(RMS, 3))
            losses = []
            for batch in batches:
                loss, state = step(opened, state, *batch, len(batches))
                losses.append(loss)
            results.append((losses, state.parameters(opened)))
    assert results[0][0][-1] < results[0][0][0] - 0.1
    for losses, parameters in results[1:]:
        assert losses == results[0][0]
        for name, value in parameters.items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)


@pytest.mark.parametrize("grain", ["kernel", "block"])
def test_muon_is_planned_measured_and_drawn(grain):
    made = job(SMALL, "muon", grain)
    planned = predict(made)
    # One moment of the blocks' matrices, two of the rest.
    known = tensors(SMALL).values()
    matrices = sum(prod(each.shape) for each in known if each.block is not None and len(each.shape) == 2)
    assert planned.made["optimizer"] == 2 * planned.made["parameters"] - 4 * matrices
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(made, scheduler, 0)
        assert measure(steps, warmup=1, timed=1, recorded=1).operations > 0
        recorder = StepRecorder(steps.step, scheduler)
        with recorder.window((9,)):
            steps.run(1)
        assert {("muon", "update"), ("adamw", "update")} <= set(summarise(recorder.finish()).kernels)


def test_a_model_with_rmsnorm_is_planned_measured_and_drawn():
    made = job(RMS, "momentum", "block")
    planned = predict(made)
    assert planned.made["optimizer"] == planned.made["parameters"]  # one moment
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(made, scheduler, 0)
        assert measure(steps, warmup=1, timed=1, recorded=1).operations > 0
        recorder = StepRecorder(steps.step, scheduler)
        with recorder.window((9,)):
            steps.run(1)
        assert ("rmsnorm", "backward") in summarise(recorder.finish()).kernels
