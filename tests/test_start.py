"""Where a run starts: what --init takes from a run or a model file, and which encoding a model means."""

from __future__ import annotations

import json
import re
import shutil
import tomllib

import numpy as np
import pytest
from command_lines import refused, run, write_text

import daskgpt
from daskgpt.data.encodings import get_encoding
from daskgpt.formats.llmc import write_model

SHORT = "--batch-size 4 --steps 3 --validation-batches 1 --warmup 0 --learning-rate 1e-5 --sample-tokens 0"
FIRST = "--blocks 1 --heads 2 --channels 16 --sequence-length 32 --validation-fraction 0.2 --batch-size 4 --steps 40 "
FIRST += "--validation-batches 1 --warmup 5 --sample-tokens 0"
SHORT, FIRST = SHORT.split(), FIRST.split()
NOWHERE = "get_encoding: DASKGPT_VOCABULARY must name a folder with GPT-2's encoder.json; got DASKGPT_VOCABULARY="


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def first(tmp_path_factory, text):
    """A run that was given a relative path, from another folder than those that follow."""
    out = tmp_path_factory.mktemp("run") / "first"
    result = run("train", "--data", text.name, *FIRST, "--out", out, cwd=text.parent)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def vocabulary():
    try:
        get_encoding("gpt2")
    except FileNotFoundError as error:
        pytest.skip(f"GPT-2's vocabulary is not here: {error}")


def config_of(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def losses_of(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_of(path, **numbers):
    """A model file of the format of llm.c, without a run around it."""
    config = daskgpt.preset("tiny", **{"blocks": 1, "heads": 2, "channels": 16, "positions": 32} | numbers)
    write_model(path, config, daskgpt.initial_parameters(config, seed=0))
    return path


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_run_that_goes_on_takes_everything_from_the_first(first, tmp_path, kind):
    out = tmp_path / "second"
    result = run(
        "train", "--init", first if kind == "folder" else first / "latest" / "model.safetensors", *SHORT, "--out", out
    )
    assert result.returncode == 0, result.stderr
    old, new = config_of(first), config_of(out)
    assert new["model"] == old["model"]
    assert new["data"] == old["data"]
    assert losses_of(out)[0] < np.mean(losses_of(first)[-3:]) + 0.3 < losses_of(first)[0]


def test_a_model_file_alone_knows_its_encoding_and_length(first, text, tmp_path):
    alone = shutil.copy(first / "latest" / "model.safetensors", tmp_path / "alone.safetensors")
    line = refused(run("train", "--init", alone, "--data", text, "--encoding", "gpt2", "--out", tmp_path / "out"))
    assert "; got encoding=gpt2, init=" in line
    result = run("train", "--init", alone, "--data", text, *SHORT, "--out", tmp_path / "second")
    assert result.returncode == 0, result.stderr
    data = config_of(tmp_path / "second")["data"]
    assert (data["encoding"], data["sequence_length"]) == ("bytes", 32)
    assert losses_of(tmp_path / "second")[0] < losses_of(first)[0] - 0.3


def test_a_run_folder_of_an_older_version_still_loads(first, tmp_path):
    copy = shutil.copytree(first, tmp_path / "copy")
    daskgpt.save(copy / "model.bin", *daskgpt.load(first))
    for path in copy.glob("step-*"):
        shutil.rmtree(path)
    (config, parameters), (other, same) = daskgpt.load(first), daskgpt.load(copy)
    assert config == other
    assert all(values.tobytes() == same[name].tobytes() for name, values in parameters.items())
    line = refused(run("train", "--out", copy))
    assert line.startswith("RunFolder: the folder must not hold a run already")
    arguments = ("--prompt", "line 1", "--tokens", 20)
    new, old, file = (run("generate", path, *arguments) for path in (first, copy, copy / "model.bin"))
    assert new.returncode == 0, new.stderr
    assert new.stdout == old.stdout == file.stdout
    result = run("train", "--init", copy, *SHORT, "--out", tmp_path / "second")
    assert result.returncode == 0, result.stderr
    assert config_of(tmp_path / "second")["data"] == config_of(first)["data"]


def test_a_flag_that_was_given_counts_although_it_is_the_default(first, tmp_path):
    got = f"; got channels=128, init={first} (channels=16)"
    line = refused(run("train", "--init", first, "--channels", 128, "--out", tmp_path / "out"))
    assert line == f"train: --init decides the size of the model{got}. Leave these flags out."
    line = refused(run("train", "--init", first, "--preset", "tiny", "--out", tmp_path / "out"))
    assert "; got blocks=4, heads=4, channels=128, init=" in line
    line = refused(run("train", "--init", first, "--sequence-length", 64, "--out", tmp_path / "out"))
    assert line == (
        "train: a sequence must not be longer than the model's positions; got sequence_length=64, positions=32. "
        "Shorten the sequence."
    )
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_with_another_text_and_shorter_sequences(first, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("to be, or not to be, that is the question\n" * 300)
    out = tmp_path / "second"
    result = run("train", "--init", first, "--data", other, "--sequence-length", 16, *SHORT, "--out", out)
    assert result.returncode == 0, result.stderr
    data = config_of(out)["data"]
    assert (data["data"], data["sequence_length"]) == (str(other.resolve()), 16)
    assert config_of(out)["model"]["positions"] == 32


def test_the_encoding_stays_that_of_the_run(first, text, tmp_path):
    line = refused(run("train", "--init", first, "--encoding", "gpt2", "--out", tmp_path / "out"))
    assert line == (
        f"train: the encoding must be that of the run to start from; got encoding=gpt2, init={first} (bytes). "
        "Leave --encoding out."
    )
    # A run that says gpt2, whatever its model: another text is then encoded as gpt2 too, which fails where told to.
    copy = shutil.copytree(first, tmp_path / "gpt2")
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace('encoding = "bytes"', 'encoding = "gpt2"'))
    arguments = ("--init", copy, "--data", text, "--out", tmp_path / "out")
    assert refused(run("train", *arguments, DASKGPT_VOCABULARY=str(tmp_path))).startswith(NOWHERE)


def test_a_run_of_gpt2_tokens_goes_on_with_gpt2_tokens(vocabulary, text, tmp_path):
    size = ["--encoding", "gpt2", "--blocks", "1", "--heads", "2", "--channels", "8", "--sequence-length", "32"]
    result = run("train", "--data", text, *size, *SHORT, "--out", tmp_path / "first")
    assert result.returncode == 0, result.stderr
    for init in (
        tmp_path / "first",
        shutil.copy(tmp_path / "first" / "latest" / "model.safetensors", tmp_path / "alone.safetensors"),
    ):
        out = tmp_path / f"second-{init.stem if init.suffix else 'run'}"
        result = run("train", "--init", init, "--data", text, *SHORT[:-1], 20, "--out", out)
        assert result.returncode == 0, result.stderr
        assert "--- sample" in result.stdout
        assert config_of(out)["data"]["encoding"] == "gpt2"
        assert config_of(out)["model"]["vocabulary"] == 50257


def test_a_model_file_alone_says_its_encoding_by_its_vocabulary(text, tmp_path):
    out = tmp_path / "out"
    result = run("train", "--init", model_of(tmp_path / "bytes.bin"), "--data", text, *SHORT, "--out", out)
    assert result.returncode == 0, result.stderr
    assert (config_of(out)["data"]["encoding"], config_of(out)["data"]["sequence_length"]) == ("bytes", 32)
    path = model_of(tmp_path / "gpt2.bin", vocabulary=50257, channels=2)
    arguments = ("--init", path, "--data", text, "--out", tmp_path / "other")
    assert refused(run("train", *arguments, DASKGPT_VOCABULARY=str(tmp_path))).startswith(NOWHERE)


def test_a_vocabulary_that_does_not_fit_is_refused(text, tmp_path):
    path = model_of(tmp_path / "small.bin", vocabulary=200)
    line = refused(run("train", "--init", path, "--data", text, *SHORT, "--out", tmp_path / "out"))
    assert line.startswith("train: the model must know every token id of the encoding; got encoding=bytes, ids=257")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "no toml", "[data]\nencoding = 3"])
def test_a_run_folder_whose_configuration_cannot_be_read(first, tmp_path, content):
    copy = shutil.copytree(first, tmp_path / "copy")
    (copy / "config.toml").write_text(content)
    for command in (("train", "--init", copy, "--out", tmp_path / "out"), ("generate", copy)):
        line = refused(run(*command))
        assert line.startswith(f"load: config.toml must be that of a run; got path={copy / 'config.toml'} (")
    alone = model_of(copy / "other.bin")  # beside a file of that name, which need not be a run's
    assert run("generate", alone, "--tokens", 2).returncode == 0


def test_from_python_the_configuration_must_be_that_of_the_model(first, text):
    data = daskgpt.DataConfig(data=str(text), sequence_length=32, batch_size=4)
    settings = daskgpt.RunConfig(steps=1, validation_batches=1, init=str(first))
    config, parameters = daskgpt.load(first)
    assert daskgpt.fit(config, data, run=settings).losses[0] < losses_of(first)[0] - 0.3
    other = daskgpt.preset("tiny", blocks=2, heads=2, channels=16, positions=32)
    message = (
        f"fit: the model's numbers must be those of the model to start from; got blocks=2, init={first} (blocks=1)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        daskgpt.fit(other, data, run=settings)
    with pytest.raises(ValueError, match="check_parameters: "):
        daskgpt.fit(other, data, run=daskgpt.RunConfig(steps=1), parameters=parameters)


def test_ids_that_the_encoding_does_not_know_write_nothing(text, tmp_path):
    size = ["--blocks", "1", "--heads", "2", "--channels", "16", "--vocabulary", "300"]
    result = run("train", "--data", text, *size, *SHORT[:-1], 200, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "--- sample" in result.stdout
    assert f"run written to {tmp_path / 'out'}" in result.stdout


def test_gpt2_means_its_encoding(text, tmp_path):
    size = ["--preset", "gpt2", "--blocks", "1", "--heads", "2", "--channels", "8", "--sequence-length", "16"]
    line = refused(run("train", "--data", text, *size, "--out", tmp_path / "out", DASKGPT_VOCABULARY=str(tmp_path)))
    assert line.startswith(NOWHERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASKGPT_VOCABULARY", str(tmp_path))
        with pytest.raises(FileNotFoundError, match=re.escape(NOWHERE)):
            daskgpt.fit(daskgpt.preset("gpt2", blocks=1), daskgpt.DataConfig(data=str(text)))
    out = tmp_path / "bytes"
    result = run("train", "--data", text, *size, "--encoding", "bytes", *SHORT, "--out", out)
    assert result.returncode == 0, result.stderr
    assert (config_of(out)["model"]["vocabulary"], config_of(out)["data"]["encoding"]) == (257, "bytes")


def test_gpt2_trains_on_its_tokens(vocabulary, text, tmp_path):
    size = ["--preset", "gpt2", "--blocks", "1", "--heads", "2", "--channels", "8", "--sequence-length", "16"]
    result = run("train", "--data", text, *size, *SHORT, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    written = config_of(tmp_path / "out")
    assert (written["model"]["vocabulary"], written["model"]["padded_vocabulary"]) == (50257, 50304)
    assert written["data"]["encoding"] == "gpt2"
