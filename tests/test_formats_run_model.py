"""Tests of the run's own model file: the same bits come back; a file not whole or not its own is refused."""

import json
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from full_disk import full_disk
from llmc_samples import SMALL, assert_same_bits, small_parameters
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import daskgpt
from daskgpt.formats.models import open_model_file
from daskgpt.formats.safetensors import _checksum, open_run_model, write_run_model
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import parameter_shapes, value_count

RMS = replace(SMALL, norm="rmsnorm")


def odd_parameters():
    """Numbers of every kind."""
    parameters = small_parameters()
    parameters["wpe.weight"][0] = [-0.0, np.inf, np.nan, 1e-42]
    return parameters


@pytest.fixture
def path(tmp_path):
    write_run_model(tmp_path / "model.safetensors", StoredModel(SMALL, odd_parameters(), "bytes", 4))
    return tmp_path / "model.safetensors"


def metadata_of(path):
    with safe_open(path, framework="numpy") as file:
        return file.metadata()


def edit(path, change):
    """The file with another entry of the metadata, and its checksum."""
    metadata = metadata_of(path)
    entry = json.loads(metadata["daskgpt"])
    del entry["check"]
    change(entry)
    save_file(load_file(path), path, metadata | {"daskgpt": json.dumps(entry | {"check": _checksum(entry)})})


# What is written


def test_names_and_layout_match_hugging_face(path):
    tensors = odd_parameters()
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(parameter_shapes(SMALL))
        assert file.metadata()["format"] == "pt"  # else transformers refuses the file
        for name in file.keys():  # noqa: SIM118
            matrix = tensors[name].ndim == 2 and name.startswith("h.")
            values = tensors[name]
            expected = values.T if matrix else values
            np.testing.assert_array_equal(file.get_tensor(name), expected, err_msg=name)
    assert path.stat().st_size % 4 == 0
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_metadata_and_round_trip(path):
    entry = json.loads(metadata_of(path)["daskgpt"])
    sizes = {"blocks": 2, "heads": 2, "channels": 4, "vocabulary": 5, "padded_vocabulary": 8, "positions": 6}
    said = {"model": asdict(SMALL), "version": 1, "encoding": "bytes", "sequence_length": 4}
    assert sizes.items() <= entry["model"].items()
    assert entry.items() >= (said | {"daskgpt": daskgpt.__version__}).items()
    model = open_run_model(path)
    assert (model.config, model.encoding, model.sequence_length) == (SMALL, "bytes", 4)
    assert_same_bits(odd_parameters(), model.loaded().parameters)
    # A setting that came later means its default.
    edit(path, lambda entry: entry["model"].pop("norm"))
    assert open_run_model(path).config == SMALL


def test_padding_that_early_files_leave_out_is_0(path):
    parameters, tensors = odd_parameters(), load_file(path)
    tensors["wte.weight"] = tensors["wte.weight"][: SMALL.vocabulary]
    save_file(tensors, path, metadata_of(path))
    parameters["wte.weight"][SMALL.vocabulary :] = 0
    assert_same_bits(parameters, daskgpt.load(path)[1])


NOT_WRITTEN = [
    ("model.safetensors", {"wpe.weight": np.zeros((6, 4))}, TypeError, "float32"),
    ("model.safetensors", {"ln_f.bias": None}, ValueError, "missing"),
    *[(name, {}, ValueError, "ending must be") for name in ("model", "model.pt", "model.safetensors.bak")],
]


@pytest.mark.parametrize(("name", "change", "error", "keyword"), NOT_WRITTEN)
def test_bad_models_are_not_written(tmp_path, name, change, error, keyword):
    (tmp_path / "model.safetensors").write_bytes(b"the model of yesterday")
    parameters = {key: values for key, values in (small_parameters() | change).items() if values is not None}
    with pytest.raises(error, match=keyword):
        daskgpt.save(tmp_path / name, SMALL, parameters)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"the model of yesterday"]


def test_failed_write_leaves_the_old_file_and_a_complete_one_replaces_it(tmp_path):
    target, other = tmp_path / "model.safetensors", tmp_path / "other"
    for path in (target, other):
        path.write_bytes(b"the model of yesterday")
    with full_disk(500), pytest.raises(OSError, match="File too large"):
        daskgpt.save(target, SMALL, small_parameters())
    assert target.read_bytes() == other.read_bytes()
    with pytest.raises(ValueError, match="path must name a file"):
        write_run_model(tmp_path, StoredModel(SMALL, odd_parameters()))
    daskgpt.save(target, SMALL, small_parameters())
    assert_same_bits(small_parameters(), daskgpt.load(target)[1])
    assert target.stat().st_mode == other.stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "other"]


# Which format a file has


def test_format_is_recognized_by_content(path, tmp_path):
    for name in ("own.bin", "own", "own.safetensors"):
        (tmp_path / name).write_bytes(path.read_bytes())
        assert open_model_file(tmp_path / name).encoding == "bytes"
    (tmp_path / "no").mkdir()
    for name, keyword in (("a.safetensors", "must exist"), ("a.bin", "must exist"), ("no", "hold a checkpoint")):
        with pytest.raises(FileNotFoundError, match=keyword):
            daskgpt.load(tmp_path / name)


# What is refused


WRONG_METADATA = [
    ({"format": "pt"}, "entries=format"),
    (None, "entries=none"),
    ({"daskgpt": "no JSON"}, "JSONDecodeError"),
    ({"daskgpt": "[" * 100_000}, "RecursionError"),
    ({"daskgpt": "[]"}, "TypeError"),
    ({"daskgpt": "{}"}, "KeyError"),
    ({"daskgpt": '{"version": 1, "check": 3}'}, "check=3"),
]


@pytest.mark.parametrize(("metadata", "keyword"), WRONG_METADATA)
def test_bad_metadata_is_refused(path, metadata, keyword):
    save_file(load_file(path), path, metadata)
    with pytest.raises(ValueError, match=keyword):
        open_run_model(path)


WRONG_CONFIGURATIONS = [
    ({"version": 2}, "version must be 1"),
    ({"rotations": 3, "turns": 1}, "unexpected keyword"),
    ({"heads": 3}, "heads must divide"),
    ({"norm": "batchnorm"}, "norm must be known"),
    ({"norm": "rmsnorm"}, "unknown=h.0.ln_1.bias .5 in all"),
    ({"positions": 2**24}, "wpe.weight must have shape"),
    ({"padded_vocabulary": 7, "vocabulary": 6}, r"wte.weight must have shape \(6, 4\) or \(7, 4\)"),
    ({"encoding": "runes"}, "encoding must be one of"),
    *[({"blocks": value}, "must describe a model") for value in (2.5, "2", True, None, [2])],
]


@pytest.mark.parametrize(("changes", "keyword"), WRONG_CONFIGURATIONS)
def test_configuration_must_match_the_tensors(path, changes, keyword):
    of_the_model = not changes.keys() & {"version", "encoding", "sequence_length"}
    edit(path, lambda entry: (entry["model"] if of_the_model else entry).update(changes))
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(path)


def test_a_flipped_bit_of_the_metadata(path):
    path.write_bytes(path.read_bytes().replace(b'\\"heads\\": 2', b'\\"heads\\": 1'))
    with pytest.raises(ValueError, match="checksum"):
        open_run_model(path)


def test_value_count_matches_the_tensors():
    for config in (SMALL, RMS):
        assert value_count(config) == sum(np.prod(shape) for shape in parameter_shapes(config).values())
