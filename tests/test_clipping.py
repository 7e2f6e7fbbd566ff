"""Clipping by the norm of all gradients: PyTorch's numbers, and the same bits whoever sums what."""

from __future__ import annotations

import json
import math

import dask
import dask.array as da
import numpy as np
import pytest
from command_lines import write_text
from conftest import GOLDEN, SMALL, random_batch, random_parameters
from one_number import MODELS, Dials, random_dials, seed
from small_runs import OPTIMIZER, fit, losses_of, stopping_at, tensors_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.kernels.adamw import adamw, adamw_inplace
from daskgpt.kernels.norm import UNIT_ROWS, guard, squares
from daskgpt.model.optimizer import Guarded
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inference import loss_and_gradients
from daskgpt.training.step import TrainingStep

TORCH = json.loads((GOLDEN / "training.json").read_text())["clipping"]
SHAPES = {"a": (130, 33), "bb": (33,), "ccc": (1, 7)}
OPTIONS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def made_up(step, name, shape):
    """As `golden/make_training.py` has it."""
    raw = np.random.Philox(1000 * step + len(name)).random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (raw.astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)).reshape(shape)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("clip", TORCH)
def test_norms_and_clipped_updates_are_those_of_torch(clip, in_place):
    state = {
        name: [made_up(0, name, shape), *(np.zeros(shape, "float32") for _ in "mv")] for name, shape in SHAPES.items()
    }
    for step, (norm, total) in enumerate(zip(TORCH[clip]["norms"], TORCH[clip]["sums"]), 1):
        gradients = {name: made_up(step, name, shape) for name, shape in SHAPES.items()}
        hyper = np.array([1e-2, 1 - 0.9**step, 1 - 0.99**step, math.inf, math.inf])
        told = guard(hyper, np.float32(1.0), *map(squares, gradients.values()), clip=float(clip), limits=False)
        assert told[3] == pytest.approx(norm, rel=1e-6)
        for name, (weight, m, v) in state.items():
            kernel = Guarded(adamw_inplace if in_place else adamw)
            state[name] = list(kernel(weight, gradients[name], m, v, told, **OPTIONS))
        own = sum(np.abs(weight.astype("float64")).sum() for weight, *_ in state.values())
        assert own == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 7), (64, 31), (65, 32), (300, 129)])
def test_squares_of_rows_are_parts_of_the_whole(random, shape):
    gradient = random.normal(size=shape).astype("float32")
    found = squares(gradient)
    np.testing.assert_allclose(found.sum(), (gradient.astype("float64") ** 2).sum(), rtol=1e-14)
    if len(shape) == 2:
        parts = [squares(gradient[first : first + UNIT_ROWS]) for first in range(0, len(gradient), UNIT_ROWS)]
        np.testing.assert_array_equal(np.concatenate(parts), found)
    large = (gradient * np.float32(1e30)).astype("float32")  # its squares are beyond float32
    assert np.isfinite(squares(large)).all()


def ended_with(model, precision, dials, clip, optimizer="adamw", steps=3):
    """Losses, norms and the parameters' bytes after some steps."""
    tokens = np.random.default_rng(1).integers(0, model.config.vocabulary, (steps, model.batch[0], model.batch[1] + 1))
    batches = [(text[:, :-1], text[:, 1:]) for text in tokens.astype(np.int32)]
    with open_scheduler(dials.scheduler, dials.threads) as scheduler:
        step = TrainingStep(
            model.config,
            model.batch,
            dials.chunk,
            OptimizerConfig(optimizer=optimizer, clip=clip, warmup=1),
            precision=precision_of(precision),
            grain=dials.grain,
            barrier=dials.barrier,
            in_place=scheduler.in_place if dials.in_place is None else dials.in_place,
            groups=model.groups,
            parts=dials.parts or len(scheduler.addresses()),
            accumulate=dials.accumulate,
        )
        state = step.initial(random_parameters(model.config, np.random.default_rng(2)))
        if dials.barrier == "none" and step.in_place:
            told, state = step.window(scheduler, state, batches, steps)
        else:
            told = []
            for batch in batches:
                handles, state = step.submit(scheduler, state, batch, steps)
                told.append(step.outcome(scheduler, handles))
        return told, {name: value.tobytes() for name, value in state.parameters(scheduler).items()}


@pytest.mark.parametrize(
    ("name", "precision", "optimizer"),
    [
        ("odd in 2 groups", "float32", "adamw"),
        ("odd in 2 groups", "bfloat16", "momentum"),
        ("odd", "float32", "muon"),
        ("long", "bfloat16", "adamw"),
    ],
)
def test_no_dial_changes_a_bit(name, precision, optimizer):
    model, random = MODELS[name], np.random.default_rng(number := seed())
    whole = ended_with(model, precision, Dials(model.batch), 0.5, optimizer)
    assert len({outcome.norm for outcome in whole[0]}) == 3
    micro = [Dials((1, model.batch[1]), accumulate=3, scheduler=name, threads=2) for name in ("sync", "threads")]
    micro += [Dials((1, 5), accumulate=3, in_place=False, parts=2, barrier=name) for name in ("step", "phase")]
    dials = [
        *micro,
        Dials((1, model.batch[1]), in_place=False, parts=2),
        *(random_dials(random, model) for _ in range(4)),
    ]
    for own in dials:
        assert ended_with(model, precision, own, 0.5, optimizer) == whole, (own, number)
    unclipped = ended_with(model, precision, Dials(model.batch), 1e9, optimizer)
    assert unclipped[0][0] == whole[0][0]
    assert unclipped[1]["wpe.weight"] != whole[1]["wpe.weight"]


def test_a_norm_that_clips_nothing_changes_no_bit():
    model = MODELS["odd"]
    with_norm, without = (ended_with(model, "float32", Dials((3, 10)), clip) for clip in (1e9, 0.0))
    assert with_norm[1] == without[1]
    assert [told.loss for told in with_norm[0]] == [told.loss for told in without[0]]
    assert {told.norm for told in without[0]} == {None}


def test_the_norm_is_that_of_the_gradients(random):
    parameters = random_parameters(SMALL, random)
    batch = random_batch(SMALL, random)
    lazy = tuple(da.from_array(array, chunks=(2, 6)) for array in batch)
    (gradients,) = dask.compute(loss_and_gradients(SMALL, parameters, *lazy)[1], scheduler="sync")
    expected = math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in gradients.values()))
    with open_scheduler("sync", 1) as scheduler:
        step = TrainingStep(SMALL, (4, 12), (2, 6), OptimizerConfig(clip=1.0), in_place=True)
        handles, _ = step.submit(scheduler, step.initial(parameters), batch, 10)
        assert step.outcome(scheduler, handles).norm == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


CLIPPED = OptimizerConfig(clip=0.5, warmup=OPTIMIZER.warmup)


def norms_of(run):
    return [json.loads(line).get("norm") for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "dataflow", [{"scheduler": "threads", "barrier": "none"}, {"scheduler": "local", "threads": 2}]
)
def test_every_step_logs_its_norm_and_a_resumed_run_goes_on_with_the_same_bits(text, tmp_path, dataflow):
    fit(text, tmp_path / "whole", optimizer=CLIPPED)
    fit(text, tmp_path / "run", optimizer=CLIPPED, dataflow=dataflow, on_step=stopping_at(5))
    assert 5 <= len(norms_of(tmp_path / "run")) < 12
    daskgpt.fit(resume=tmp_path / "run", quiet=True)
    assert norms_of(tmp_path / "run") == norms_of(tmp_path / "whole")
    assert all(norm > 0.5 for norm in norms_of(tmp_path / "run")[:3])
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")
    fit(text, tmp_path / "plain", optimizer=OPTIMIZER)
    assert set(norms_of(tmp_path / "plain")) == {None}
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "whole")


@pytest.mark.parametrize("scheduler", ["threads", "local"])
def test_replicas_clip_their_own_gradients(text, tmp_path, scheduler):
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    local = {"local_steps": 3, "replicas": 2}
    model = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, vocabulary=257, positions=16)
    results = [
        daskgpt.fit(
            model,
            data,
            CLIPPED,
            {"scheduler": scheduler, "threads": 2, "batch_chunk": chunk},
            {"steps": 6, "validation_batches": 1, "out": str(tmp_path / f"run{chunk}")},
            local=local,
            quiet=True,
        )
        for chunk in (1, 2)
    ]
    assert results[0].losses == results[1].losses
    assert norms_of(tmp_path / "run1") == norms_of(tmp_path / "run2")
    assert all(norms_of(tmp_path / "run1"))
