"""`python -m daskgpt.convert`: every format into every other, what it prints, what it refuses, and its memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from command_lines import PATIENCE, refused, run, write_text
from command_lines import SMALL as FLAGS
from conftest import GOLDEN, SMALL, random_parameters

import daskgpt
from daskgpt.convert import FORMATS, guessed
from daskgpt.formats.llmc import write_model
from daskgpt.formats.published import to_bfloat16
from daskgpt.model.parameters import initial_parameters

NAMES = {"huggingface": "folder", "llmc": "model.bin", "llmc-bfloat16": "model_bf16.bin", "daskgpt": "m.safetensors"}


def rounded(values):
    return (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)


def convert(source, target, *more):
    result = run("convert", source, target, *more, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model in every format, its values such that bfloat16 holds them."""
    folder = tmp_path_factory.mktemp("sources")
    parameters = {name: rounded(v) for name, v in random_parameters(SMALL, np.random.default_rng(1)).items()}
    daskgpt.save(folder / NAMES["daskgpt"], SMALL, parameters, encoding="bytes", sequence_length=8)
    daskgpt.save(folder / NAMES["llmc"], SMALL, parameters)
    write_model(folder / NAMES["llmc-bfloat16"], SMALL, parameters, version=5)
    convert(folder / NAMES["daskgpt"], folder / NAMES["huggingface"])
    return folder, parameters


@pytest.mark.parametrize(("source", "target"), list(itertools.product(NAMES, NAMES)))
def test_every_pair(sources, tmp_path, source, target):
    folder, parameters = sources
    told = convert(folder / NAMES[source], tmp_path / NAMES[target])
    config, found = daskgpt.load(tmp_path / NAMES[target])
    assert config == replace(SMALL, padded_vocabulary=config.padded_vocabulary)
    # Padding: llm.c has multiples of 128 rows, Hugging Face none, this program keeps what there is.
    kept = 29 if source == "huggingface" else 32
    rows = {"llmc": 128, "llmc-bfloat16": 128, "huggingface": 29, "daskgpt": kept}[target]
    assert config.padded_vocabulary == rows
    assert ("rows of padding of wte.weight left out" in told) == (target == "huggingface" != source)
    assert ("to 128, as llm.c has them" in told) == target.startswith("llmc")
    for name, values in parameters.items():
        values = values[:29] if name == "wte.weight" else values
        assert found[name][: len(values)].tobytes() == values.tobytes(), name
        assert not found[name][len(values) :].any()
    assert all(len(line) <= 80 or str(tmp_path) in line or str(folder) in line for line in told.splitlines()), told
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAMES[target]]


def test_bfloat16_rounds_to_the_nearest_even(sources, tmp_path):
    parameters = random_parameters(SMALL, np.random.default_rng(9))
    daskgpt.save(tmp_path / "m.safetensors", SMALL, parameters)
    convert(tmp_path / "m.safetensors", tmp_path / "llm", "--to", "llmc-bfloat16")
    assert np.fromfile(tmp_path / "llm", "<i4", 8).tolist() == [20240326, 5, 16, 29, 2, 2, 16, 128]
    for name, values in daskgpt.load(tmp_path / "llm")[1].items():
        np.testing.assert_array_equal(values[: len(parameters[name])][:29], rounded(parameters[name])[:29])


def test_a_golden_model_comes_back_byte_for_byte(tmp_path):
    chain = [GOLDEN / "gpt2_small.bin", *(tmp_path / name for name in ("hf", "own.safetensors", "back.bin"))]
    for source, target in itertools.pairwise(chain):
        convert(source, target)
    assert chain[-1].read_bytes() == chain[0].read_bytes()


def test_a_trained_run_goes_everywhere_and_is_used(tmp_path):
    out = tmp_path / "run"
    text = write_text(tmp_path)
    trained = run("train", "--data", text, *FLAGS, "--steps", 3, "--sample-tokens", 0, "--out", out)
    assert trained.returncode == 0, trained.stderr
    told = convert(out, tmp_path / "hf")
    assert "257 token ids (bytes)" in told
    assert "vocab.json" in told
    convert(tmp_path / "hf", tmp_path / "m.bin")
    options = ("--prompt", "line", "--tokens", 20)
    first = run("generate", out, *options)
    assert first.returncode == 0, first.stderr
    for path in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        assert run("generate", path, *options).stdout == first.stdout
    for path in (tmp_path / "hf", tmp_path / "m.bin"):
        more = ("--steps", 1, "--sample-tokens", 0, "--batch-size", 2, "--sequence-length", 16)
        again = run("train", "--init", path, "--data", text, *more, "--out", tmp_path / f"again-{path.name}")
        assert again.returncode == 0, again.stderr


def test_verify_takes_a_folder_of_hugging_faces(tmp_path):
    convert(GOLDEN / "gpt2_small.bin", tmp_path / "hf")
    config, _ = daskgpt.load(tmp_path / "hf")
    from daskgpt.formats.llmc import read_debug_state, read_model, write_debug_state

    whole, _ = read_model(GOLDEN / "gpt2_small.bin")
    state = read_debug_state(GOLDEN / "gpt2_small_debug_state.bin", whole)
    gradients = state.gradients | {"wte.weight": state.gradients["wte.weight"][: config.vocabulary]}
    write_debug_state(tmp_path / "state.bin", config, replace(state, gradients=gradients))
    result = run("verify", tmp_path / "hf", tmp_path / "state.bin")
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_name_means(tmp_path):
    names = {"a": "huggingface", "runs/x/": "huggingface", "m.bin": "llmc", "gpt2_124M_bf16.bin": "llmc-bfloat16"}
    from pathlib import Path

    assert {name: guessed(Path(name)) for name in names} == names
    line = refused(run("convert", GOLDEN / "gpt2_small.bin", tmp_path / "model.pt"))
    assert line.startswith(
        "convert: the name must say the format (.safetensors, .bin, or no ending for a folder); got "
    )
    assert line.endswith(f"Add --to {' or '.join(FORMATS)}.")


def test_nothing_is_written_over(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("x")
    for target, more in ((taken, ()), (taken / "mine", ()), (taken, ("--to", "llmc"))):
        line = refused(run("convert", GOLDEN / "gpt2_small.bin", target, *more))
        assert f"got path={target}. Nothing is written over: name another." in line
    line = refused(run("convert", GOLDEN / "gpt2_small.bin", tmp_path / "no" / "folder"))
    assert "the folder must exist" in line
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]


def test_what_cannot_be_read_or_written(tmp_path):
    for name, content in (("a.bin", b""), ("b.safetensors", b"x"), ("ckpt.pt", b"PK\3\4"), ("meta.pkl", b"\x80\4")):
        (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in refused(run("convert", tmp_path / name, tmp_path / "out"))
    assert "got path=nowhere" in refused(run("convert", "nowhere", tmp_path / "out"))
    config = daskgpt.GPT2Config(norm="rmsnorm")
    daskgpt.save(tmp_path / "rms.safetensors", config, initial_parameters(config, 0))
    for target in ("out", "out.bin"):
        assert "has no norm, which must be layernorm" in refused(
            run("convert", tmp_path / "rms.safetensors", tmp_path / target)
        )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.bin").exists()


def test_a_folder_that_is_killed_half_written_does_not_appear(tmp_path):
    program = (
        "import resource, signal, sys\nfrom daskgpt import convert\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try:\n    convert.main(sys.argv[1:])\nexcept OSError as error:\n    print(error)\n"
    )
    arguments = [str(GOLDEN / "gpt2_small.bin"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert "all of the file must be written; got path=" in done.stdout
    assert "(File too large). Make room there" in done.stdout
    assert os.listdir(tmp_path) == []


# Peak of a process's own memory (anonymous pages), in steps of a millisecond; what is mapped from files does not count.
PEAK = """
import re, sys, threading, time
from daskgpt import convert
def own():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) * 1024
peak, done, before = 0, threading.Event(), own()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, own())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
convert.main(sys.argv[1:])
done.set()
watcher.join()
print("peak", peak - before)
"""


@pytest.mark.slow
def test_gpt2_is_converted_with_the_memory_of_its_largest_tensor(tmp_path):
    config = daskgpt.preset("gpt2")
    daskgpt.save(tmp_path / "m.safetensors", config, initial_parameters(config, 0))
    largest = config.padded_vocabulary * config.channels * 4
    paths = [tmp_path / name for name in ("m.safetensors", "hf", "a.bin", "bf16.bin", "back", "b.bin", "c.safetensors")]
    for source, target in itertools.pairwise(paths):
        command = [sys.executable, "-c", PEAK, str(source), str(target)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert result.returncode == 0, result.stderr
        peak = int(result.stdout.split()[-1])
        print(f"{source.name} -> {target.name}: {peak / largest:.2f} of the largest tensor")
        assert peak <= 1.3 * largest, (source.name, target.name, peak / largest)
    first, last = daskgpt.load(paths[0])[1], daskgpt.load(paths[-1])[1]
    for name, values in first.items():
        values = values[: config.vocabulary]
        np.testing.assert_array_equal(last[name][: len(values)], rounded(values))
