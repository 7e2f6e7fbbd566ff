"""Tests of errors of the Python interface and the flags for values of wrong kinds, shapes and sizes, and of the fields
of configurations.
"""

import math
import re
import threading
from dataclasses import fields

import numpy as np
import pytest
from small_runs import fit

import daskgpt
from daskgpt import train
from daskgpt.generate import GenerateConfig
from daskgpt.model.parameters import value_count
from daskgpt.profiling.measure import BenchConfig
from daskgpt.profiling.recorder import TimelineConfig
from daskgpt.study import StudyConfig
from daskgpt.training.job import Job, require_memory

CONFIG = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=16)
PARAMETERS = daskgpt.initial_parameters(CONFIG, seed=0)
DOUBLE = {name: values.astype("float64") for name, values in PARAMETERS.items()}
BROKEN = PARAMETERS | {"ln_f.bias": np.full(16, np.nan, np.float32)}
DATA = {"sequence_length": 16}


def sample(parameters=PARAMETERS, prompt=(1,), config=CONFIG, **options):
    return daskgpt.sample(config, parameters, prompt, 3, **options)


def save(parameters=PARAMETERS, **options):
    daskgpt.save("model.safetensors", CONFIG, parameters, **options)


@pytest.mark.parametrize(
    ("call", "kind", "keyword"),
    [
        (lambda: daskgpt.nothing, AttributeError, "nothing"),
        (lambda: daskgpt.fit("tiny"), TypeError, "ModelConfig"),
        (daskgpt.fit, ValueError, "config=None"),
        (lambda: daskgpt.fit(CONFIG, 3), TypeError, "DataConfig"),
        (lambda: daskgpt.fit(CONFIG, {"dta": "text"}), ValueError, "Did you mean data"),
        (lambda: daskgpt.fit(CONFIG, DATA, parameters=DOUBLE), TypeError, "float32"),
        (lambda: daskgpt.fit(CONFIG, DATA, parameters=[1]), TypeError, "by name"),
        (lambda: daskgpt.fit(CONFIG, DATA, parameters=BROKEN), ValueError, "ln_f.bias must be finite; .* finite=16"),
        (lambda: daskgpt.fit(CONFIG, {"data": ""}), ValueError, "data must not be empty"),
        (lambda: daskgpt.fit(CONFIG, DATA, resume=""), ValueError, "resume must not be empty"),
        (lambda: daskgpt.load(""), ValueError, "path must not be empty"),
        (lambda: daskgpt.plan(CONFIG, DATA, workers=2.5), TypeError, "workers must be a whole number; got workers=2.5"),
        (lambda: daskgpt.measure(CONFIG, DATA, turns=None), TypeError, "turns must be a whole number; got turns=None"),
        (lambda: daskgpt.initial_parameters(CONFIG, seed=-1), ValueError, "seed must be at least 0; got seed=-1"),
        (lambda: daskgpt.open_scheduler("local", threads=-2).__enter__(), ValueError, "threads must be at least 0"),
        (lambda: daskgpt.preset(None), ValueError, "name must be known; got name=None"),
        (lambda: sample(None), TypeError, "by name"),
        (lambda: sample(DOUBLE), TypeError, "float32"),
        (lambda: sample(PARAMETERS | {"ln_f.bias": 1.0}), TypeError, "NumPy arrays by name; got ln_f.bias=float. Take"),
        (lambda: sample(prompt=np.zeros((2, 2), int)), TypeError, "whole numbers"),
        (lambda: sample(prompt="text"), TypeError, "whole numbers"),
        (lambda: sample(temperature=np.inf), ValueError, "finite"),
        (lambda: sample(seed=1.5), TypeError, "whole number"),
        (lambda: save(BROKEN), ValueError, "finite"),
        (lambda: save(encoding="byte"), ValueError, "vocabulary must be available; .*Did you mean bytes"),
        (lambda: save(sequence_length=-1), ValueError, "sequence_length must be at least 0"),
    ],
)
def test_python_errors_are_one_line(call, kind, keyword, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=keyword) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


BILLION = "blocks heads channels vocabulary positions batch-size accumulate sequence-length threads window"
HUGE = dict.fromkeys([*BILLION.split(), "validation-batches"], "1000000000")
HUGE |= dict.fromkeys(("steps", "seed", "keep", "sample-tokens", "warmup"), "99999999999999999999999")
HUGE["tokens"] = "9" * 400


@pytest.mark.parametrize(("flag", "value"), HUGE.items())
def test_huge_numbers_are_refused_at_once(flag, value, small_text, tmp_path):
    with pytest.raises((ValueError, SystemExit)):
        train.main([f"--{flag}", value, "--data", str(small_text), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_refused(monkeypatch):
    parts = daskgpt.OptimizerConfig(), daskgpt.DataflowConfig(scheduler="threads"), daskgpt.RunConfig()
    job = Job(daskgpt.preset("tiny"), daskgpt.DataConfig(), *parts)
    held = 3 * 4 * value_count(job.config)  # weights and two moments
    kept = 4 * 12 * 64 * 128 * 5  # an activation for each of four blocks, and one
    for limit, fits in ((held + kept, True), (held + kept - 1, False)):
        monkeypatch.setattr("daskgpt.training.job.memory_limit", lambda limit=limit: (limit, "this machine"))
        if fits:
            require_memory(job)
        else:
            with pytest.raises(ValueError, match="must fit"):
                require_memory(job)


def test_too_little_memory_of_workers_is_refused():
    parts = daskgpt.OptimizerConfig(), daskgpt.DataflowConfig(scheduler="tcp://127.0.0.1:1"), daskgpt.RunConfig()
    job = Job(daskgpt.preset("tiny"), daskgpt.DataConfig(groups=2), *parts)
    weights, kept = 4 * value_count(job.config), 4 * 12 * 64 * 128 * 5
    for count, need in ((1, 3 * weights + kept), (2, 2 * weights + kept / 2), (3, 2 * weights + kept / 2)):
        for limits in ([need] * count, [0] * count, [need, *[1] * (count - 1)]):
            require_memory(job, list(map(int, limits)))
        with pytest.raises(ValueError, match=r"must fit into the 0\.0\d\d GB of a worker .*--memory-limit"):
            require_memory(job, [int(need) - 1] * count)
    require_memory(job)


def test_runs_of_two_threads_share_the_process(small_text):
    """The second one begins and ends within a step of the first."""
    begun, wanted, losses = threading.Event(), fit(small_text).losses, []

    def wait(step, metrics):
        begun.set()
        if step == 3:
            second.join()

    def other():
        begun.wait()
        losses.append(fit(small_text).losses)

    second = threading.Thread(target=other, daemon=True)
    second.start()
    assert fit(small_text, on_step=wait).losses == wanted
    assert losses == [wanted]


# Fields of configurations


PUBLIC = [getattr(daskgpt, name) for name in daskgpt.__all__ if name.endswith("Config")]


CONFIGS = list(dict.fromkeys([*PUBLIC, GenerateConfig, BenchConfig, StudyConfig, TimelineConfig]))


@pytest.mark.parametrize(
    ("config", "values", "error", "said"),
    [
        (daskgpt.RunConfig, {"steps": True}, TypeError, "whole number; got steps=True"),
        (daskgpt.RunConfig, {"steps": 0}, ValueError, "at least 1"),
        (daskgpt.RunConfig, {"tokens": "many"}, ValueError, "tokens"),
        (daskgpt.RunConfig, {"tokens": 400 * "9"}, ValueError, "at most"),
        (daskgpt.OptimizerConfig, {"eps": math.nan}, ValueError, "Try 1e-08"),
        (daskgpt.OptimizerConfig, {"beta1": -math.inf}, ValueError, "finite"),
        (daskgpt.OptimizerConfig, {"beta2": 1}, ValueError, "below 1"),
        (daskgpt.DataConfig, {"validation_fraction": 0}, ValueError, "above 0"),
        (daskgpt.DataflowConfig, {"grain": "blocks"}, ValueError, "Did you mean block?"),
        (daskgpt.RunConfig, {"out": " "}, ValueError, "out must not be empty"),
        (GenerateConfig, {"top_p": 2}, ValueError, "at most 1"),
    ],
)
def test_disallowed_values_are_refused(config, values, error, said):
    with pytest.raises(error, match=f"{config.__name__}: .*{re.escape(said)}"):
        config(**values)


def test_bounds_are_inclusive_or_exclusive():
    optimizer = daskgpt.OptimizerConfig(beta1=0, learning_rate=1e-30, beta2=0.9999999)
    assert (optimizer.beta1, optimizer.learning_rate, optimizer.beta2) == (0.0, 1e-30, 0.9999999)
    assert (daskgpt.RunConfig(steps=1).steps, daskgpt.RunConfig(seed=0).seed) == (1, 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_check_bounds_and_types(config):
    for f in fields(config):
        wrong = 1.5 if f.metadata["parse"] else 5 if isinstance(f.default, str) else "5"
        with pytest.raises(TypeError, match=f"^{config.__name__}: {f.name} must be "):
            config(**{f.name: wrong})
        if not isinstance(f.default, str):
            with pytest.raises(ValueError, match=f"^{config.__name__}: {f.name} must .*; got {f.name}=-"):
                config(**{f.name: -2})  # -1 may be a word's number


def test_numpy_numbers_and_paths_are_converted(tmp_path):
    run = daskgpt.RunConfig(steps=np.int64(5), out=tmp_path)
    optimizer = daskgpt.OptimizerConfig(learning_rate=np.float32(0.5), eps=1)
    held = run.steps, run.out, optimizer.learning_rate, optimizer.eps
    assert held == (5, str(tmp_path), 0.5, 1.0)
    assert [type(value) for value in held] == [int, str, float, float]
