"""The command lines, as a person starts them: what they print, write and answer to bad input."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from command_lines import PATIENCE, SMALL, run, write_text
from conftest import GOLDEN

import daskgpt
from daskgpt.config.stopping import STOPPED

MODEL, STATE = str(GOLDEN / "gpt2_small.bin"), str(GOLDEN / "gpt2_small_debug_state.bin")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("run") / "first"
    result = run("train", "--data", text, *SMALL, "--steps", 60, "--validate-every", 30, "--out", out)
    assert result.returncode == 0, result.stderr
    return out, result


def test_training_learns_and_writes_the_run(trained):
    out, result = trained
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == list(range(60))
    assert metrics[0]["loss"] == pytest.approx(np.log(257), abs=0.3)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.5
    assert [record["step"] for record in metrics if "validation_loss" in record] == [29, 59]
    assert all(record["tokens_per_s"] > 0 for record in metrics)
    written = tomllib.loads((out / "config.toml").read_text())
    assert written["model"]["channels"] == 32
    assert written["data"]["batch_size"] == 4
    assert written["run"]["steps"] == 60
    for part in ("model", "data", "scheduler", "--- sample", "nats a token", f"run written to {out}"):
        assert part in result.stdout
    assert "loss" in result.stderr  # the progress bar


def test_the_end_of_a_training_names_a_next_command_that_works(text, tmp_path):
    out = tmp_path / "it's a run"
    result = run("train", "--data", text, *SMALL, "--steps", 2, "--sample-tokens", 0, "--out", out)
    assert result.returncode == 0, result.stderr
    begin = "go on with: python -m daskgpt."
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(begin)]
    command, *arguments = shlex.split(line.removeprefix(begin))
    assert (command, arguments[0]) == ("generate", str(out))
    written = run(command, *arguments, "--tokens", 5)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith(arguments[-1])


def test_a_run_goes_on_from_a_model_file(trained, text, tmp_path):
    out, _ = trained
    result = run("train", "--data", text, "--init", out, *SMALL[6:], "--steps", 3, "--out", tmp_path / "second")
    assert result.returncode == 0, result.stderr
    first = json.loads((tmp_path / "second" / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["loss"] < last["loss"] + 0.5


def test_generate_from_a_run_folder_and_from_its_file(trained):
    out, _ = trained
    arguments = ("--prompt", "line 1", "--tokens", 30, "--seed", 4)
    first, again, file = (
        run("generate", out, *arguments),
        run("generate", out, *arguments),
        run("generate", out / "latest" / "model.safetensors", *arguments),
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("line 1")
    assert len(first.stdout) > 30
    assert first.stdout == again.stdout == file.stdout
    other = run("generate", out, *arguments[:4], "--seed", 5)
    assert other.stdout != first.stdout
    greedy = [run("generate", out, *arguments[:4], "--temperature", 0, "--seed", seed).stdout for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert run("generate", out, *arguments[:4], "--top-k", 1).stdout == greedy[0]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_verify_agrees_with_the_golden_state(precision):
    result = run("verify", MODEL, STATE, "--batch-chunk", 2, "--sequence-chunk", 8, "--precision", precision)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all agree"
    assert result.stdout.count(" ok") == 18


def test_verify_reads_the_runs_own_format(tmp_path):
    daskgpt.save(tmp_path / "model.safetensors", *daskgpt.load(MODEL))
    result, other = (run("verify", path, STATE) for path in (tmp_path / "model.safetensors", MODEL))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == other.stdout


def test_verify_finds_a_wrong_gradient(tmp_path):
    state = bytearray((GOLDEN / "gpt2_small_debug_state.bin").read_bytes())
    values = np.frombuffer(state, "<f4")
    values[-3] += 0.01  # one value of ln_f.bias
    wrong = tmp_path / "wrong.bin"
    wrong.write_bytes(state)
    result = run("verify", MODEL, wrong)
    assert result.returncode == 1
    assert [line.split()[0] for line in result.stdout.splitlines() if "DIFFERS" in line] == ["ln_f.bias"]
    assert result.stdout.splitlines()[-1] == "1 of 18 tensors differ"


BAD = {
    "preset": (["--preset", "tyni"], "preset: the name must be known; got preset=tyni. Did you mean tiny?"),
    "heads": (
        ["--heads", 3],
        "GPT2Config: channels must be a multiple of heads; got channels=128, heads=3. Try heads=4.",
    ),
    "chunk": (
        ["--batch-chunk", 5],
        "DataflowConfig: batch_chunk must divide batch_size; got batch_chunk=5, batch_size=12. Try batch_chunk=6.",
    ),
    "sequence": (
        ["--sequence-length", 512, "--positions", 256],
        "train: a sequence must not be longer than the model's positions; got sequence_length=512, positions=256. "
        "Shorten the sequence or give more --positions.",
    ),
    "vocabulary": (
        ["--vocabulary", 100],
        "train: the model must know every token id of the encoding; got encoding=bytes",
    ),
    "flag": (["--batchsize", 3], "daskgpt.train: --batchsize must be a known flag. Did you mean --batch-size?"),
    "type": (["--steps", "many"], "daskgpt.train: argument --steps: invalid int value: 'many'"),
    "steps": (["--steps", 0], "RunConfig: steps must be at least 1; got steps=0. Give 1 or more."),
    "scheduler": (["--scheduler", "thread"], "open_scheduler: the scheduler must be known; got scheduler=thread."),
    "data": (["--data", "nowhere.txt"], "nowhere.txt"),
    "init": (["--init", "nowhere.bin"], "nowhere.bin"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, tmp_path):
    arguments, message = BAD[name]
    out = tmp_path / "out"
    result = run("train", *arguments, "--out", out)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert message in lines[0]
    assert not out.exists()


def test_texts_that_are_empty_or_too_short(tmp_path):
    for content in ("", "too short"):
        path = tmp_path / "text.txt"
        path.write_text(content)
        result = run("train", "--data", path, "--out", tmp_path / "out")
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert not (tmp_path / "out").exists()


def test_token_files_with_an_id_outside_the_vocabulary(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    path = tmp_path / "tokens.bin"
    path.write_bytes(header.tobytes() + np.full(5000, 300, "<u2").tobytes())
    result = run("train", "--data", path, "--encoding", "bytes", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "id=300" in result.stderr
    assert not (tmp_path / "out").exists()


def test_model_files_that_are_none(tmp_path):
    content = (GOLDEN / "gpt2_small.bin").read_bytes()
    wrong_version = bytearray(content)
    wrong_version[4] = 9
    for name, data in {
        "text": b"no model at all",
        "truncated": content[:-100],
        "version": bytes(wrong_version),
    }.items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(data)
        for command in ("generate", "verify"):
            result = run(command, path, *([STATE] if command == "verify" else []))
            assert result.returncode == 2, name
            assert len(result.stderr.splitlines()) == 1, result.stderr
            assert result.stdout == ""


def test_a_folder_that_holds_a_run_is_never_overwritten(trained, text):
    out, _ = trained
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = run("train", "--data", text, *SMALL, "--steps", 2, "--out", out)
    assert result.returncode == 2
    assert result.stderr == f"RunFolder: the folder must not hold a run already; got out={out}. Give another --out.\n"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", ["train", "generate", "verify", "convert"])
def test_help_shows_defaults_and_units(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert "DASK_SCHEDULER_ADDRESS, else threads (default: auto)" in " ".join(result.stdout.split()) or command in (
        "generate",
        "convert",
    )
    if command == "train":
        assert "[tokens]" in result.stdout
        assert "(default: 2000)" in result.stdout


def test_ctrl_c_keeps_what_was_learnt(text, tmp_path):
    import signal
    import time

    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "daskgpt.train",
        "--data",
        str(text),
        *SMALL,
        "--steps",
        "100000",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 5):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == STOPPED, stderr
    assert "stopped after" in stdout + stderr
    assert (out / "latest" / "model.safetensors").exists()
    assert run("generate", out, "--tokens", 5).returncode == 0
