"""Tests of a layer and an optimizer from outside the package, whose kernel and row are all that they give.

The examples of CONTRIBUTING.md: a squared ReLU in the place of GELU, and an optimizer that goes by the gradient's sign.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
from conftest import SMALL, random_parameters, whole_logits
from distributed import Client
from one_number import Dials, Model, bits_after_steps
from test_model import check_gradient_in_a_random_direction

import daskgpt
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.model import gpt2, layers, parameters
from daskgpt.model.layers import PASS, Layer, Row
from daskgpt.model.optimizer import OPTIMIZERS, SCHEDULES, Optimizer
from daskgpt.model.parameters import PARAMETERS, tensors
from daskgpt.model.rows import Table, content
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
        ValueError,
        match=r"the client's layers and optimizer; got client=GELU=.*squared_relu \(.*, worker=daskgpt's own",
    ):
        daskgpt.fit(config, data, dataflow={"scheduler": cluster.address}, run={"steps": 2}, quiet=True)


def put(row):
    layers.GELU = row


@pytest.mark.usefixtures("extended")
def test_workers_with_the_client_s_layers(cluster, small_text):
    cluster.have(2)
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=12)
    config, run = replace(SMALL, vocabulary=257, padded_vocabulary=0), {"steps": 2, "validation_batches": 1}
    wanted = daskgpt.fit(config, data, dataflow={"scheduler": "sync"}, run=run, quiet=True)
    with Client(cluster.address) as client:
        own = layers.LAYERS[[row.name for row in layers.LAYERS].index("gelu")]
        client.run(put, SQUARED_RELU)
        try:
            found = daskgpt.fit(config, data, run=run, client=client, quiet=True)
        finally:
            client.run(put, own)
    assert daskgpt.digest(found.parameters) == daskgpt.digest(wanted.parameters)


REPLACING = """
import json, sys
import numpy as np
import daskgpt
from daskgpt.model import layers
from daskgpt.model.layers import Layer, Row
def squared_relu(x):
    return np.maximum(x, 0) ** 2
def squared_relu_backward(dy, x):
    return dy * 2 * np.maximum(x, 0)
assert ("daskgpt.model.gpt2" in sys.modules) == (sys.argv[2] == "later"), "the order that this is about"
back = {"x": Row(squared_relu_backward, "btC, btC -> btC", "dy x")}
layers.GELU = Layer("squared_relu", Row(squared_relu, "btC -> btC", "x"), outputs="y", backward=back)
config = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=12)
data = {"data": sys.argv[1], "batch_size": 4, "sequence_length": 12}
result = daskgpt.fit(config, data, dataflow={"scheduler": "sync"}, run={"steps": 2, "out": sys.argv[3]}, quiet=True)
text = list(daskgpt.sample(result.config, result.parameters, [104], 8, temperature=0))
try:
    daskgpt.save("model.bin", result.config, result.parameters)
except ValueError as error:
    print(json.dumps([daskgpt.digest(result.parameters), text, str(error)]))
"""


@pytest.mark.parametrize("order", ["before", "later"])
def test_layer_replaced_before_and_after_the_model_is_imported(order, small_text, tmp_path, monkeypatch):
    """Training, text and files are those of the new layer in any order of imports; a process without it refuses."""
    start = "import daskgpt.model.gpt2\n" if order == "later" else ""
    command = [sys.executable, "-c", start + REPLACING, small_text, order, tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "GELU=__main__.squared_relu: every layer runs its own forward kernel" in ended.stderr
    digest, text, refused = json.loads(ended.stdout)
    assert "the layers must be GPT-2's own; got GELU=__main__.squared_relu" in refused
    with pytest.raises(ValueError, match="the layers must be those that the model was trained with"):
        daskgpt.load(tmp_path / "run")
    config = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=12)
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=12)
    monkeypatch.setattr(layers, "GELU", SQUARED_RELU)
    wanted = daskgpt.fit(config, data, dataflow={"threads": 2}, run={"steps": 2}, quiet=True)
    assert digest == daskgpt.digest(wanted.parameters)
    assert text == list(daskgpt.sample(config, wanted.parameters, [104], 8, temperature=0))


def sloped(slope):
    def relu(x):
        return np.maximum(x, 0) * slope

    return Layer("relu", Row(relu, "btC -> btC", "x"), "y", {"x": PASS})


CLIPPED = replace(layers.GELU, backward={"x": Row(squared_relu_backward, "btC, btC -> btC", "dy x")})
WAYS = {
    "row": (layers, "GELU", SQUARED_RELU, "GELU=test_extensions.squared_relu"),
    "kernel of a row": (layers, "GELU", replace(layers.GELU, forward=SQUARED_RELU.forward), "GELU=test_ext"),
    "another own row": (layers, "LAYERNORM", layers.RMSNORM, "LAYERNORM=daskgpt.kernels.rmsnorm.forward"),
    "callable object": (
        layers,
        "GELU",
        replace(layers.GELU, forward=Row(partial(squared_relu), "btC -> btC", "x")),
        "",
    ),
    "block": (gpt2, "block", squared_relu, "block=test_extensions.squared_relu"),
    "transformer": (gpt2, "transformer", squared_relu, "transformer="),
    "parameter": (parameters, "PARAMETERS", (replace(PARAMETERS[0], initial="one"), *PARAMETERS[1:]), "'wte.weight'"),
    "parameter that is gone": (parameters, "PARAMETERS", PARAMETERS[1:], "'wte.weight'"),
}


@pytest.mark.parametrize(("where", "name", "new", "said"), WAYS.values(), ids=WAYS)
def test_every_way_to_replace_is_noticed(where, name, new, said, monkeypatch):
    assert gpt2.replaced_rows() == gpt2.changed_rows(OptimizerConfig()) == ""
    monkeypatch.setattr(where, name, new)
    assert said in gpt2.replaced_rows()
    assert said in gpt2.changed_rows(OptimizerConfig())
    with pytest.raises(ValueError, match="the layers must be GPT-2's own"):
        gpt2.require_own_layers("save")


def test_what_changes_only_training_is_noticed_by_ranks(monkeypatch):
    """Files and decoding do not depend on it."""
    changes = [
        (layers, "GELU", CLIPPED),
        (OPTIMIZERS, "adamw", SIGN),
        (SCHEDULES, "cosine", SCHEDULES["linear"]),
    ]
    found = {gpt2.changed_rows(OptimizerConfig())}
    for where, name, new in changes:
        with monkeypatch.context() as patch:
            (patch.setitem if isinstance(where, dict) else patch.setattr)(where, name, new)
            assert gpt2.replaced_rows() == ""
            found.add(gpt2.changed_rows(OptimizerConfig()))
    with monkeypatch.context() as patch:  # of the same mapping, which is not frozen
        patch.setitem(layers.GELU.backward, "x", PASS)
        found.add(gpt2.changed_rows(OptimizerConfig()))
    assert len(found) == 5
    monkeypatch.setitem(OPTIMIZERS, "sign", SIGN)
    assert gpt2.changed_rows(OptimizerConfig()) == "", "a row that this run does not use"
    assert "sign" in gpt2.changed_rows(OptimizerConfig(optimizer="sign"))


def test_rows_of_one_name_are_compared_by_their_code():
    assert content(sloped(1)) == content(sloped(1)) != content(sloped(2))
    patched = Table(lambda: {"GELU": SQUARED_RELU, "LINEAR": layers.LINEAR})
    assert list(patched.replaced()) == ["GELU"], "a kernel that was replaced in its module before the table was made"


def test_normalization_is_the_row_of_the_module(random, monkeypatch):
    values, tokens = random_parameters(SMALL, random), np.arange(4)
    wanted = whole_logits(RMS, {name: values[name] for name in daskgpt.initial_parameters(RMS, 0)}, tokens)
    assert not np.array_equal(whole_logits(SMALL, values, tokens), wanted)
    monkeypatch.setattr(layers, "LAYERNORM", layers.RMSNORM)
    assert np.array_equal(whole_logits(SMALL, values, tokens), wanted)
    with pytest.raises(TypeError, match="item assignment"):
        layers.NORMS["layernorm"] = layers.RMSNORM


def half_sum(x, y):
    return x + y / 2


def test_replaced_addition_adds_no_gradients(random, monkeypatch):
    """Gradients of one array are added, whatever replaces the layer of the residual stream."""
    half = {"x": PASS, "y": Row(lambda dy: dy / 2, "btC -> btC", "dy")}
    monkeypatch.setattr(layers, "ADD", Layer("half_sum", Row(half_sum, "btC, btC -> btC", "x y"), "sum", half))
    check_gradient_in_a_random_direction(random)
