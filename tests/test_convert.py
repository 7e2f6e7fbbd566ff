"""Tests of `daskgpt.convert`: every format into every other, what the files are used for, and refusals."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from full_disk import full_disk
from llmc_samples import peak_bytes

import daskgpt
from daskgpt import convert
from daskgpt.config.model import ModelConfig
from daskgpt.formats.safetensors import write_run_model
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import initial_parameters
from daskgpt.training.checkpoint import open_model_of

MODEL = replace(SMALL, channels=32, hidden=96, vocabulary=257, padded_vocabulary=272)
NAMES = {"huggingface": "folder", "daskgpt": "m.safetensors", "gguf": "m.gguf"}


def called(command, *arguments):
    assert command.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model in every format."""
    folder, parameters = tmp_path_factory.mktemp("sources"), random_parameters(MODEL, np.random.default_rng(1))
    daskgpt.save(folder / NAMES["daskgpt"], MODEL, parameters, encoding="bytes", sequence_length=8)
    for target in ("huggingface", "gguf"):
        called(convert, folder / NAMES["daskgpt"], folder / NAMES[target])
    return folder, parameters


@pytest.mark.parametrize(("source", "target"), list(itertools.product(NAMES, NAMES)))
def test_every_pair(sources, tmp_path, source, target):
    folder, parameters = sources
    called(convert, folder / NAMES[source], tmp_path / NAMES[target])
    config, tensors = daskgpt.load(tmp_path / NAMES[target])
    # Padding: other programs have none, this one keeps what there is.
    padded = source == target == "daskgpt"
    assert config == (MODEL if padded else replace(MODEL, padded_vocabulary=257))
    assert open_model_of(tmp_path / NAMES[target]).encoding == "bytes"
    for name, values in parameters.items():
        values = values[:257] if name == "wte.weight" else values
        assert tensors[name][: len(values)].tobytes() == values.tobytes(), name
        assert not tensors[name][len(values) :].any()
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAMES[target]]


@pytest.fixture
def bad(tmp_path):
    """A folder that is taken, and files that are no models."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    right = random_parameters(SMALL, np.random.default_rng(1))
    wrong = right | {"ln_f.bias": np.full(SMALL.channels, np.nan, "f4")}
    for name, parameters in (("good.safetensors", right), ("nan.safetensors", wrong)):
        write_run_model(tmp_path / name, StoredModel(SMALL, parameters))
    (tmp_path / "b.safetensors").write_bytes(b"x")
    return tmp_path


REFUSED = [
    ("good.safetensors", "model.pt", [], ValueError, "name must say the format"),
    ("good.safetensors", "taken", ["--to", "gguf"], ValueError, "must be new"),
    # Before anything is read.
    ("nan.safetensors", "taken", [], ValueError, "must be new"),
    ("nan.safetensors", "no/folder", [], FileNotFoundError, "convert: the folder must exist; got folder=.*no[.]"),
    ("nan.safetensors", "peft", ["--to", "peft"], ValueError, "must have adapters"),
    ("b.safetensors", "out", [], ValueError, "b.safetensors"),
    ("pipe", "out", [], ValueError, "must be a regular file or a folder"),
    *(("nan.safetensors", name, [], ValueError, "convert: .* ln_f.bias must be finite") for name in NAMES.values()),
    ("nowhere", "out", [], FileNotFoundError, "nowhere"),
]


@pytest.mark.parametrize(("source", "target", "more", "error", "keyword"), REFUSED)
def test_bad_paths_are_refused(bad, source, target, more, error, keyword):
    before = sorted(bad.rglob("*"))
    with pytest.raises(error, match=keyword):
        convert.main([str(bad / source), str(bad / target), *more])
    assert sorted(bad.rglob("*")) == before


def test_partial_folder_does_not_appear(sources, tmp_path):
    with full_disk(50_000), pytest.raises(OSError, match="File too large"):
        called(convert, sources[0] / NAMES["daskgpt"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_conversion_streams_tensors(tmp_path):
    config = ModelConfig(blocks=16, heads=2, channels=128, vocabulary=64, positions=64)
    parameters = initial_parameters(config, seed=0)
    size = sum(values.nbytes for values in parameters.values())
    assert peak_bytes(daskgpt.save, tmp_path / "m.safetensors", config, parameters) < 0.2 * size
    paths = [str(tmp_path / name) for name in ("m.safetensors", "hf", "c.safetensors")]
    for source, target in itertools.pairwise(paths):
        # A second copy would be a whole size; one tensor is less than a fortieth of it.
        assert peak_bytes(convert.main, [source, target]) < 0.2 * size, target
        assert peak_bytes(daskgpt.load, target) < 1.2 * size, target
