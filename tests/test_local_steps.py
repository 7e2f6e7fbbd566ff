"""Tests of local steps: they have the bits of a plain program of replicas and Nesterov steps on any scheduler."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from small_runs import MODEL, OPTIMIZER, losses_of, same, steps_in, stopping_at
from tolerances import TOLERANCES

import daskgpt
from daskgpt.data.dataset import batch
from daskgpt.kernels.optimizers import nesterov
from daskgpt.model.optimizer import OPTIMIZERS
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.train import main as train_command
from daskgpt.training import diloco
from daskgpt.training.diloco import LocalSteps
from daskgpt.training.job import Job
from daskgpt.training.start import open_dataset
from daskgpt.training.step import TrainingStep

STEPS, ROUND = 24, 7  # the last round is a shorter one
LOCAL = {"local_steps": ROUND, "replicas": 2}
SHAPE = {"batch_size": 4, "sequence_length": 16}


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    """Return the folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(small_text, out)
    return out


def train(text, out, *, local=LOCAL, on_step=None, resume="", optimizer=OPTIMIZER, **changes):
    own = {name: changes.pop(name) for name in ("scheduler", "threads", "batch_chunk", "precision") if name in changes}
    dataflow = {"scheduler": "sync"} | own
    if resume:
        return daskgpt.fit(dataflow=dataflow, run=changes, resume=resume, quiet=True)
    data = {"data": str(text)} | SHAPE
    run = {"steps": STEPS, "validation_batches": 1, "save_minutes": 0, "sample_tokens": 0, "out": str(out)} | changes
    return daskgpt.fit(MODEL, data, optimizer, dataflow, run, local=local, on_step=on_step, quiet=True)


def plain_program(text, replicas, length, optimizer, rate=0.7, beta=0.9):
    """Losses and parameters by steps of half the batch, each replica for itself, and Nesterov's formula by hand."""
    data = daskgpt.DataConfig(data=str(text), **SHAPE)
    tokens = open_dataset(data, MODEL.vocabulary).training
    size = SHAPE["batch_size"] // replicas
    step = TrainingStep(MODEL, (size, 16), (size, 16), optimizer)
    weights = daskgpt.initial_parameters(MODEL, 0)
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    moments, losses = [None] * replicas, []
    with open_scheduler("sync", 1) as scheduler:
        for first in range(0, STEPS, length):
            numbers = range(first, min(first + length, STEPS))
            ends, told = [], []
            for replica in range(replicas):
                state, own = step.initial(weights, moments[replica], first), slice(replica * size, (replica + 1) * size)
                told.append([])
                for number in numbers:
                    x, y = batch(tokens, **SHAPE, seed=0, step=number)
                    loss, state = step(scheduler, state, x[own], y[own], STEPS)
                    told[-1].append(loss)
                moments[replica] = {name: values_of(own) for name, own in state.layout.unpack(state.packs).items()}
                ends.append(moments[replica])
            losses += [sum(own) / replicas for own in zip(*told)]
            for name, start in weights.items():
                start = start.astype(np.float64)
                gradient = sum(start - end[f"weight.{name}"].astype(np.float64) for end in ends) / replicas
                buffer = beta * momentum[name].astype(np.float64) + gradient
                momentum[name] = buffer.astype(np.float32)
                weights[name] = (start - rate * (gradient + beta * buffer)).astype(np.float32)
    return losses, weights, momentum, moments


REPLICAS = [(2, 7, "adamw"), (4, 5, "adamw"), (1, 6, "adamw"), (2, 1, "momentum"), (2, 5, "muon")]


@pytest.mark.parametrize(("replicas", "length", "name"), REPLICAS)
def test_local_steps_match_a_plain_program(replicas, length, name, small_text, tmp_path):
    optimizer, local = daskgpt.OptimizerConfig(optimizer=name, warmup=3), {"local_steps": length, "replicas": replicas}
    found = train(small_text, tmp_path / "run", local=local, optimizer=optimizer)
    losses, weights, momentum, moments = plain_program(small_text, replicas, length, optimizer)
    assert found.losses == losses
    for tensor, value in weights.items():
        np.testing.assert_array_equal(found.parameters[tensor], value, tensor)
    stored = safetensors.numpy.load_file(tmp_path / "run" / "latest" / "optimizer.safetensors")
    for tensor in tensors(MODEL):
        np.testing.assert_array_equal(stored[f"outer.{tensor}"], momentum[tensor])
        for number in range(replicas):
            for kind in OPTIMIZERS[name].of(tensors(MODEL)[tensor]).moments:
                np.testing.assert_array_equal(stored[f"{kind}{number}.{tensor}"], moments[number][f"{kind}.{tensor}"])
    assert len(stored) == len(tensors(MODEL)) + replicas * len(OPTIMIZERS[name].state(tensors(MODEL)))


@pytest.mark.parametrize("seconds", [0, 1e-3, 1e9])
def test_steps_per_task_change_no_bit(seconds, small_text, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(diloco, "TASK_SECONDS", seconds)
    train(small_text, tmp_path / "run", scheduler="threads", threads=5, batch_chunk=1)
    assert same(tmp_path / "run", whole)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_no_bit(workers, cluster, small_text, whole, tmp_path):
    cluster.have(workers)
    train(small_text, tmp_path / "run", scheduler=cluster.address, snapshot_every=5)
    assert same(tmp_path / "run", whole)


def test_stopped_run_ends_with_its_round_and_resumes(small_text, whole, tmp_path):
    """Also under another scheduler; checkpoints wait until the replicas meet."""
    out = tmp_path / "run"
    assert train(small_text, out, on_step=stopping_at(9), save_every=3, keep=9).stopped
    assert steps_in(out) == [7, 14], "of 3, 6, 9, 12: where the replicas meet"
    again = train(None, None, resume=out, scheduler="threads", threads=3)
    assert again.first == 14
    assert steps_in(out) == [7, 14, 21, 24]
    assert same(out, whole)
    assert daskgpt.load(out)[1].keys() == again.parameters.keys()


def test_run_that_ended_within_a_round_continues(cluster, whole, tmp_path):
    """Its last round was a shorter one, and with more steps it would not end there."""
    cluster.have(2)
    for name, scheduler in (("here", "sync"), ("there", cluster.address)):
        train(None, None, resume=shutil.copytree(whole, tmp_path / name, symlinks=True), scheduler=scheduler, steps=30)
    assert len(losses_of(tmp_path / "here")) == 30
    assert same(tmp_path / "here", tmp_path / "there")


def test_estimated_end_within_a_round_has_the_same_bits(cluster, small_text, tmp_path, monkeypatch):
    """As of a run by minutes, of which workers know only what the client tells them."""
    cluster.have(2)

    def passed(self, done, seconds):
        self.changes += [(7, 17)] * (done == 7)
        return done == 7

    monkeypatch.setattr("daskgpt.training.job.Horizon.passed", passed)
    for name, scheduler in (("here", "sync"), ("there", cluster.address)):
        train(small_text, tmp_path / name, scheduler=scheduler)
    assert len(losses_of(tmp_path / "here")) == 17
    assert same(tmp_path / "here", tmp_path / "there")


def test_validations_wait_for_the_end_of_a_round(small_text, tmp_path):
    out = tmp_path / "run"
    train(small_text, out, validate_every=5)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] + 1 for record in records if "validation_loss" in record] == [7, 14, 21, 24]
    assert all(record["learning_rate"] > 0 and record["tokens_per_s"] > 0 for record in records)


@pytest.mark.parametrize("local", [{"replicas": 1}, {"local_steps": 8}, {"outer_momentum": 0.5}], ids=str)
def test_resume_keeps_the_replicas(local, whole):
    with pytest.raises(ValueError, match="resume"):
        daskgpt.fit(resume=whole, local=local, run={"steps": 40}, quiet=True)


def test_bfloat16_local_steps_resume_to_the_same_bits(small_text, tmp_path):
    train(small_text, tmp_path / "whole", precision="bfloat16")
    train(small_text, tmp_path / "run", precision="bfloat16", scheduler="threads", threads=2, on_step=stopping_at(3))
    train(None, None, resume=tmp_path / "run")
    assert same(tmp_path / "run", tmp_path / "whole")


def test_a_loss_that_is_not_finite_ends_the_run(small_text):
    wild = daskgpt.OptimizerConfig(warmup=0, learning_rate=1e30)
    with pytest.raises(RuntimeError, match="finite"):
        train(small_text, "", optimizer=wild)


def test_stretches_of_a_round_are_about_equal():
    given = daskgpt.DataConfig(**SHAPE), OPTIMIZER, daskgpt.DataflowConfig(), daskgpt.RunConfig(steps=130)
    with open_scheduler("sync", 1) as scheduler:
        steps = LocalSteps(Job(MODEL, *given, local=daskgpt.LocalConfig(local_steps=50, replicas=2)), scheduler)
    assert steps.together(0) == 1, "until a step is measured"
    steps.seconds = diloco.TASK_SECONDS / 40
    assert [steps.together(number) for number in (1, 26, 50, 75, 100)] == [25, 24, 25, 25, 30]


def test_nesterov_matches_pytorch(random):
    start, *ends = (random.normal(size=(5, 7)).astype(np.float32) for _ in range(4))
    momentum, buffer, expected = np.zeros_like(start), 0.0, start.astype(np.float64)
    for _ in range(3):
        gradient = np.mean([expected - end for end in ends], axis=0)
        buffer = 0.9 * buffer + gradient
        expected = expected - 0.7 * (gradient + 0.9 * buffer)
        start, momentum = nesterov(start, momentum, ends, rate=0.7, beta=0.9)
    assert start.dtype == momentum.dtype == np.float32
    np.testing.assert_allclose(start, expected, **TOLERANCES["kernel float32"])
    np.testing.assert_allclose(momentum, buffer, **TOLERANCES["kernel float32"])
    with pytest.raises(ValueError, match="shape"):
        nesterov(start, momentum, [start[1:]], rate=0.7, beta=0.9)


REFUSED = [("--replicas 2", "LocalConfig: replicas"), ("--outer-momentum 0.5", "LocalConfig: outer_momentum")]
REFUSED += [("--local-steps 9 --replicas 5", "replicas=6"), ("--local-steps 9 --skip-outliers 6", "skip_outliers=6.0")]
REFUSED += [("--local-steps 9 --barrier layer", "barrier=layer, local_steps=9")]
REFUSED += [("--local-steps 9 --replicas 4 --groups 2", "groups=2, batch_size / replicas=3")]
REFUSED += [("--local-steps 9 --replicas 4 --batch-chunk 6", "batch_chunk=6, batch_size / replicas=3")]
REFUSED += [("--local-steps 9 --timeline first", "timeline")]


@pytest.mark.parametrize(("flags", "told"), REFUSED)
def test_bad_local_settings_are_refused(flags, told, small_text, tmp_path):
    with pytest.raises(ValueError, match=told):
        train_command(["--data", str(small_text), "--out", str(tmp_path / "run"), *flags.split()])
    assert not (tmp_path / "run").exists()


def test_plan_counts_the_replicas(small_text, capsys):
    def peak(*flags):
        train_command(["--plan", "--data", str(small_text), "--scheduler", "threads", "--threads", "2", *flags])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer"))
        return float(line.split()[-2])

    one, two = (peak("--local-steps", "9", "--replicas", f"{count}") for count in (1, 2))
    assert peak() * 1.5 == pytest.approx(one, abs=0.1), "the moments of a replica and the outer momentum"
    assert peak() * 2.5 == pytest.approx(two, abs=0.1)
