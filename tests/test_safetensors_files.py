"""Tests of files of named tensors: one or several, streamed, and refusals of those that are not whole."""

import hashlib
import json
import os

import numpy as np
import pytest
from llmc_samples import in_shards
from safetensors import safe_open

from daskgpt.formats import stored_model
from daskgpt.formats.safetensors import TensorFiles, write_tensor_file
from daskgpt.formats.stored_model import MAX_JSON_BYTES

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
    assert digest == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    files = TensorFiles(tmp_path / "model.safetensors", "test")
    assert files.metadata == {"for": "me"}
    assert list(files) == list(ARRAYS)
    assert_holds(files, ARRAYS)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        for name in ARRAYS:
            np.testing.assert_array_equal(file.get_tensor(name), ARRAYS[name], err_msg=name)


@pytest.mark.parametrize("most", [1, 47, 48, 96, 100])
def test_shards_and_their_index(tmp_path, most):
    write(tmp_path / "m.safetensors", {"for": "me"})
    files = TensorFiles(in_shards(tmp_path / "m.safetensors", most), "test")
    assert len(files.files) == len(list(tmp_path.glob("m-*.safetensors"))) > 1
    assert_holds(files, ARRAYS)
    assert files.metadata == {"for": "me"}


def test_large_arrays_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_model.pieces, "__defaults__", (16,))
    write(tmp_path / "a.safetensors")
    assert_holds(TensorFiles(tmp_path / "a.safetensors", "test"), ARRAYS)


NOT_WRITTEN = [
    (np.zeros((4, 3), "f4"), "a.safetensors", TypeError, "have shape"),
    (np.zeros((3, 4)), "a.safetensors", TypeError, "must be float32"),
    (np.zeros((3, 4), "f4"), "no/a.safetensors", FileNotFoundError, "folder must exist"),
]


@pytest.mark.parametrize(("array", "path", "error", "keyword"), NOT_WRITTEN)
def test_writes_that_are_refused(tmp_path, array, path, error, keyword):
    with pytest.raises(error, match=keyword):
        write_tensor_file(tmp_path / path, {"a": (3, 4)}, lambda _: array, {}, where="test")
    assert os.listdir(tmp_path) == []


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
