"""Tests of replays: tensors that are computed again, and the batch behind a loss."""

import re

import numpy as np
import pytest
from saved_tensors import saved_tensors
from small_runs import MODEL, fit, losses_of

import daskgpt
from daskgpt import rewind
from daskgpt.training.checkpoint import checkpoints

WHILE_TRAINING = {"scheduler": "sync", "grain": "kernel", "batch_chunk": 2, "sequence_chunk": 16}
OTHER = ("--scheduler", "threads", "--threads", "2", "--batch-chunk", "1", "--sequence-chunk", "8")
CLIPPED = daskgpt.OptimizerConfig(warmup=3, clip=0.5, dropout=0.1)


@pytest.fixture(scope="module")
def trained(small_text, tmp_path_factory):
    """A run, and the tensors that were saved while it trained."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with saved_tensors() as tensors:
        fit(small_text, out, dataflow=WHILE_TRAINING, optimizer=CLIPPED, save_every=4, keep=2, keep_best=0)
    return out, tensors


def rewound(run, step, name, folder, *flags):
    """A tensor of a step that counts from 0."""
    path = folder / "tensor.npy"
    assert rewind.main([str(run), "--step", str(step + 1), "--tensor", name, "--out", str(path), *flags]) == 0
    return np.load(path)


@pytest.mark.parametrize("step", [2, 9, 11])
def test_tensors_have_the_bits_of_training(step, trained, tmp_path):
    run, tensors = trained
    assert [folder.name for folder in checkpoints(run)] == ["step-00000008", "step-00000012"]
    names = [name for number, name in tensors if number == step]
    chosen = [name for name in names if re.search(r"h\.0\.attn|losses|wte|ln_f", name) and not name.startswith("adamw")]
    assert {"attention.forward-h.0.attn", "attention.backward-h.0.attn.qkv", "m.h.0.attn.c_attn.weight"} < set(chosen)
    assert "linear.backward-h.0.attn.c_attn.weight" in chosen
    for name in np.random.default_rng(step).permutation(chosen)[:6]:
        array = rewound(run, step, name, tmp_path, *OTHER)
        np.testing.assert_array_equal(array.view(np.uint32), tensors[step, name].view(np.uint32), err_msg=name)


def test_names_and_statistics(trained, called):
    run, tensors = trained
    code, listed = called(rewind, run, "--step", 10)
    names = [line.partition(" ")[0] for line in listed.splitlines()]
    assert code == 0
    assert names[:3] == ["tokens", "targets", "weight.wte.weight"]
    assert names.index("attention.forward-h.0.attn.y") < names.index("attention.backward-h.0.attn.dqkv")
    short = ["h.0.attn.y", "gradient.wte.weight", "h.0.ln_1.weight", "m.h.0.ln_1.weight", "targets"]
    flags = [word for name in short for word in ("--tensor", name)]
    code, shown = called(rewind, run, "--step", 10, *flags, *OTHER)
    head, *lines = shown.splitlines()
    assert code == 0
    assert head.startswith("step 10: loss ")
    assert head.endswith(", as written")
    assert [line.partition(":")[0] for line in lines] == [
        "attention.forward-h.0.attn.y",
        "embedding.backward-wte+wpe.dwte",
        "weight.h.0.ln_1.weight",
        *short[3:],
    ]
    y = tensors[9, "attention.forward-h.0.attn"].astype(np.float64)
    assert f"float32 (4, 16, 16) min {y.min():.6g} max {y.max():.6g} mean {y.mean():.6g} rms" in lines[0]
    assert "zeros 0.00% not finite 0 sha256" in lines[0]


def test_what_cannot_be_rewound_is_refused(trained, called, small_text, tmp_path):
    run, _ = trained
    with pytest.raises(ValueError, match=r"tensor=h\.0\.atn\.y\. The nearest names: h\.0\.attn\.y, "):
        called(rewind, run, "--step", 10, "--tensor", "h.0.atn.y")
    with pytest.raises(ValueError, match=r"one of 1 to 13, the last of which is to come; got step=14"):
        called(rewind, run, "--step", 14, "--tensor", "targets")
    with pytest.raises(ValueError, match="--out must be given with one --tensor"):
        called(rewind, run, "--step", 2, "--rows", "--out", tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"--out must end with \.npy"):
        called(rewind, run, "--step", 2, "--tensor", "wte.weight", "--out", run / "chain.jsonl")
    assert called(rewind, run, "--step", 13, "--tensor", "wte.weight")[0] == 0  # the state after the last step
    out, parameters = tmp_path / "own", daskgpt.initial_parameters(MODEL, seed=5)
    fit(small_text, out, parameters=parameters, save_every=6, keep=1, keep_best=0)
    with pytest.raises(ValueError, match=r"checkpoints=step-00000012\. .*a program gave its parameters"):
        called(rewind, out, "--step", 12, "--tensor", "h.0.attn.y")


def test_rewind_on_a_cluster(trained, called, cluster):
    cluster.have(2)
    run, _ = trained
    wanted = ("--step", 11, "--tensor", "h.0.mlp.y", "--tensor", "gradient.wte.weight", "--rows")
    assert called(rewind, run, *wanted, "--scheduler", cluster.address) == called(rewind, run, *wanted)


def test_rows_are_the_texts_of_a_step_the_hardest_first(trained, called, small_text):
    run, _ = trained
    code, shown = called(rewind, run, "--step", 10, "--rows")
    rows = shown.split("--- row ")[1:]
    means = [float(row.split()[1]) for row in rows]
    assert (code, len(rows), means) == (0, 4, sorted(means, reverse=True))
    assert np.mean(means) == pytest.approx(losses_of(run)[9], abs=1e-4)
    assert len(set(means)) > 1
    text = small_text.read_text()
    assert all(row.partition("\n")[2].strip() in text for row in rows)
