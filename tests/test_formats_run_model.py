"""Tests of the run's own model file and of files of tensors: the same bits come back; damaged ones are refused."""

import hashlib
import json
import os
from dataclasses import asdict

import numpy as np
import pytest
from full_disk import full_disk
from llmc_samples import SMALL, assert_same_bits, in_shards, small_parameters
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import daskgpt
from daskgpt.formats import stored_model
from daskgpt.formats.safetensors import TensorFiles, _checksum, open_run_model, write_run_model, write_tensor_file
from daskgpt.formats.stored_model import MAX_JSON_BYTES, StoredModel
from daskgpt.training.checkpoint import open_model_file


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


def test_metadata_and_round_trip(path):
    assert metadata_of(path)["format"] == "pt"  # else transformers refuses the file
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


# What is refused


WRONG_METADATA = [
    ({"format": "pt"}, "entries=format"),
    (None, "entries=none"),
    ({"daskgpt": "no JSON"}, "JSONDecodeError"),
    ({"daskgpt": "[" * 100_000}, "RecursionError"),
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
    ({"norm": "rmsnorm"}, "unknown=h.0.ln_1.bias .5 in all"),
    ({"positions": 2**24}, "wpe.weight must have shape"),
    ({"padded_vocabulary": 7, "vocabulary": 6}, r"wte.weight must have shape \(7, 4\)"),
    ({"encoding": "runes"}, "encoding must be known; .*runes"),
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


# Files of tensors: one or several, streamed

# Names, and values of every kind of layout.
ARRAYS = {
    "contiguous": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float32).reshape(4, 3).T,
    "strided": np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2],
    "reversed": np.arange(5, dtype=np.float32)[::-1],
    "one": np.array(3.0, np.float32),
    "none": np.zeros((0, 4), np.float32),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def write(path, metadata=None):
    return write_tensor_file(path, SHAPES, ARRAYS.__getitem__, metadata or {}, where="test")


def assert_holds(files, arrays):
    assert files.keys() == arrays.keys()
    for name, array in arrays.items():
        values = files[name].read()
        assert (files[name].shape, files[name].dtype) == (array.shape, "F32")
        assert not values.flags.writeable
        np.testing.assert_array_equal(values, array, err_msg=name, strict=True)


def test_one_file_as_the_library_reads_it(tmp_path):
    digest = write(tmp_path / "model.safetensors", {"for": "me"})
    content = (tmp_path / "model.safetensors").read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    assert int.from_bytes(content[:8], "little") % 8 == 0, "the values are aligned"
    files = TensorFiles(tmp_path / "model.safetensors", "test")
    assert files.metadata == {"for": "me"}
    assert list(files) == list(ARRAYS)
    assert_holds(files, ARRAYS)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        for name in ARRAYS:
            np.testing.assert_array_equal(file.get_tensor(name), ARRAYS[name], err_msg=name)


def test_large_arrays_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_model.pieces, "__defaults__", (16,))
    write(tmp_path / "a.safetensors")
    assert_holds(TensorFiles(tmp_path / "a.safetensors", "test"), ARRAYS)


# What is refused


@pytest.fixture
def index(tmp_path):
    write(tmp_path / "model.safetensors")
    return in_shards(tmp_path / "model.safetensors", 64)


def refused(path, keyword, kind=ValueError):
    with pytest.raises(kind, match=keyword) as error:
        TensorFiles(path, "test")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


NO_INDEX = [
    (b"", "JSONDecodeError"),
    (b"[" * 100_000, "RecursionError"),
    (b"[1]", "kind=list"),
    (b" " * (MAX_JSON_BYTES + 1), f"bytes={MAX_JSON_BYTES + 1}"),
    *[(json.dumps({"weight_map": of}).encode(), "weight_map must name") for of in (None, 3, {}, {"one": 3}, ["a"])],
    *[(json.dumps({"weight_map": {"one": f}}).encode(), "missing=") for f in ("../s.safetensors", "a.bin", "a\nb")],
]


@pytest.mark.parametrize(("content", "keyword"), NO_INDEX)
def test_invalid_index_is_refused(index, content, keyword):
    index.write_bytes(content)
    refused(index, keyword)


def test_an_index_and_files_that_do_not_fit(index, tmp_path):
    of = json.loads(index.read_text())["weight_map"]
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / of["reversed"]).read_bytes())
    for changed, kind, keyword in (
        (of | {"reversed": "absent.safetensors"}, ValueError, "missing=absent"),
        (of | {"reversed": "copy.safetensors"}, ValueError, "must be in one file"),
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        refused(index, keyword, kind)


def test_headers_are_bounded(tmp_path, monkeypatch):
    write(tmp_path / "a.safetensors")
    monkeypatch.setattr("daskgpt.formats.safetensors.HEADER_LIMIT", 99)
    refused(tmp_path / "a.safetensors", "complete safetensors file.*header=")
    with pytest.raises(ValueError, match="at most 99 bytes"):
        write(tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
