"""Tests of models and an optimizer from outside of the package, a row or two each, through everything that a run does.

Rotary positions, SwiGLU, grouped-query attention, all three together, and an optimizer whose second moment has one
number a row of the weight (Adam-mini).
"""

from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from small_runs import losses_of, stopping_at, tensors_of
from tolerances import TOLERANCES

import daskgpt
from daskgpt import evaluate
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import Texts
from daskgpt.instruments.measure import Steps, measure
from daskgpt.instruments.memory import predict
from daskgpt.instruments.random_tokens import BenchConfig, job_of
from daskgpt.instruments.timeline import summarise
from daskgpt.kernels import attention, embedding
from daskgpt.model import layers, parameters
from daskgpt.model.gpt2 import replaced_rows
from daskgpt.model.layers import Layer, Row
from daskgpt.model.optimizer import ADAMW, OPTIMIZERS
from daskgpt.model.parameters import PARAMETERS
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inference import Inference, loss_and_gradients
from daskgpt.training.step import State

CONFIG = replace(SMALL, heads=4, channels=32, vocabulary=257, padded_vocabulary=0)
GROUPED = 2  # query heads that share a key and a value


def swiglu(x):
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_backward(dy, x):
    gate, up = np.split(x, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return np.concatenate([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], axis=-1)


def rotated(qkv, heads, sign=1):
    """Queries and keys turned by their positions, pairs of channels i and i + HS / 2; with sign -1 the transpose."""
    x = qkv.reshape(*qkv.shape[:2], 3, heads, 2, -1)
    angles = np.arange(qkv.shape[1])[:, None] / 10000 ** (np.arange(x.shape[-1]) / x.shape[-1])
    cos, sin = (f(angles).astype(qkv.dtype)[:, None, None] for f in (np.cos, np.sin))
    one, two = x[..., 0, :], x[..., 1, :]
    turned = np.stack([one * cos - sign * two * sin, sign * one * sin + two * cos], axis=-2)
    turned[:, :, 2] = x[:, :, 2]
    return turned.reshape(qkv.shape)


def shared(qkv, heads):
    """Keys and values once for each query head, (b, T, 3C)."""
    x = qkv.reshape(*qkv.shape[:2], heads + 2 * heads // GROUPED, -1)
    q, kv = x[:, :, :heads], x[:, :, heads:]
    return np.concatenate([q, np.repeat(kv, GROUPED, axis=2)], axis=2).reshape(*qkv.shape[:2], -1)


def summed(dqkv, heads):
    x = dqkv.reshape(*dqkv.shape[:2], 3 * heads, -1)
    dkv = x[:, :, heads:].reshape(*x.shape[:2], -1, GROUPED, x.shape[-1]).sum(axis=3)
    return np.concatenate([x[:, :, :heads], dkv], axis=2).reshape(*dqkv.shape[:2], -1)


def attention_of(name, before, after):
    """A row of attention on changed queries, keys and values; `after` changes their gradient back."""

    def forward(qkv, heads):
        return attention.forward(before(qkv, heads), heads)

    def backward(dy, qkv, y, logsumexp, heads):
        return after(attention.backward(dy, before(qkv, heads), y, logsumexp, heads), heads)

    def sizes(sizes, options):
        heads = options["heads"]
        width = before(np.zeros((1, 1, sizes["X"]), "f4"), heads).shape[2]
        return {"C": width // 3, "H": heads}

    row = layers.ATTENTION
    rows = {"qkv": replace(row.backward["qkv"], kernel=backward)}
    return Layer(name, replace(row.forward, kernel=forward), row.outputs, rows, sizes)


def token_rows(tokens, wte):
    return wte[tokens]


ONLY_TOKENS = Layer(
    "token_rows",
    Row(token_rows, "bt, VC -> btC", "tokens wte"),
    outputs="y",
    backward={"wte": Row(embedding.backward_wte, "btC, bt -> VC", "dy tokens")},
)
SWIGLU = Layer(
    "swiglu",
    Row(swiglu, "btX -> btC", "x"),
    outputs="y",
    backward={"x": Row(swiglu_backward, "btC, btX -> btX", "dy x")},
    new_axes=lambda sizes, options: {"C": sizes["X"] // 2},
    cheap=True,
)
ROTARY = attention_of("rotary", rotated, lambda dqkv, heads: rotated(dqkv, heads, -1))
SHARED = attention_of("shared", shared, summed)
BOTH = attention_of(
    "rotary_shared",
    lambda qkv, heads: rotated(shared(qkv, heads), heads),
    lambda dqkv, heads: summed(rotated(dqkv, heads, -1), heads),
)


def without_positions(rows):
    return tuple(row for row in rows if row.name != "wpe.weight")


def gated(rows):
    return tuple(replace(row, axes=("8C", *row.axes[1:])) if ".mlp.c_fc." in row.name else row for row in rows)


def with_shared_keys(rows):
    def width(config):
        return config.channels + 2 * config.channels // GROUPED

    return tuple(replace(row, axes=(width, *row.axes[1:])) if ".c_attn." in row.name else row for row in rows)


MODELS = {
    "swiglu": ({"GELU": SWIGLU}, [gated]),
    "rotary": ({"ATTENTION": ROTARY, "EMBEDDING": ONLY_TOKENS}, [without_positions]),
    "shared": ({"ATTENTION": SHARED}, [with_shared_keys]),
    "all": (
        {"ATTENTION": BOTH, "EMBEDDING": ONLY_TOKENS, "GELU": SWIGLU},
        [without_positions, gated, with_shared_keys],
    ),
}


def mini(weight, gradient, m, v, hyper, *, beta1, beta2, eps, weight_decay):
    new = weight.copy(), m.copy(), v.copy()
    mini_inplace(new[0], gradient, *new[1:], hyper, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return new


def mini_inplace(weight, gradient, m, v, hyper, *, beta1, beta2, eps, weight_decay):
    rate, correction1, correction2 = hyper
    m += (1 - beta1) * (gradient - m)
    v += (1 - beta2) * ((gradient**2).reshape(len(v), -1).mean(1) - v)
    scale = (np.sqrt(v / correction2) + eps).reshape(-1, *[1] * (weight.ndim - 1))
    weight -= (rate * (m / correction1 / scale + weight_decay * weight)).astype(weight.dtype)


MINI = replace(ADAMW, name="mini", kernel=mini, in_place=mini_inplace, fused={}, per_row=("v",))


@pytest.fixture(params=MODELS)
def model(request, monkeypatch):
    """A model of other rows, and an optimizer beside those of the package; the name of the model."""
    rows, changes = MODELS[request.param]
    table = PARAMETERS
    for change in changes:
        table = change(table)
    monkeypatch.setattr(parameters, "PARAMETERS", table)
    for name, row in rows.items():
        monkeypatch.setattr(layers, name, row)
    monkeypatch.setitem(OPTIMIZERS, "mini", MINI)
    return request.param


def loss_of_torch(torch, p, tokens, targets, model):
    """The same model, written with PyTorch's operations."""
    f = torch.nn.functional
    x, heads, size = p["wte.weight"][tokens], CONFIG.heads, CONFIG.channels // CONFIG.heads
    if "wpe.weight" in p:
        x = x + p["wpe.weight"][: tokens.shape[1]]
    angles = torch.arange(tokens.shape[1])[:, None] / 10000 ** (torch.arange(size // 2, dtype=x.dtype) / (size // 2))
    turn = torch.polar(torch.ones_like(angles), angles)
    for at in (f"h.{number}" for number in range(CONFIG.blocks)):

        def linear(name, x, at=at):
            return f.linear(x, p[f"{at}.{name}.weight"], p[f"{at}.{name}.bias"])

        def norm(name, x, at=at):
            return f.layer_norm(x, (CONFIG.channels,), p[f"{at}.{name}.weight"], p[f"{at}.{name}.bias"])

        qkv = linear("attn.c_attn", norm("ln_1", x)).unflatten(-1, (-1, size)).transpose(1, 2)
        q, k, v = qkv.split([heads, (qkv.shape[1] - heads) // 2, (qkv.shape[1] - heads) // 2], 1)
        if model in ("rotary", "all"):
            turned = (torch.complex(*each.unflatten(-1, (2, -1)).unbind(-2)) * turn for each in (q, k))
            q, k = (torch.cat([each.real, each.imag], -1) for each in turned)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + linear("attn.c_proj", y)
        hidden = linear("mlp.c_fc", norm("ln_2", x))
        if model in ("swiglu", "all"):
            gate, up = hidden.chunk(2, -1)
            hidden = f.silu(gate) * up
        else:
            hidden = f.gelu(hidden, approximate="tanh")
        x = x + linear("mlp.c_proj", hidden)
    x = f.layer_norm(x, (CONFIG.channels,), p["ln_f.weight"], p["ln_f.bias"])
    return f.cross_entropy((x @ p["wte.weight"].T).flatten(0, 1), targets.flatten())


def test_gradients_are_those_of_pytorch(model, random):
    torch = pytest.importorskip("torch")
    values, batch = random_parameters(CONFIG, random, "float64"), random_batch(CONFIG, random)
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    expected = loss_of_torch(torch, leaves, *(torch.tensor(each).long() for each in batch), model)
    expected.backward()
    lazy = [da.from_array(each, chunks=(2, 4)) for each in batch]
    loss, gradients = dask.compute(*loss_and_gradients(CONFIG, values, *lazy), scheduler="sync")
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, gradient in gradients.items():
        largest = leaves[name].grad.abs().max().item()
        assert (
            abs(gradient - leaves[name].grad.numpy()).max() < TOLERANCES["whole model, float64"]["of largest"] * largest
        )


def greedy(config, values, prompt, count):
    """The likeliest tokens, each from the model's forward pass over the whole text, which keeps nothing."""
    state, tokens = State.of_weights(config, values), list(prompt)
    with open_scheduler("sync") as scheduler:
        for _ in range(count):
            shape = 1, len(tokens)
            inference = Inference(config, shape, shape, state.layout, ("logits",), grain="chunk")
            scores = inference(scheduler, state, np.array([tokens], np.int32))["logits"]
            tokens.append(int(scores[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_run_is_trained_stopped_resumed_and_writes_its_own_text(model, small_text, tmp_path, capsys):
    data = DataConfig(data=str(small_text), batch_size=4, sequence_length=16)
    optimizer = OptimizerConfig(optimizer="mini", learning_rate=3e-3, schedule="constant")
    dataflow = DataflowConfig(batch_chunk=2, sequence_chunk=8)
    for name, stop in (("whole", None), ("stopped", stopping_at(17))):
        run = RunConfig(steps=40, validation_batches=1, save_every=10, out=str(tmp_path / name))
        daskgpt.fit(CONFIG, data, optimizer, dataflow, run=run, on_step=stop, quiet=True)
    result = daskgpt.fit(resume=tmp_path / "stopped", dataflow={"threads": 2, "sequence_chunk": 16}, quiet=True)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    assert tensors_of(tmp_path / "stopped") == tensors_of(tmp_path / "whole")
    assert result.losses[-1] < result.losses[0] - 1
    config, values = daskgpt.load(tmp_path / "whole")
    assert list(daskgpt.sample(config, values, list(b"def "), 12, temperature=0)) == greedy(config, values, b"def ", 12)
    assert evaluate.main([str(tmp_path / "whole"), "--data", str(small_text), "--limit", "40", "--json"]) == 0
    with pytest.raises(ValueError, match="the layers must be GPT-2's own"):
        daskgpt.save(tmp_path / "model.bin", config, values)
    capsys.readouterr()


def test_what_is_kept_changes_no_token_of_texts_that_grow_together(model, random):
    values = random_parameters(CONFIG, random)
    weights = Weights(CONFIG, values, "float32")
    assert all(name in weights.replaced for name in [*MODELS[model][0], "PARAMETERS"])
    texts = Texts(weights, [[1, 2, 3], [4], [5] * 9])
    for _ in range(20):  # beyond the positions
        scores = texts.scores(range(3))
        for tokens, own in zip(texts.tokens, scores, strict=True):
            tokens.append(int(own.argmax()))
    for number, prompt in enumerate(([1, 2, 3], [4])):
        count = CONFIG.positions - len(prompt)
        assert texts.tokens[number][len(prompt) : CONFIG.positions] == greedy(CONFIG, values, prompt, count)


def test_it_is_planned_measured_and_drawn(model):
    made = job_of(CONFIG, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(grain="kernel"))
    made = replace(made, optimizer=OptimizerConfig(optimizer="mini", schedule="constant"))
    shapes = parameters.parameter_shapes(CONFIG).values()
    assert predict(made).made["optimizer"] == sum(4 * (int(np.prod(shape)) + shape[0]) for shape in shapes)
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(made, scheduler, 0)
        assert min(measure(steps, warmup=1, timed=1, recorded=1).busy.values()) > 0
        kernels = {f"{row.name}.forward" for row in MODELS[model][0].values()}
        assert kernels | {"mini.update"} <= {".".join(own) for own in summarise(steps.timeline(1)).kernels}


@pytest.mark.parametrize(("layer", "width"), [(SWIGLU, 24), (ROTARY, 24), (SHARED, 24), (ONLY_TOKENS, 24)])
def test_the_check_of_layers_finds_nothing_wrong(layer, width):
    heads = {"heads": 2}
    sizes = {"X": width, "C": {"swiglu": 12, "rotary": 8, "shared": 12}.get(layer.name, 8)}
    assert daskgpt.check_layer(layer, sizes, heads), daskgpt.check_layer(layer, sizes, heads)
    assert replaced_rows() == ""
