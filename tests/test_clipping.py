"""Tests of steps that are too large: clipped by their norm, or the end of a run."""

import json
import math
import re
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from one_number import MODELS, Dials, outcomes_of_steps
from small_runs import OPTIMIZER, fit, losses_of, stopping_at, tensors_of
from steps import run_step, state_of, step_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import is_sum, origin_of
from daskgpt.kernels.optimizers import adamw_inplace, clipped_hyper, squares
from daskgpt.model.optimizer import Clipped
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.inference import loss_and_gradients

TORCH = json.loads((GOLDEN / "training.json").read_text())["clipping"]
SHAPES = {"a": (130, 33), "bb": (33,), "ccc": (1, 7)}
OPTIONS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def made_up(step, name, shape):
    """As the program that made `golden/training.json` had it."""
    raw = np.random.Philox(1000 * step + len(name)).random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (raw.astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)).reshape(shape)


@pytest.mark.parametrize("clip", TORCH)
def test_norms_and_clipped_updates_match_pytorch(clip):
    state = {name: [made_up(0, name, shape), *np.zeros((2, *shape), "float32")] for name, shape in SHAPES.items()}
    for step, (norm, total) in enumerate(zip(TORCH[clip]["norms"], TORCH[clip]["sums"]), 1):
        gradients = {name: made_up(step, name, shape) for name, shape in SHAPES.items()}
        hyper = np.array([1e-2, 1 - 0.9**step, 1 - 0.99**step])
        told = clipped_hyper(hyper, *map(squares, gradients.values()), clip=float(clip))
        assert told[3] == pytest.approx(norm, rel=1e-6)
        for name, (weight, m, v) in state.items():
            adamw_inplace(weight, gradients[name], m, v, told, **OPTIONS)
        magnitude = sum(np.abs(weight.astype("float64")).sum() for weight, *_ in state.values())
        assert magnitude == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_a_kernel_from_outside_gets_clipped_gradients(clip):
    gradient, hyper, got = made_up(1, "a", SHAPES["a"]), np.array([0.1, 0.2]), []
    norm = np.linalg.norm(gradient.astype("float64"))
    assert 0.5 < norm < 1e9
    clipped = Clipped(lambda weight, *arguments: got.extend(arguments))
    clipped(None, gradient, "a moment", clipped_hyper(hyper, squares(gradient), clip=clip))
    assert got[0].dtype == np.float32
    np.testing.assert_allclose(got[0], gradient * min(1, clip / norm), rtol=1e-6)
    assert (got[1], got[2].tolist()) == ("a moment", hyper.tolist())


def test_squares_beyond_float32_are_finite():
    assert squares(np.full((65, 32), 1e30, "float32")).sum() == pytest.approx(65 * 32 * 1e60)


def test_only_norms_above_the_limit_are_clipped():
    told, ends = {}, {}
    for clip in (0.1, 1e9, 0.0):
        told[clip], values = outcomes_of_steps(replace(MODELS["odd"], clip=clip), "float32", Dials((3, 10)))
        ends[clip] = {name: value.tobytes() for name, value in values.items()}
    assert ends[1e9] == ends[0.0]
    assert [outcome.loss for outcome in told[1e9]] == [outcome.loss for outcome in told[0.0]]
    assert {outcome.norm for outcome in told[0.0]} == {None}
    assert len({outcome.norm for outcome in told[0.1]}) == 3
    assert told[0.1][0] == told[1e9][0]
    assert ends[0.1]["wpe.weight"] != ends[0.0]["wpe.weight"]


def test_norm_of_gradients(random):
    parameters, batch = random_parameters(SMALL, random), random_batch(SMALL, random)
    lazy = tuple(da.from_array(array, chunks=(2, 6)) for array in batch)
    (gradients,) = dask.compute(loss_and_gradients(SMALL, parameters, *lazy)[1], scheduler="sync")
    expected = math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in gradients.values()))
    with open_scheduler("sync", 1) as scheduler:
        step = step_of(SMALL, (4, 12), (2, 6), OptimizerConfig(clip=1.0), in_place=True)
        outcome, _ = run_step(scheduler, step, state_of(step, parameters), batch, 10)
        assert outcome.norm == pytest.approx(expected, rel=1e-6)


CLIPPED = OptimizerConfig(clip=0.5, warmup=OPTIMIZER.warmup)


def told(run, name):
    """What each step says, as JSON's standard has it: Python's own reader takes NaN for a number."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    return [record.get(name) for record in records]


@pytest.mark.parametrize("shared", [False, True])
def test_clipped_run_logs_norms_and_resumes_to_the_same_bits(small_text, tmp_path, cluster, shared, monkeypatch):
    cluster.have(2)
    monkeypatch.setattr("daskgpt.training.rank_engine.WINDOW_SECONDS", 0)  # it ends after one
    dataflow = {"scheduler": cluster.address} if shared else {"scheduler": "threads", "barrier": "none"}
    fit(small_text, tmp_path / "whole", optimizer=CLIPPED)
    fit(small_text, tmp_path / "run", optimizer=CLIPPED, dataflow=dataflow, on_step=stopping_at(5))
    assert 5 <= len(told(tmp_path / "run", "norm")) < 12
    daskgpt.fit(resume=tmp_path / "run", dataflow={"scheduler": dataflow["scheduler"]}, quiet=True)
    assert told(tmp_path / "run", "norm") == told(tmp_path / "whole", "norm")
    assert all(norm > 0.5 for norm in told(tmp_path / "run", "norm")[:3])
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")
    fit(small_text, tmp_path / "plain", optimizer=OPTIMIZER)
    assert set(told(tmp_path / "plain", "norm")) == {None}
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "whole")


STEEP = OptimizerConfig(learning_rate=1e30, schedule="constant")


@pytest.mark.parametrize(("scheduler", "barrier"), [("sync", "none"), ("threads", "none"), ("cluster", "step")])
def test_schedulers_stop_at_the_same_nonfinite_step(small_text, tmp_path, scheduler, barrier, cluster):
    cluster.have(2)
    address = cluster.address if scheduler == "cluster" else scheduler
    dataflow = {"scheduler": address, "barrier": barrier, "window": 4, "threads": 2}
    with pytest.raises(RuntimeError, match="step=2, loss=nan.* There is no checkpoint"):
        fit(small_text, tmp_path / "run", optimizer=STEEP, dataflow=dataflow)
    assert [loss is None for loss in told(tmp_path / "run", "loss")] == [False, True]
    assert not list((tmp_path / "run").glob("step-*"))


def test_validation_detects_nonfinite_parameters(small_text, tmp_path):
    with pytest.raises(RuntimeError, match="step=1, validation_loss=nan"):
        fit(small_text, tmp_path / "run", optimizer=STEEP, steps=1)
    assert [math.isfinite(loss) for loss in told(tmp_path / "run", "loss")] == [True]
    assert told(tmp_path / "run", "validation_loss") == [None]
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("way", ["threads", "bfloat16", "cluster"])
def test_unread_parameters_are_checked(small_text, tmp_path, random, way, cluster, monkeypatch):
    cluster.have(2)
    monkeypatch.setattr("daskgpt.training.start.check_finite", lambda *_: None)  # as if training had made it so
    config = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=32)
    parameters = random_parameters(config, random)
    parameters["wpe.weight"][20, 3] = np.nan  # a position beyond the sequences
    dataflow = {"precision": way} if way == "bfloat16" else {"scheduler": {"cluster": cluster.address}.get(way, way)}
    begun = {"config": config, "parameters": parameters, "dataflow": dataflow}
    with pytest.raises(RuntimeError, match="step=4, parameter=wpe.weight"):
        fit(small_text, tmp_path / "run", **begun, steps=9, validate_every=4)
    assert [math.isfinite(loss) for loss in told(tmp_path / "run", "loss")] == [True] * 4
    assert not list((tmp_path / "run").glob("step-*"))


def test_stopped_run_writes_no_nonfinite_model(small_text, tmp_path):
    steep = OptimizerConfig(learning_rate=1e300, schedule="constant")  # more than float32 holds
    with pytest.raises(RuntimeError, match="parameters must stay finite.*step=1"):
        fit(small_text, tmp_path / "run", optimizer=steep, on_step=stopping_at(1))
    assert not list((tmp_path / "run").glob("step-*"))


def test_error_names_the_last_good_checkpoint(small_text, tmp_path):
    out = tmp_path / "run"
    fit(small_text, out, optimizer=OptimizerConfig(schedule="constant"), steps=3, save_every=2)
    with pytest.raises(RuntimeError, match="must stay finite") as ended:
        daskgpt.fit(resume=out, quiet=True, run={"steps": 40}, optimizer={"learning_rate": 1e30})
    (paths,) = re.findall(r"The last good checkpoint is (\S+): --resume (\S+) continues", str(ended.value))
    assert paths == (str(sorted(out.glob("step-*"))[-1]), str(out))
    assert daskgpt.load(paths[0])


def test_sums_of_layers_stay_apart_between_barriers():
    """As one task of a block they were in one layer's stage, and waited for the stages of others: a cycle."""
    dials = {"grain": "chunk", "barrier": "layer", "groups": 4, "in_place": True}
    model = replace(SMALL, blocks=2), (4, 4), (1, 1), OptimizerConfig(clip=0.5), precision_of("bfloat16")
    step, stages = step_of(*model, **dials), {}
    graph = step.kernels.graph
    groups = step.dials.fusion(ranked=False).groups(graph)
    for key, node in graph.items():
        if is_sum(node):
            stages.setdefault(groups[key], set()).add(origin_of(node).stage)
    assert len(stages) > 20
    assert {len(members) for group, members in stages.items() if group is not None} == {1}
