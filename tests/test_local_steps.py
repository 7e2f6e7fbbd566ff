"""Local steps: the bits of a plain program of replicas and Nesterov steps, whoever runs them, stopped or not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_lines import refused, run, write_text
from machines import KillItself, Machines
from small_runs import MODEL, OPTIMIZER, losses_of, steps_in, stopping_at, tensors_of
from tolerances import TOLERANCES

import daskgpt
from daskgpt.data.dataset import batch
from daskgpt.kernels.compilation import compile_all
from daskgpt.kernels.nesterov import nesterov
from daskgpt.model.optimizer import OPTIMIZERS
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training import local_steps
from daskgpt.training.local_steps import LocalSteps
from daskgpt.training.start import open_dataset
from daskgpt.training.step import TrainingStep

STEPS, ROUND, KILLED = 24, 7, 30  # the last round is a shorter one
LOCAL = {"local_steps": ROUND, "replicas": 2}
SHAPE = {"batch_size": 4, "sequence_length": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    compile_all(np.float32)
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with Machines(tmp_path_factory.mktemp("machines"), 0) as found:
        yield found


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(text, out)
    return out


def train(text, out, *, local=LOCAL, on_step=None, resume="", quiet=True, optimizer=OPTIMIZER, **changes):
    dataflow = {"scheduler": "sync"} | {
        n: changes.pop(n) for n in ("scheduler", "threads", "batch_chunk", "precision") if n in changes
    }
    settings = {"steps": STEPS, "validation_batches": 1, "save_minutes": 0, "sample_tokens": 0} | changes
    if resume:
        return daskgpt.fit(dataflow=dataflow, run=changes, resume=resume, on_step=on_step, quiet=quiet)
    data = {"data": str(text)} | SHAPE
    run = settings | ({"out": str(out)} if out else {})
    return daskgpt.fit(MODEL, data, optimizer, dataflow, run, local=local, on_step=on_step, quiet=quiet)


def same(out, whole):
    return losses_of(out) == losses_of(whole) and tensors_of(out) == tensors_of(whole)


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
                state = step.initial(weights, moments[replica], first)
                own = slice(replica * size, (replica + 1) * size)
                told.append([])
                for number in numbers:
                    x, y = batch(tokens, **SHAPE, seed=0, step=number)
                    loss, state = step(scheduler, state, x[own], y[own], STEPS)
                    told[-1].append(loss)
                values = {name: values_of(value) for name, value in state.layout.unpack(state.packs).items()}
                moments[replica] = values
                ends.append(values)
            losses += [sum(own) / replicas for own in zip(*told)]
            for name, start in weights.items():
                start = start.astype(np.float64)
                gradient = (
                    sum((start - end[f"weight.{name}"].astype(np.float64) for end in ends), np.float64(0)) / replicas
                )
                buffer = beta * momentum[name].astype(np.float64) + gradient
                momentum[name] = buffer.astype(np.float32)
                weights[name] = (start - rate * (gradient + beta * buffer)).astype(np.float32)
    return losses, weights, momentum, moments


@pytest.mark.parametrize(
    ("replicas", "length", "name"),
    [(2, 7, "adamw"), (4, 5, "adamw"), (1, 6, "adamw"), (2, 1, "momentum"), (2, 5, "muon")],
)
def test_the_bits_are_those_of_replicas_for_themselves_and_nesterov_by_hand(replicas, length, name, text, tmp_path):
    optimizer = daskgpt.OptimizerConfig(optimizer=name, warmup=3)
    local = {"local_steps": length, "replicas": replicas}
    found = train(text, tmp_path / "run", local=local, optimizer=optimizer)
    losses, weights, momentum, moments = plain_program(text, replicas, length, optimizer)
    assert found.losses == losses
    for tensor, value in weights.items():
        np.testing.assert_array_equal(found.parameters[tensor], value, tensor)
    stored = stored_moments(tmp_path / "run")
    for tensor in tensors(MODEL):
        np.testing.assert_array_equal(stored[f"outer.{tensor}"], momentum[tensor])
        for number in range(replicas):
            for kind in OPTIMIZERS[name].of(tensors(MODEL)[tensor]).moments:
                np.testing.assert_array_equal(stored[f"{kind}{number}.{tensor}"], moments[number][f"{kind}.{tensor}"])
    own = OPTIMIZERS[name].state(tensors(MODEL))
    assert len(stored) == len(tensors(MODEL)) + replicas * len(own)


def stored_moments(run):
    from safetensors.numpy import load_file

    return load_file(run / "latest" / "optimizer.safetensors")


def test_one_replica_that_makes_one_step_with_rate_1_trains_as_if_there_were_none(text, tmp_path):
    """The outer step is rounded once, from float64: so it ends where the replica stands."""
    alone = train(text, None, local=None)
    found = train(text, None, local={"local_steps": 1, "outer_learning_rate": 1, "outer_momentum": 0})
    assert found.losses == alone.losses
    assert found.validation_loss == alone.validation_loss
    for name, value in alone.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value, name)


@pytest.mark.parametrize("seconds", [0, 1e-3, 1e9])
def test_no_bit_depends_on_how_many_steps_are_a_task(seconds, text, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(local_steps, "TASK_SECONDS", seconds)
    train(text, tmp_path / "run")
    assert same(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "dials", [{"scheduler": "threads", "threads": 2}, {"scheduler": "threads", "threads": 5, "batch_chunk": 1}]
)
def test_no_bit_depends_on_threads_and_chunks(dials, text, whole, tmp_path):
    train(text, tmp_path / "run", **dials)
    assert same(tmp_path / "run", whole)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_bit_depends_on_the_workers_of_a_cluster(workers, machines, text, whole, tmp_path):
    machines.have(workers)
    train(text, tmp_path / "run", scheduler=machines.address, snapshot_every=5)
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inner.steps", "outer.step", "inner.end", "recovery.copy"])
def test_a_worker_that_is_killed_costs_no_bit(kind, machines, text, tmp_path, monkeypatch):
    from distributed import Client

    monkeypatch.setattr(local_steps, "TASK_SECONDS", 1e-3)  # several tasks a round, and recovery points inside of one
    train(text, tmp_path / "whole", steps=KILLED)
    machines.have(3)
    plugin = KillItself(kind, 4, tmp_path / "killed")
    with Client(machines.address) as client:
        client.register_plugin(plugin)
        try:
            train(text, tmp_path / "run", steps=KILLED, scheduler=machines.address, snapshot_every=3, save_every=10)
        finally:
            client.unregister_worker_plugin(plugin.name)
    assert (tmp_path / "killed").exists(), "nobody was killed"
    assert same(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_is_stopped_ends_with_its_round_and_goes_on_as_if_it_had_not(text, whole, tmp_path):
    """Also under another scheduler; checkpoints wait until the replicas meet."""
    out = tmp_path / "run"
    found = train(text, out, on_step=stopping_at(9), save_every=3, keep=9)
    assert found.stopped
    assert steps_in(out) == [7, 14], "of 3, 6, 9, 12: where the replicas meet"
    again = train(None, None, resume=out, scheduler="threads", threads=3)
    assert again.first == 14
    assert steps_in(out) == [7, 14, 21, 24]
    assert same(out, whole)
    assert daskgpt.load(out)[1].keys() == again.parameters.keys()


def test_validations_wait_until_the_replicas_meet(text, tmp_path):
    out = tmp_path / "run"
    train(text, out, validate_every=5)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] + 1 for record in records if "validation_loss" in record] == [7, 14, 21, 24]
    assert all(record["learning_rate"] > 0 and record["tokens_per_s"] > 0 for record in records)


def test_a_run_that_is_resumed_keeps_its_replicas(text, whole):
    for local in ({"replicas": 1}, {"local_steps": 8}, {"outer_momentum": 0.5}):
        with pytest.raises(ValueError, match="--resume keeps the run's own settings"):
            daskgpt.fit(resume=whole, local=local, run={"steps": 40}, quiet=True)


def test_bfloat16_is_the_same_under_threads_and_stopped(text, tmp_path):
    compile_all(np.float32, bfloat16=True)
    for name, changes in {
        "whole": {},
        "run": {"scheduler": "threads", "threads": 2, "on_step": stopping_at(3)},
    }.items():
        train(text, tmp_path / name, precision="bfloat16", **changes)
    train(None, None, resume=tmp_path / "run")
    assert same(tmp_path / "run", tmp_path / "whole")


def test_a_loss_that_is_not_finite_ends_the_run(text):
    wild = daskgpt.OptimizerConfig(warmup=0, learning_rate=1e30)
    with pytest.raises(RuntimeError, match="must stay finite"):
        train(text, None, optimizer=wild)


def test_stretches_of_a_round_are_about_equal(text):
    job = daskgpt.training.job.Job(
        MODEL, daskgpt.DataConfig(**SHAPE), OPTIMIZER, daskgpt.DataflowConfig(), daskgpt.RunConfig(steps=130),
        local=daskgpt.LocalConfig(local_steps=50, replicas=2),
    )  # fmt: skip
    with open_scheduler("sync", 1) as scheduler:
        steps = LocalSteps(job, scheduler)
    assert steps.together(0) == 1, "until a step is measured"
    steps.seconds = local_steps.TASK_SECONDS / 40
    assert [steps.together(number) for number in (1, 26, 50, 75, 100)] == [25, 24, 25, 25, 30]


def test_nesterov_is_the_formula_of_torch(random):
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
    with pytest.raises(ValueError, match="nesterov: ends must have shape"):
        nesterov(start, momentum, [start[1:]], rate=0.7, beta=0.9)


REFUSED = {
    "--replicas 2": "LocalConfig: replicas must come with local_steps; got replicas=2. Give --local-steps, say 50.",
    "--outer-momentum 0.5": "LocalConfig: outer_momentum must come with local_steps; got outer_momentum=0.5. "
    "Give --local-steps, say 50.",
    "--local-steps 9 --replicas 5": "train: replicas must divide batch_size; got replicas=5, batch_size=12. "
    "Try replicas=6.",
    "--local-steps 9 --barrier layer": "train: barrier must be step where replicas make steps of their own; got "
    "barrier=layer, local_steps=9. Leave one of them out.",
    "--local-steps 9 --replicas 4 --groups 2": "train: groups must be a power of two that divides batch_size / "
    "replicas; got groups=2, batch_size / replicas=3. Try groups=1.",
    "--local-steps 9 --replicas 4 --batch-chunk 6": "DataflowConfig: batch_chunk must divide batch_size / replicas; "
    "got batch_chunk=6, batch_size / replicas=3. Try batch_chunk=3.",
    "--local-steps 9 --timeline first": "train: a timeline is of steps that all threads share; got local_steps=9. "
    "Leave out --timeline or --local-steps.",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(flags, text, tmp_path):
    out = tmp_path / "run"
    assert refused(run("train", "--data", text, "--out", out, *flags.split())) == REFUSED[flags]
    assert not out.exists()


def test_a_plan_counts_the_replicas(text):
    def peak(*flags):
        result = run("train", "--plan", "--data", text, "--scheduler", "threads", "--threads", "2", *flags)
        assert result.returncode == 0, result.stderr
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("optimizer"))
        return float(line.split()[-2])

    one, two = (peak("--local-steps", "9", "--replicas", f"{count}") for count in (1, 2))
    assert peak() * 1.5 == pytest.approx(one, abs=0.1), "the moments of a replica and the outer momentum"
    assert peak() * 2.5 == pytest.approx(two, abs=0.1)
