"""Tests of a model and an optimizer from outside the package through all stages of a run.

Rotary positions, SwiGLU, grouped-query attention, and an optimizer whose second moment has one number a row of the
weight (Adam-mini).
"""

import json
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters, whole_logits
from small_runs import losses_of, stopping_at, tensors_of
from tolerances import TOLERANCES

import daskgpt
from daskgpt import evaluate
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import Choice, Texts
from daskgpt.kernels import attention, embedding
from daskgpt.model import layers, parameters
from daskgpt.model.layers import Layer, Row
from daskgpt.model.optimizer import ADAMW, OPTIMIZERS
from daskgpt.model.parameters import PARAMETERS
from daskgpt.profiling.measure import BenchConfig, Steps, job_of, measure_steps
from daskgpt.profiling.plan import predict
from daskgpt.profiling.timeline import summarise
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.inference import loss_and_gradients

CONFIG = replace(SMALL, heads=4, channels=32, vocabulary=257, padded_vocabulary=0)
GROUPED = 2  # query heads that share a key and a value


def swiglu(x):
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_backward(dy, x):
    gate, up = np.split(x, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return np.concatenate([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], axis=-1)


def turned(x, sign=1):
    """Heads turned by their positions, pairs of channels i and i + HS / 2; with sign -1 the transpose."""
    one, two = np.split(x, 2, axis=-1)
    angles = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(one.shape[-1]) / one.shape[-1])
    cos, sin = (f(angles).astype(x.dtype)[:, None] for f in (np.cos, np.sin))
    return np.concatenate([one * cos - sign * two * sin, sign * one * sin + two * cos], axis=-1)


def whole(qkv, heads):
    """Queries and keys turned, and keys and values once for each query head, (b, T, 3C)."""
    x = qkv.reshape(*qkv.shape[:2], heads + 2 * heads // GROUPED, -1)
    q, k, v = np.split(x, [heads, heads + heads // GROUPED], axis=2)
    parts = turned(q), *(np.repeat(each, GROUPED, axis=2) for each in (turned(k), v))
    return np.concatenate(parts, axis=2).reshape(*qkv.shape[:2], -1)


def rotary_forward(qkv, heads):
    return attention.forward(whole(qkv, heads), heads=heads)


def rotary_backward(dy, qkv, y, logsumexp, heads):
    dqkv = attention.backward(dy, whole(qkv, heads), y, logsumexp, heads=heads)
    dq, *shared = np.split(dqkv.reshape(*qkv.shape[:2], 3 * heads, -1), 3, axis=2)
    dk, dv = (each.reshape(*qkv.shape[:2], -1, GROUPED, each.shape[-1]).sum(axis=3) for each in shared)
    return np.concatenate([turned(dq, -1), turned(dk, -1), dv], axis=2).reshape(qkv.shape)


def token_rows(tokens, wte):
    return wte[tokens]


BACK = {"wte": Row(embedding.backward_wte, "btC, bt -> VC", "dy tokens")}
ONLY_TOKENS = Layer("token_rows", Row(token_rows, "bt, VC -> btC", "tokens wte"), outputs="y", backward=BACK)
BACK = {"x": Row(swiglu_backward, "btC, btX -> btX", "dy x")}
HALF = {"new_axes": lambda sizes, options: {"C": sizes["X"] // 2}, "cheap": True}
SWIGLU = Layer("swiglu", Row(swiglu, "btX -> btC", "x"), outputs="y", backward=BACK, **HALF)
BACK = {"qkv": Row(rotary_backward, "bTC, bTX, bTC, bHT -> bTX", "dy qkv y logsumexp", "heads")}
AXES = {"new_axes": lambda sizes, options: {"C": sizes["X"] * GROUPED // (GROUPED + 2), "H": options["heads"]}}
ROTARY = Layer("rotary", Row(rotary_forward, "bTX -> bTC, bHT", "qkv", "heads"), "y logsumexp", BACK, **AXES)
ROWS = {"GELU": SWIGLU, "ATTENTION": ROTARY, "EMBEDDING": ONLY_TOKENS}
WIDTHS = {"attn.c_attn": lambda config: config.channels + 2 * config.channels // GROUPED, "mlp.c_fc": "8C"}


def mini(weight, gradient, m, v, hyper, **options):
    new = weight.copy(), m.copy(), v.copy()
    mini_inplace(new[0], gradient, *new[1:], hyper, **options)
    return new


def mini_inplace(weight, gradient, m, v, hyper, *, beta1, beta2, eps, weight_decay):
    rate, correction1, correction2 = hyper
    m += (1 - beta1) * (gradient - m)
    v += (1 - beta2) * ((gradient**2).reshape(len(v), -1).mean(1) - v)
    scale = (np.sqrt(v / correction2) + eps).reshape(-1, *[1] * (weight.ndim - 1))
    weight -= (rate * (m / correction1 / scale + weight_decay * weight)).astype(weight.dtype)


MINI = replace(ADAMW, name="mini", kernel=mini, in_place=mini_inplace, fused={}, per_row=("v",))


def table():
    """Return the rows of the model's tensors."""
    rows = [row for row in PARAMETERS if row.name != "wpe.weight"]
    for place, width in WIDTHS.items():
        rows = [replace(row, axes=(width, *row.axes[1:])) if place in row.name else row for row in rows]
    return rows


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Put the rows into the tables."""
    monkeypatch.setattr(parameters, "PARAMETERS", tuple(table()))
    for name, row in ROWS.items():
        monkeypatch.setattr(layers, name, row)
    monkeypatch.setitem(OPTIMIZERS, "mini", MINI)


def loss_of_torch(torch, p, tokens, targets):
    """The same model, written with PyTorch's operations."""
    f = torch.nn.functional
    x, heads, size = p["wte.weight"][tokens], CONFIG.heads, CONFIG.channels // CONFIG.heads
    angles = torch.arange(tokens.shape[1])[:, None] / 10000 ** (torch.arange(size // 2, dtype=x.dtype) / (size // 2))
    turn = torch.polar(torch.ones_like(angles), angles)
    for block in range(CONFIG.blocks):
        own = {name.removeprefix(f"h.{block}.").rpartition(".")[::2]: value for name, value in p.items()}
        weights = {at: (own[at, "weight"], own[at, "bias"]) for at, kind in own if kind == "bias"}
        qkv = f.linear(f.layer_norm(x, x.shape[2:], *weights["ln_1"]), *weights["attn.c_attn"])
        qkv = qkv.unflatten(-1, (-1, size)).transpose(1, 2)
        q, k, v = qkv.split([heads, heads // GROUPED, heads // GROUPED], 1)
        pairs = (torch.complex(*each.unflatten(-1, (2, -1)).unbind(-2)) * turn for each in (q, k))
        q, k = (torch.cat([each.real, each.imag], -1) for each in pairs)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + f.linear(y, *weights["attn.c_proj"])
        gate, up = f.linear(f.layer_norm(x, x.shape[2:], *weights["ln_2"]), *weights["mlp.c_fc"]).chunk(2, -1)
        hidden = f.silu(gate) * up
        x = x + f.linear(hidden, *weights["mlp.c_proj"])
    x = f.layer_norm(x, x.shape[2:], p["ln_f.weight"], p["ln_f.bias"])
    return f.cross_entropy((x @ p["wte.weight"].T).flatten(0, 1), targets.flatten())


def test_gradients_are_those_of_pytorch(random):
    torch = pytest.importorskip("torch")
    values, batch = random_parameters(CONFIG, random, "float64"), random_batch(CONFIG, random)
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    expected = loss_of_torch(torch, leaves, *(torch.tensor(each).long() for each in batch))
    expected.backward()
    lazy = [da.from_array(each, chunks=(2, 4)) for each in batch]
    loss, gradients = dask.compute(*loss_and_gradients(CONFIG, values, *lazy), scheduler="sync")
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, gradient in gradients.items():
        largest = leaves[name].grad.abs().max().item()
        assert (
            abs(gradient - leaves[name].grad.numpy()).max() < TOLERANCES["whole model, float64"]["of largest"] * largest
        )


def test_train_stop_resume_and_generate(small_text, tmp_path, capsys):
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
    texts = Texts(Weights(config, values, "float32"), prompts := [list(b"def "), [7], [5] * 9])
    assert all(name in texts.weights.replaced for name in [*ROWS, "PARAMETERS"])
    assert len(list(texts.write(20, Choice(temperature=0)))) == 20  # beyond the positions
    for prompt, tokens in zip(prompts, texts.tokens):
        for end in range(len(prompt), CONFIG.positions):
            assert tokens[end] == whole_logits(config, values, tokens[:end])[-1].argmax()
    scores = (
        Texts(Weights(config, values, precision), prompts).scores([0, 1]) for precision in ("float32", "bfloat16")
    )
    np.testing.assert_allclose(*scores, **TOLERANCES["kept, bfloat16"])
    assert evaluate.main([str(tmp_path / "whole"), "--data", str(small_text), "--limit", "40", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count("every layer runs its own forward kernel") == 1
    assert json.loads(said.out)["loss"] < 4
    with pytest.raises(ValueError, match="the layers must be GPT-2's own"):
        daskgpt.save(tmp_path / "model.bin", config, values)


def test_every_grain_fuses_the_model_to_the_same_losses():
    losses = []
    for grain in ("kernel", "block", "chunk"):
        dials = DataflowConfig(scheduler="sync", grain=grain, batch_chunk=2, sequence_chunk=12)
        with open_scheduler("sync", 1) as scheduler:
            steps = Steps(job_of(CONFIG, BenchConfig(batch_size=4, sequence_length=12), dials), scheduler, 0)
            steps.run(2)
            losses.append(steps.losses)
    assert losses[0] == losses[1] == losses[2]


def test_plan_of_a_model_without_a_calibration(tmp_path, monkeypatch, capsys):
    """Its sizes may fit no other model, which the cost of tasks is measured with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fixed = [replace(row, axes=(lambda _: 64, *row.axes[1:])) if "attn.c_attn" in row.name else row for row in table()]
    monkeypatch.setattr(parameters, "PARAMETERS", tuple(fixed))
    plan = daskgpt.plan(CONFIG, {"batch_size": 4, "sequence_length": 8}, {"optimizer": "mini"})
    assert plan.forecast.seconds > 0
    said = capsys.readouterr().err
    assert "timing kernels of this model for about" in said
    assert "--calibrate keeps such times" in said


def test_plan_bench_and_timeline_of_extensions():
    made = job_of(
        CONFIG, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(grain="kernel", precision="bfloat16")
    )
    made = replace(made, optimizer=OptimizerConfig(optimizer="mini", schedule="constant"))
    shapes = parameters.parameter_shapes(CONFIG).values()
    assert predict(made).made["optimizer"] == sum(4 * (int(np.prod(shape)) + shape[0]) for shape in shapes)
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(made, scheduler, 0)
        assert measure_steps(steps, warmup=1, timed=1, recorded=1).figures["update"].median > 0
        kernels = {f"{row.name}.forward" for row in ROWS.values()}
        assert kernels | {"mini.update"} <= {".".join(own) for own in summarise(steps.timeline(1)).kernels}
