"""Tests of a layer and an optimizer from outside the package, whose kernel and row are all that they give.

The examples of CONTRIBUTING.md: a squared ReLU in the place of GELU, and an optimizer that goes by the gradient's sign.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from conftest import SMALL
from one_number import Dials, Model, bits_after_steps
from test_model import check_gradient_in_a_random_direction

import daskgpt
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.model import layers
from daskgpt.model.layers import Layer, Row
from daskgpt.model.optimizer import OPTIMIZERS, Optimizer
from daskgpt.model.parameters import tensors
from daskgpt.profiling.measure import BenchConfig, Steps, job_of, measure_steps
from daskgpt.profiling.plan import predict
from daskgpt.profiling.timeline import summarise
from daskgpt.schedulers.opening import open_scheduler


def squared_relu(x):
    return np.maximum(x, 0) ** 2


def squared_relu_backward(dy, x):
    return dy * 2 * np.maximum(x, 0)


BACKWARD = {"x": Row(squared_relu_backward, "btC, btC -> btC", "dy x")}
SQUARED_RELU = Layer("squared_relu", Row(squared_relu, "btC -> btC", "x"), outputs="y", backward=BACKWARD)


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


RMS = replace(SMALL, norm="rmsnorm")


@pytest.fixture
def extended(monkeypatch):
    monkeypatch.setattr(layers, "GELU", SQUARED_RELU)  # the line of the model
    monkeypatch.setitem(OPTIMIZERS, SIGN.name, SIGN)


def job(config, optimizer, grain):
    made = job_of(config, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(grain=grain))
    return replace(made, optimizer=OptimizerConfig(optimizer=optimizer, schedule="constant"))


@pytest.mark.usefixtures("extended")
def test_gradients_agree_with_a_numeric_derivative(random):
    check_gradient_in_a_random_direction(random)


DIALS = [
    Dials((4, 12)),
    Dials((2, 6), "layer", "kernel"),
    Dials((2, 12), "phase", "chunk", in_place=False),
    Dials((1, 6), "none", "segment", scheduler="threads", threads=2),
]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("norm", "optimizer"), [("layernorm", "sign"), ("rmsnorm", "momentum"), ("rmsnorm", "sign")])
def test_no_dial_changes_a_bit(norm, optimizer, cluster):
    """Of a layer and an optimizer from outside, and of others that the package has."""
    cluster.have(2)
    model = Model(replace(SMALL, norm=norm), (4, 12), optimizer=optimizer)
    dials = [*DIALS, Dials((2, 12), scheduler=cluster.address)]
    found = {own: bits_after_steps(model, "float32", own) for own in dials}
    assert len(set(found.values())) == 1, found


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("norm", "optimizer", "rate"), [("layernorm", "sign", 3e-3), ("rmsnorm", "momentum", 0.1)])
def test_extended_model_learns(norm, optimizer, rate, small_text):
    config = replace(SMALL, vocabulary=257, padded_vocabulary=0, norm=norm)
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=12)
    own = OptimizerConfig(optimizer=optimizer, learning_rate=rate, schedule="constant")
    losses = daskgpt.fit(config, data, own, run=RunConfig(steps=40, validation_batches=1), quiet=True).losses
    assert losses[-1] < losses[0] - 1


def test_rmsnorm_is_a_configuration():
    names = daskgpt.initial_parameters(RMS, 0)
    assert "ln_f.weight" in names
    assert not any("ln_" in name and name.endswith("bias") for name in names)
    assert len(daskgpt.initial_parameters(SMALL, 0)) - len(names) == 2 * SMALL.blocks + 1
    with pytest.raises(ValueError, match="rmsnrm"):
        replace(SMALL, norm="rmsnrm")


def moment_bytes(config, of_matrices, of_others):
    """Where the matrices of the blocks have other moments than the rest."""
    matrices = [each.block is not None and len(each.shape) == 2 for each in tensors(config).values()]
    sizes = [4 * prod(each.shape) for each in tensors(config).values()]
    return sum(size * (of_matrices if matrix else of_others) for size, matrix in zip(sizes, matrices))


MADE = [
    (SMALL, "sign", "kernel", (0, 0), {"squared_relu.forward", "squared_relu.backward", "sign.update"}),
    (SMALL, "muon", "block", (1, 2), {"muon.update", "adamw.update"}),
    (RMS, "momentum", "kernel", (1, 1), {"rmsnorm.forward", "rmsnorm.backward", "momentum.update"}),
]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("config", "optimizer", "grain", "moments", "kernels"), MADE)
def test_plan_bench_and_timeline_of_extensions(config, optimizer, grain, moments, kernels):
    made = job(config, optimizer, grain)
    assert predict(made).made["optimizer"] == moment_bytes(config, *moments)
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(made, scheduler, 0)
        assert measure_steps(steps, warmup=1, timed=1, recorded=1).figures["update"].median > 0
        assert kernels <= {".".join(own) for own in summarise(steps.timeline(1)).kernels}


@pytest.mark.usefixtures("extended")
def test_workers_with_other_layers_are_refused(cluster, small_text):
    cluster.have(2)
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=12)
    config = replace(SMALL, vocabulary=257, padded_vocabulary=0)
    with pytest.raises(
        ValueError, match=r"must have the client's layers; got client=GELU=.*squared_relu, worker=GPT-2"
    ):
        daskgpt.fit(config, data, dataflow={"scheduler": cluster.address}, run={"steps": 2}, quiet=True)
