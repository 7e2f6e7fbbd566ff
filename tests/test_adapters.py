"""Tests of low-rank adapters: gradients, one number, runs that hold adapters alone, and PEFT's files."""

import json
import re
import shutil
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
import small_runs
from conftest import random_parameters
from one_number import LLAMA, ODD
from small_runs import MODEL, fit_in_parts, same, stopping_at

import daskgpt
from daskgpt import audit, convert, train
from daskgpt.formats.safetensors import TensorFiles
from daskgpt.generation.sampler import sample
from daskgpt.model.parameters import (
    LORA_A,
    LORA_B,
    attention_operations,
    digest,
    merged,
    step_operations,
    tensors,
    trained_tensors,
)
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.training.rank_program import Pack

RANK = 3
ADAPTED = replace(MODEL, lora=RANK)
# Fast, so that B, which begins with zeros, soon changes the model.
OPTIMIZER = daskgpt.OptimizerConfig(learning_rate=0.01, warmup=3)


def with_other_base(run, copy):
    """Return a copy of a run whose base has the same size and other numbers."""
    shutil.copytree(run, copy, symlinks=True)
    content = bytearray((copy / "base.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "base.safetensors").write_bytes(content)
    return copy


@pytest.fixture(scope="module")
def whole(small_text, tmp_path_factory):
    """The folder of a run with threads."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return fit_in_parts(small_text, folder, "threads", config=ADAPTED, optimizer=OPTIMIZER, save_every=5, keep=5)


@pytest.mark.parametrize("config", [ODD, LLAMA], ids=["gpt2", "llama"])
def test_gradients_follow_from_those_of_the_merged_model(config, random):
    """With W + B A as the weight, dA = B^T dW and dB = dW A^T."""
    config = replace(config, lora=RANK)
    parameters = random_parameters(config, random, "float64")
    tokens, targets = (da.from_array(ids, chunks=(1, 5)) for ids in random.integers(0, 131, (2, 2, 10)).astype("i4"))
    loss, gradients = daskgpt.loss_and_gradients(config, parameters, tokens, targets)
    assert gradients.keys() == trained_tensors(config).keys()
    merged_loss, of_merged = daskgpt.loss_and_gradients(*merged(config, parameters), tokens, targets)
    computed, expected = dask.compute((loss, gradients), (merged_loss, of_merged), scheduler="sync")
    assert computed[0] == pytest.approx(expected[0], rel=1e-12)
    for name, values in computed[1].items():
        weight = re.sub(r"\.lora_[ab]", "", name)
        a, b = (parameters[weight.removesuffix(".weight") + part] for part in (LORA_A, LORA_B))
        wanted = b.T @ expected[1][weight] if name.endswith(LORA_A) else expected[1][weight] @ a.T
        np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12 * np.abs(wanted).max())


def test_checkpoints_hold_adapters_alone_and_a_run_is_the_merged_model(whole):
    names = TensorFiles(whole / "latest" / "model.safetensors", "test").keys()
    assert names == trained_tensors(ADAPTED).keys()
    assert TensorFiles(whole / "base.safetensors", "test").keys() == tensors(MODEL).keys()
    moments = TensorFiles(whole / "latest" / "optimizer.safetensors", "test").keys()
    assert moments == {f"{kind}.{name}" for kind in "mv" for name in names}
    config, parameters = daskgpt.load(whole)
    assert config == MODEL
    base = daskgpt.load(whole / "base.safetensors")[1]
    changed = {name for name in base if (base[name] != parameters[name]).any()}
    assert changed == {name for name, tensor in tensors(MODEL).items() if tensor.row.is_conv1d}


def test_result_is_the_merged_model(small_text, tmp_path):
    result = small_runs.fit(small_text, tmp_path / "run", config=ADAPTED, optimizer=OPTIMIZER)
    assert result.config == MODEL
    assert digest(result.parameters) == digest(daskgpt.load(tmp_path / "run")[1])


def test_adapters_of_given_parameters_begin_without_effect(small_text):
    parameters = daskgpt.initial_parameters(MODEL, 5)
    plain, adapted = (
        small_runs.fit(small_text, config=config, parameters=parameters, steps=1) for config in (MODEL, ADAPTED)
    )
    assert plain.losses == adapted.losses


@pytest.mark.parametrize("engine", ["ranks", "tasks"])
def test_two_workers_give_the_bits_of_threads(engine, cluster, small_text, whole, tmp_path):
    cluster.have(2)
    options = {"config": ADAPTED, "optimizer": OPTIMIZER, "engine": engine}
    assert same(fit_in_parts(small_text, tmp_path / "run", cluster.address, **options), whole)


@pytest.mark.parametrize("killed", ["holder", "other"])
def test_base_is_sent_again_if_the_only_worker_with_it_dies(
    killed, cluster, small_text, whole, tmp_path, capsys, monkeypatch
):
    cluster.have(2)
    sent, held = [], ClusterScheduler.held

    def sending(scheduler, value):
        future = held(scheduler, value)
        sent.extend([future] if isinstance(value, Pack) else [])
        return future

    monkeypatch.setattr(ClusterScheduler, "held", sending)

    def kill(step, metrics):
        if step == 7:  # a recovery point is there since step 3
            (base,) = sent
            base.client.replicate(base, n=1)  # not more
            ((holder,),) = base.client.who_has(base).values()
            workers = base.client.scheduler_info(n_workers=-1)["workers"]
            (name,) = (worker["name"] for at, worker in workers.items() if (at == holder) == (killed == "holder"))
            cluster.kill(name)

    options = {"config": ADAPTED, "optimizer": OPTIMIZER, "snapshot_every": 3}
    fit_in_parts(small_text, tmp_path / "run", cluster.address, kill, **options)
    assert "a recovery point (" in capsys.readouterr().out
    assert len(sent) == (2 if killed == "holder" else 1)
    assert same(tmp_path / "run", whole)


def test_resumed_run_has_the_bits_of_an_uninterrupted_one(small_text, whole, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"config": ADAPTED, "optimizer": OPTIMIZER, "save_every": 5, "keep": 5}
    fit_in_parts(small_text, out, "threads", stopping_at(7), **options)
    assert train.main(["--resume", str(out), "--scheduler", "sync"]) == 0
    assert same(out, whole)
    capsys.readouterr()
    assert audit.main([str(out)]) == 0, capsys.readouterr()


def test_adapters_without_their_base_or_beside_another_one_are_refused(whole, tmp_path):
    shutil.copytree(whole / "latest", tmp_path / "alone")
    shutil.copy(whole / "latest" / "model.safetensors", tmp_path / "alone.safetensors")
    other = with_other_base(whole, tmp_path / "other")
    for path in (tmp_path / "alone", tmp_path / "alone.safetensors", other, other / "latest" / "model.safetensors"):
        with pytest.raises(FileNotFoundError, match=r"must have the model.*base\.safetensors \((missing|another one)"):
            daskgpt.load(path)
    (other / "latest" / "state.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"base\.safetensors \(another one"):
        daskgpt.load(other / "latest" / "model.safetensors")
    assert daskgpt.load(other / "base.safetensors")[0] == MODEL


@pytest.mark.parametrize("base", ["missing", "another one"])
def test_base_that_is_not_there_is_reported_once(base, whole, tmp_path, capsys):
    run = with_other_base(whole, tmp_path / "run")
    if base == "missing":
        (run / "base.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"^[^\n]*must have the model[^\n]*\({base}[^\n]*$") as error:
        train.main(["--resume", str(run)])
    assert str(error.value).count("base.safetensors") == 1
    assert audit.main([str(run)]) == 1
    printed = capsys.readouterr()
    (fault,) = [line for line in printed.out.splitlines() if line.startswith("FAULT")]
    assert f"base.safetensors ({base}" in fault
    assert "NOT AS WRITTEN" in printed.out
    assert "base.safetensors" not in printed.err


def test_parameters_with_adapters_are_refused(small_text):
    parameters = daskgpt.initial_parameters(ADAPTED, 0)
    for config in (MODEL, ADAPTED):
        with pytest.raises(ValueError, match=r"lora_a.*unknown.*Leave adapters out: daskgpt\.fit"):
            small_runs.fit(small_text, config=config, parameters=parameters)


def test_checkpoint_is_read_through_a_link(whole, tmp_path):
    (tmp_path / "link").symlink_to(whole / "latest")
    assert daskgpt.load(tmp_path / "link")[0] == MODEL


@pytest.mark.parametrize("config", [MODEL, ADAPTED])
def test_file_of_a_user_is_not_written_over(config, small_text, tmp_path):
    (tmp_path / "base.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="must not hold a run"):
        small_runs.fit(small_text, tmp_path, config=config, steps=1)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_audit_from_the_beginning_needs_no_model_but_the_run_s(small_text, tmp_path, capsys):
    model = tmp_path / "model.safetensors"
    daskgpt.save(model, MODEL, daskgpt.initial_parameters(MODEL, 0))
    small_runs.fit(small_text, tmp_path / "run", config=ADAPTED, init=str(model), steps=3)
    model.unlink()
    assert audit.main([str(tmp_path / "run")]) == 0
    assert "not computed" not in capsys.readouterr().out


def test_decoders_read_the_merged_model(random):
    parameters = random_parameters(ADAPTED, random)
    base = {name: parameters[name] for name in tensors(MODEL)}
    ids = [
        list(sample(*model, [1, 2], 8, temperature=0.0))
        for model in ((ADAPTED, parameters), merged(ADAPTED, parameters), (MODEL, base))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_operations_of_a_step_leave_out_gradients_of_constants():
    """Forward and one of the two backward products for every number, the other one for adapters."""
    operations = [step_operations(config, 2, 8) - attention_operations(config, 2, 8) for config in (MODEL, ADAPTED)]
    count = operations[0] // (6 * 16)
    adapters = sum(int(np.prod(tensor.shape)) for tensor in trained_tensors(ADAPTED).values())
    assert operations[1] == (4 * count + 6 * adapters) * 16


def test_command_adapts_a_model(small_text, tmp_path, capsys):
    model, flags = tmp_path / "model.safetensors", ["--data", str(small_text), "--sample-tokens", "0", "--steps", "2"]
    daskgpt.save(model, MODEL, daskgpt.initial_parameters(MODEL, 0))
    with pytest.raises(ValueError, match="adapters must have a model to adapt; got lora=4"):
        train.main(["--lora", "4", *flags])
    assert train.main(["--init", str(model), "--lora", "4", "--out", str(tmp_path / "run"), *flags]) == 0
    count = sum(int(np.prod(tensor.shape)) for tensor in trained_tensors(replace(MODEL, lora=4)).values())
    assert f" parameters, {count:,} of them trained: 1 block, " in capsys.readouterr().out


def test_model_that_transformers_does_not_have_gets_no_files_of_peft(small_text, tmp_path):
    config = replace(MODEL, norm="rmsnorm", position="rotary", activation="swiglu", bias="qkv", qk_norm="rmsnorm")
    small_runs.fit(small_text, tmp_path / "run", config=replace(config, lora=RANK), steps=1)
    with pytest.raises(ValueError, match="has no qk_norm"):
        convert.main([str(tmp_path / "run"), str(tmp_path / "peft"), "--to", "peft"])
    assert not (tmp_path / "peft").exists()


def test_saved_model_is_merged_and_finite(tmp_path, random):
    parameters = random_parameters(ADAPTED, random)
    daskgpt.save(tmp_path / "model.safetensors", ADAPTED, parameters)
    config, values = daskgpt.load(tmp_path / "model.safetensors")
    assert config == MODEL
    assert digest(values) == digest(merged(ADAPTED, parameters)[1])
    large = {name: value + np.float32(3e19) * ("lora" in name) for name, value in parameters.items()}
    with pytest.raises(ValueError, match="must be finite"):
        daskgpt.save(tmp_path / "large.safetensors", ADAPTED, large)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_files_of_peft_give_the_merged_weights(name, small_text, tmp_path, monkeypatch):
    """Beside a folder of the base and one of the merged model, as transformers has them: W + (alpha / r) B A."""
    llama = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": "none", "kv_heads": 1}
    config = replace(MODEL, **llama) if name == "llama" else MODEL
    parameters, options = daskgpt.initial_parameters(config, 0), {"optimizer": OPTIMIZER, "out": tmp_path / "run"}
    daskgpt.save(tmp_path / "base.safetensors", config, parameters)
    small_runs.fit(small_text, config=replace(config, lora=RANK), parameters=parameters, **options)
    for source, target in (("run", "merged"), ("base.safetensors", "base")):
        assert convert.main([str(tmp_path / source), str(tmp_path / target)]) == 0
    assert convert.main([str(tmp_path / "run"), str(tmp_path / "peft"), "--to", "peft"]) == 0
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    base, whole, adapters = (
        {name: stored.read() for name, stored in TensorFiles(tmp_path / folder / file, "test").items()}
        for folder, file in (
            ("base", "model.safetensors"), ("merged", "model.safetensors"), ("peft", "adapter_model.safetensors")
        )
    )  # fmt: skip
    layers = {key.rpartition(".lora_")[0] for key in adapters}
    assert {layer.rpartition(".")[2] for layer in layers} == set(settings["target_modules"])
    prefix = "base_model.model." + ("transformer." if name == "gpt2" else "")
    changed = {key for key in base if (base[key] != whole[key]).any()}
    assert {f"{layer.removeprefix(prefix)}.weight" for layer in layers} == changed
    for layer in layers:
        a, b = (adapters[f"{layer}.lora_{part}.weight"] for part in "AB")
        change = settings["lora_alpha"] / settings["r"] * (b @ a)
        change = change.T if settings["fan_in_fan_out"] else change
        weight = f"{layer.removeprefix(prefix)}.weight"
        np.testing.assert_allclose(base[weight] + change, whole[weight], rtol=1e-5, atol=1e-6)
