"""Tests of a layer and an optimizer from outside the package (`custom_layers`), which the configuration names."""

import sys
from dataclasses import replace
from math import prod
from types import ModuleType

import pytest
from conftest import SMALL
from custom_engine import LoopEngine
from custom_layers import SQUARED_RELU
from small_runs import fit
from test_model_choices import CONFIG, EXTENDED

import daskgpt
from daskgpt import audit
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.model.parameters import tensors
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of, measure_steps, random_batch
from daskgpt.profiling.plan import predict
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.engine import LocalEngine
from daskgpt.training.start import resumed_run

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
    (SMALL, "muon", {"grain": "block"}, of_muon, {"muon.update", "adamw.update"}),
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
    ],
)
def test_rows_that_cannot_be_had_are_refused(settings, error, keyword, small_text):
    with pytest.raises(error, match=keyword):
        fit(small_text, config=daskgpt.preset("tiny", **settings))


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
    own = job(SMALL, "adamw", batch_chunk=2, sequence_chunk=6)
    batches, ends = [random_batch(own, 5, number) for number in range(3)], []
    for engine_class, scheduler, threads in ((LocalEngine, "threads", 2), (LoopEngine, "sync", 1)):
        with open_scheduler(scheduler, threads) as opened:
            engine = engine_class(own, opened, str)
            engine.start(daskgpt.initial_parameters(SMALL, 0))
            losses = [engine.run([batch], 3)[0].loss for batch in batches]
            ends.append((losses, daskgpt.digest(engine.weights().parameters(opened))))
    assert ends[0] == ends[1]
