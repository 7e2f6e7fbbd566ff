"""Tests of the choices of a model through all stages of a run: rotary positions, SwiGLU, grouped queries, no biases, an
untied head; and of layers, optimizers and an engine from outside of the package (`custom_layers`, `custom_engine`).
"""

import re
import sys
from dataclasses import replace
from math import prod
from types import ModuleType

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters, whole_logits
from custom_engine import LoopEngine
from custom_layers import SQUARED_RELU
from one_number import Dials, Model, bits_after_steps
from small_runs import fit
from tolerances import TOLERANCES

import daskgpt
from daskgpt import audit
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import Texts
from daskgpt.model import parameters
from daskgpt.model.parameters import tensors
from daskgpt.profiling import measure
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of, measure_steps
from daskgpt.profiling.plan import predict
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.engine import LocalEngine
from daskgpt.training.inference import loss_and_gradients
from daskgpt.training.start import resumed_run

CONFIG = replace(
    SMALL, heads=4, kv_heads=2, channels=32, vocabulary=257, padded_vocabulary=0, position="rotary", activation="swiglu"
)
EXTENDED = replace(SMALL, activation="custom_layers:SQUARED_RELU")
LLAMA = replace(CONFIG, norm="rmsnorm", bias="none", head="untied", head_size=12, hidden=40, norm_eps=1e-3)
CHOICES = {
    "gpt2": SMALL,
    "grouped queries": replace(SMALL, heads=4, kv_heads=2, channels=16),
    "queries of one head, odd": replace(SMALL, heads=3, kv_heads=1, channels=9),
    "other head size": replace(SMALL, head_size=5),
    "heads that do not divide the channels": replace(SMALL, heads=3, channels=16, head_size=5),
    "bias of qkv": replace(SMALL, bias="qkv"),
    "untied": replace(SMALL, head="untied"),
    "rotary": replace(SMALL, position="rotary", rope_theta=500.0, activation="relu2"),
    "scaled rotary": replace(CONFIG, rope_theta=100.0, rope_factor=4.0, rope_positions=30),
    "all but norm": CONFIG,
    "llama": LLAMA,
    "normalized heads": replace(LLAMA, qk_norm="rmsnorm"),
    "normalized heads, not turned": replace(SMALL, qk_norm="rmsnorm"),
    "from outside": replace(SMALL, position="custom_layers:NO_POSITIONS", attention="custom_layers:SAME_ATTENTION"),
    "activation from outside": EXTENDED,
    "cheap activation of two results": replace(SMALL, activation="custom_layers:CHEAP_WITH_MASK"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_agree_with_a_numeric_derivative(name, random):
    """In a random direction."""
    config, parameters = CHOICES[name], random_parameters(CHOICES[name], random, "float64")
    batch = [da.from_array(array, chunks=(2, 4)) for array in random_batch(config, random)]
    direction = {name: random.normal(size=value.shape) for name, value in parameters.items()}

    def at(distance):
        moved = {name: value + distance * direction[name] for name, value in parameters.items()}
        return loss_and_gradients(config, moved, *batch)

    numeric = (at(1e-6)[0] - at(-1e-6)[0]).compute(scheduler="sync") / 2e-6
    (gradients,) = dask.compute(at(0.0)[1], scheduler="sync")
    exact = sum((gradients[name] * direction[name]).sum() for name in parameters)
    assert exact == pytest.approx(numeric, **TOLERANCES["numeric derivative"])


TRAINED = [("from outside", "adamw", precision) for precision in ("float32", "bfloat16")]
TRAINED += [("activation from outside", "custom_layers:SIGN", "bfloat16")]
DIALS = [
    Dials((4, 12)),
    Dials((2, 6), "layer", "kernel"),
    Dials((2, 12), "phase", "chunk", in_place=False),
    Dials((1, 12), "none", "chunk"),
    Dials((1, 6), "none", "segment", scheduler="threads", threads=2),
]


@pytest.mark.parametrize(("name", "optimizer", "precision"), TRAINED)
def test_no_dial_changes_a_bit(name, optimizer, precision, cluster):
    cluster.have(2)
    model = Model(CHOICES[name], (4, 12), optimizer=optimizer)
    dials = [*DIALS, Dials((2, 12), scheduler=cluster.address)]
    bits = {dial: bits_after_steps(model, precision, dial) for dial in dials}
    assert len(set(bits.values())) == 1, bits


@pytest.mark.parametrize(
    ("settings", "keyword"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"position": "rotary", "head_size": 5}, "even head_size"),
        ({"rope_low": 4.0}, "rope_high must be above rope_low"),
        ({"lora": 17}, "lora must be at most channels; got lora=17, channels=16. Try lora=16"),
        ({"bias": "some"}, "bias must be known"),
        ({"norm": "rmsnrm"}, "rmsnrm"),
        ({"norm_eps": 1e-6}, "layernorm must have norm_eps=1e-05"),
        ({"norm": "rmsnorm", "norm_eps": 0.0}, "at least 1e-37"),
    ],
)
def test_choices_that_do_not_fit_are_refused(settings, keyword):
    with pytest.raises(ValueError, match=keyword):
        replace(SMALL, heads=4, channels=16, **settings)


@pytest.mark.parametrize("name", CHOICES)
def test_the_shortest_form_has_the_same_sizes(name):
    config = CHOICES[name]
    sizes = {"kv_heads": config.key_heads, "head_size": config.head_channels, "hidden": config.hidden_channels}
    assert replace(config, **sizes).shortest() == config.shortest() == config


def test_published_sizes():
    for name, count in {"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "nanochat-d4": 36_703_488}.items():
        config = daskgpt.preset(name)
        assert parameters.parameter_count(config) == parameters.value_count(config) == count
        if name.startswith("smollm2"):
            assert (config.positions, config.rope_theta, config.head_channels, config.norm_eps) == (8192, 1e5, 64, 1e-5)
            assert config.heads == 3 * config.key_heads


# Heads of other sizes, below and above a vector, and rows that are padded.
DECODED = CHOICES | {
    "heads of 10": replace(SMALL, heads=3, channels=30, vocabulary=37, padded_vocabulary=40, norm="rmsnorm"),
    "one head": replace(SMALL, heads=1, channels=48),
    "heads of 64": replace(SMALL, heads=5, channels=320),
}


@pytest.mark.parametrize("name", DECODED)
def test_decoding_matches_training(name, random, capsys):
    config = replace(DECODED[name], positions=90)
    values, tokens = random_parameters(config, random), random.integers(0, config.vocabulary, 80).tolist()
    outside, by_precision = "custom_layers" in str(config), []
    for precision in ("float32", "bfloat16"):
        weights = Weights(config, values, precision)
        assert bool(weights.others) == outside
        scores = []
        for threads in (1, 3):
            texts = Texts(weights, [tokens[:70], tokens[:3]], threads=threads)
            for text, rest in zip(texts.tokens, (tokens[70:], tokens[3:9])):
                scores.append(texts.scores([0, 1]))  # these tokens are cached, so the next scores read the rest alone
                text += rest
            scores.append(texts.scores([0, 1]))
        expected = np.stack([whole_logits(config, values, part)[-1] for part in (tokens, tokens[:9])])
        np.testing.assert_array_equal(scores[2], scores[5])
        by_precision.append(scores[2])
        tolerance = TOLERANCES[f"kept, {precision}"]
        np.testing.assert_allclose(scores[2] / abs(expected).max(), expected / abs(expected).max(), **tolerance)
    assert not np.array_equal(*by_precision)
    if name == "from outside":  # said once for each choice of layers
        assert "every layer runs its own forward kernel" in capsys.readouterr().err


def test_plan_of_a_model_without_a_calibration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = daskgpt.plan(CONFIG, {"batch_size": 4, "sequence_length": 8}, {"optimizer": "custom_layers:MINI"})
    assert plan.forecast.seconds > 0
    said = capsys.readouterr().err
    assert "timing kernels of this model" in said
    assert "--calibrate keeps such times" in said


# Layers, optimizers and engines from outside: plans, timelines, workers, and what is refused


SIGN, MINI = "custom_layers:SIGN", "custom_layers:MINI"


def job(config, optimizer, **dials):
    made = job_of(config, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(**dials))
    return replace(made, optimizer=OptimizerConfig(optimizer=optimizer, schedule="constant"))


def of_muon(tensor):
    """Numbers of the moments of a tensor: the matrices of the blocks have other ones than the rest."""
    return prod(tensor.shape) * (1 if tensor.block is not None and len(tensor.shape) == 2 else 2)


def of_mini(tensor):
    return prod(tensor.shape) + tensor.shape[0]


KERNEL = {"grain": "kernel"}
MADE = [
    (EXTENDED, SIGN, KERNEL, lambda tensor: 0, {"squared_relu.forward", "squared_relu.backward", "sign.update"}),
    (CONFIG, "muon", {"grain": "block"}, of_muon, {"muon.update", "adamw.update"}),
    (CONFIG, MINI, KERNEL | {"precision": "bfloat16"}, of_mini, {"swiglu.forward", "rotary.backward", "mini.update"}),
]


@pytest.mark.parametrize(("config", "optimizer", "dials", "numbers", "kernels"), MADE)
def test_plan_bench_and_timeline_of_extensions(config, optimizer, dials, numbers, kernels):
    made = job(config, optimizer, **dials)
    assert predict(made).made["optimizer"] == 4 * sum(map(numbers, tensors(config).values()))
    with open_scheduler("threads", 2) as scheduler:
        steps = TimedEngine(made, scheduler, 0)
        assert measure_steps(steps, warmup=1, timed=1, recorded=1)["update"][0].median > 0
        assert kernels <= {".".join(names) for names in steps.timeline(1).summary.kernels}


def test_workers_with_another_module_are_refused(cluster, small_text, monkeypatch):
    cluster.have(2)
    config = replace(EXTENDED, vocabulary=257, padded_vocabulary=0)
    monkeypatch.setattr("inspect.getsource", lambda module: "another version")
    with pytest.raises(ValueError, match=r"must have the client's modules; got client=.*custom_layers.*, worker="):
        fit(small_text, config=config, dataflow={"scheduler": cluster.address}, steps=2)


@pytest.mark.parametrize(
    ("settings", "error", "keyword"),
    [
        ({"activation": "gellu"}, ValueError, "Did you mean gelu"),
        ({"activation": "custom_layers:GELU"}, ValueError, "must name a row of a module.*no attribute 'GELU'"),
        ({"activation": "nowhere_at_all:GELU"}, ValueError, "No module named.*PYTHONPATH"),
        ({"activation": "math:sin"}, TypeError, "of the kind Layer"),
        ({"activation": "custom_layers:NO_ROW"}, TypeError, "of the kind Layer; got .*type=str"),
        ({"activation": "custom_layers:OTHER_AXES"}, ValueError, "an axis of a result must be.*btC -> btQ"),
        ({"activation": "custom_layers:NO_OPTION"}, ValueError, "h.0.mlp: an option must be.*option=slope"),
        ({"activation": "custom_layers:NO_PLACE"}, ValueError, "h.0.mlp: an option must be.*option=place"),
        ({"activation": "custom_layers:NO_RESULTS"}, TypeError, r"cheap_with_mask.forward-h.0.mlp: .*; got \[\], None"),
        ({"activation": "custom_layers:NO_RESULT"}, TypeError, r"squared_relu.forward-h.0.mlp: .*; got \[None\], None"),
        ({"norm": "custom_layers:NO_GRADIENT"}, ValueError, "must have a gradient.*h.0.ln_1.weight"),
    ],
)
def test_rows_that_cannot_be_had_are_refused(settings, error, keyword, small_text):
    with pytest.raises(error, match=keyword):
        fit(small_text, config=daskgpt.preset("tiny", **settings))


@pytest.mark.parametrize("dataflow", [{"scheduler": "threads"}, {"scheduler": "sync", "grain": "kernel"}])
def test_an_error_in_a_row_names_its_place(dataflow, small_text):
    with pytest.raises(ArithmeticError) as error:
        fit(small_text, config=daskgpt.preset("tiny", activation="custom_layers:BROKEN"), dataflow=dataflow)
    assert "(ArithmeticError in broken, " in " ".join(error.value.__notes__)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dataflow", [{"scheduler": "threads"}, {"scheduler": "sync", "precision": "bfloat16"}])
def test_an_optimizer_that_returns_a_new_weight_is_refused(dataflow, clip, small_text):
    optimizer = {"optimizer": "custom_layers:NOT_IN_PLACE", "clip": clip}
    with pytest.raises(TypeError, match="must change the weight in place; got a new one"):
        fit(small_text, optimizer=optimizer, dataflow=dataflow)


def test_rows_without_a_file_of_source_are_refused(small_text, monkeypatch):
    module = ModuleType("no_source")
    module.ROW = SQUARED_RELU
    monkeypatch.setitem(sys.modules, "no_source", module)
    with pytest.raises(ValueError, match="must be a file of source; got module=no_source"):
        fit(small_text, config=daskgpt.preset("tiny", activation="no_source:ROW"))


def test_a_run_does_not_decide_what_is_imported(small_text, tmp_path, monkeypatch):
    fit(small_text, tmp_path, optimizer={"optimizer": SIGN}, steps=1)
    monkeypatch.delitem(sys.modules, "custom_layers")
    for again in (lambda: resumed_run(str(tmp_path), {"run": {"steps": 2}}), lambda: audit.main([str(tmp_path)])):
        with pytest.raises(ValueError, match="module=custom_layers"):
            again()
    assert "custom_layers" not in sys.modules


def test_a_module_that_has_changed_is_named(small_text, tmp_path, monkeypatch, capsys):
    fit(small_text, tmp_path, optimizer={"optimizer": SIGN}, steps=2)
    monkeypatch.setattr("inspect.getsource", lambda module: "another version")
    job, start = resumed_run(str(tmp_path), {"run": {"steps": 4}})
    start.folder.close()
    assert "modules    custom_layers changed: bits may differ from here on" in start.messages
    assert audit.main([str(tmp_path)]) == 0
    named = rf"^versions custom_layers \w+ -> {job.modules['custom_layers']}: bits may differ"
    assert re.search(named, capsys.readouterr().out, re.MULTILINE)


def test_a_file_does_not_decide_what_is_imported(tmp_path, monkeypatch):
    parameters = daskgpt.initial_parameters(EXTENDED, seed=1)
    daskgpt.save(tmp_path / "model.safetensors", EXTENDED, parameters)
    assert daskgpt.load(tmp_path / "model.safetensors")[0] == EXTENDED
    monkeypatch.delitem(sys.modules, "custom_layers")
    with pytest.raises(ValueError, match=r"^read_run_model: [^:]* must be allowed.*DASKGPT_MODULES=custom_layers\.$"):
        daskgpt.load(tmp_path / "model.safetensors")
    assert "custom_layers" not in sys.modules
    monkeypatch.setenv("DASKGPT_MODULES", "other,custom_layers")
    assert daskgpt.load(tmp_path / "model.safetensors")[0] == EXTENDED


def test_an_engine_from_outside_gives_the_bits_of_threads():
    small_job = job(SMALL, "adamw", batch_chunk=2, sequence_chunk=6)
    batches, ends = [measure.random_batch(small_job, 5, number) for number in range(3)], []
    for engine_class, scheduler, threads in ((LocalEngine, "threads", 2), (LoopEngine, "sync", 1)):
        with open_scheduler(scheduler, threads) as opened:
            engine = engine_class(small_job, opened, str)
            engine.start(daskgpt.initial_parameters(SMALL, 0))
            losses = [engine.run([batch], 3)[0].loss for batch in batches]
            ends.append((losses, daskgpt.digest(engine.weights().parameters(opened))))
    assert ends[0] == ends[1]
