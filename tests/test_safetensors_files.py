"""Files of named tensors: one or several, streamed, and what is said of those that are not whole."""

from __future__ import annotations

import hashlib
import json
import os
import re

import numpy as np
import pytest
from llmc_samples import SMALL, small_parameters
from safetensors import safe_open

import daskgpt
from daskgpt.formats.run_model import StoredModel, read_run_model, write_run_models
from daskgpt.formats.safetensors_files import MOST_TEXT, NamedTensor, TensorFiles, write_tensor_file, write_tensor_files

# Names, and values of every kind of layout.
ARRAYS = {
    "contiguous": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float32).reshape(4, 3).T,
    "strided": np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2],
    "reversed": np.arange(5, dtype=np.int64)[::-1],
    "half": np.arange(4, dtype=np.float16),
    "bits": np.arange(4, dtype=np.uint16),
    "one": np.array(3.0),
    "none": np.zeros((0, 4), np.float32),
    "bytes": np.frombuffer(b"abc", np.uint8),
}
KINDS = {"<f4": "F32", "<i8": "I64", "<f2": "F16", "<u2": "BF16", "<f8": "F64", "|u1": "U8"}


def named(arrays, asked=None):
    def values(name):
        if asked is not None:
            asked.append(name)
        return arrays[name]

    return [
        NamedTensor(name, array.shape, KINDS[array.dtype.str], lambda name=name: values(name))
        for name, array in arrays.items()
    ]


def assert_holds(files, arrays):
    assert files.names == list(arrays)
    for name, array in arrays.items():
        found = files.read(name)
        assert (files.shape(name), files.dtype(name)) == (array.shape, KINDS[array.dtype.str])
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, array, err_msg=name, strict=True)


def hashes(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in os.listdir(folder)}


def test_one_file_as_the_library_reads_it(tmp_path):
    written = write_tensor_files(tmp_path, named(ARRAYS), {"for": "me"}, where="test")
    assert written == hashes(tmp_path)
    assert list(written) == ["model.safetensors"]
    files = TensorFiles(tmp_path / "model.safetensors", "test")
    assert files.metadata == {"for": "me"}
    assert_holds(files, ARRAYS)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        for name in ARRAYS.keys() - {"bits"}:
            np.testing.assert_array_equal(file.get_tensor(name), ARRAYS[name], err_msg=name)


@pytest.mark.parametrize("most", [1, 47, 48, 96, 100])
def test_shards_and_their_index(tmp_path, most):
    written = write_tensor_files(tmp_path, named(ARRAYS), {"for": "me"}, where="test", name="m", shard_bytes=most)
    assert written == hashes(tmp_path)
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in ARRAYS.values())}
    assert index["weight_map"].keys() == ARRAYS.keys()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"m-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for shard in shards:
        of = [name for name in ARRAYS if index["weight_map"][name] == shard]
        assert sum(ARRAYS[name].nbytes for name in of) <= most or sum(ARRAYS[name].nbytes > 0 for name in of) == 1
        with safe_open(tmp_path / shard, framework="numpy") as file:
            assert set(file.keys()) == set(of)
    files = TensorFiles(tmp_path / "m.safetensors.index.json", "test")
    assert_holds(files, ARRAYS)
    assert files.metadata == {"for": "me"}


def test_tensors_are_asked_for_one_after_the_other(tmp_path):
    asked = []
    write_tensor_files(tmp_path, named(ARRAYS, asked), {}, where="test", shard_bytes=64)
    assert asked == list(ARRAYS)


def test_large_arrays_are_written_in_pieces(tmp_path, monkeypatch):
    from daskgpt.formats import published

    monkeypatch.setattr(published.pieces, "__defaults__", (16,))
    write_tensor_file(tmp_path / "a.safetensors", named(ARRAYS), {}, where="test")
    assert_holds(TensorFiles(tmp_path / "a.safetensors", "test"), ARRAYS)


def test_values_that_are_not_as_announced_are_not_written(tmp_path):
    for wrong in (np.zeros((4, 3), np.float32), np.zeros((3, 4))):
        tensor = NamedTensor("a", (3, 4), "F32", lambda wrong=wrong: wrong)
        text = "test: a must have shape (3, 4) and dtype float32; got shape="
        with pytest.raises(TypeError, match=re.escape(text)):
            write_tensor_file(tmp_path / "a.safetensors", [tensor], {}, where="test")
    with pytest.raises(ValueError, match="test: every tensor must have a name of its own; got name=one. Rename one."):
        write_tensor_file(tmp_path / "a.safetensors", named({"one": ARRAYS["one"]}) * 2, {}, where="test")
    with pytest.raises(FileNotFoundError, match="test: the folder must exist"):
        write_tensor_file(tmp_path / "no" / "a.safetensors", named(ARRAYS), {}, where="test")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("first", "second"), [(64, 10**9), (10**9, 64)])
def test_a_folder_does_not_get_both_forms(tmp_path, first, second):
    write_tensor_files(tmp_path, named(ARRAYS), {}, where="test", shard_bytes=first)
    before = hashes(tmp_path)
    with pytest.raises(ValueError, match="test: the folder must hold no such tensors yet; got path="):
        write_tensor_files(tmp_path, named(ARRAYS), {}, where="test", shard_bytes=second)
    assert hashes(tmp_path) == before


def test_a_run_model_in_shards_is_the_model(tmp_path):
    parameters = small_parameters()
    written = write_run_models(tmp_path, StoredModel(SMALL, parameters, "bytes", 4), shard_bytes=500)
    assert len(written) > 3
    found = read_run_model(tmp_path / "model.safetensors.index.json")
    assert (found.config, found.encoding, found.sequence_length) == (SMALL, "bytes", 4)
    for name, values in parameters.items():
        assert found.parameters[name].tobytes() == values.tobytes()
    whole = tmp_path / "whole"
    whole.mkdir()
    daskgpt.save(whole / "model.safetensors", SMALL, parameters, encoding="bytes", sequence_length=4)
    assert list(write_run_models(tmp_path / "whole", StoredModel(SMALL, parameters, "bytes", 4))) == [
        "model.safetensors"
    ]


# What is refused


@pytest.fixture
def index(tmp_path):
    write_tensor_files(tmp_path, named(ARRAYS), {}, where="test", shard_bytes=64)
    return tmp_path / "model.safetensors.index.json"


def refused(path, text, kind=ValueError):
    with pytest.raises(kind, match=re.escape(text)) as error:
        TensorFiles(path, "test")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", " (JSONDecodeError)."),
        (b"[" * 100_000, " (RecursionError)."),
        (b"\xff\xfe{", " (UnicodeDecodeError)."),
        (b"[1]", ", kind=list."),
        (b" " * (MOST_TEXT + 1), f", bytes={MOST_TEXT + 1}."),
    ],
)
def test_an_index_that_is_no_json_object(index, content, found):
    index.write_bytes(content)
    text = f"test: the index must be a JSON object of at most 4,194,304 bytes; got path={index}{found} "
    refused(index, text + "Copy or write it again.")


@pytest.mark.parametrize("of", [None, 3, {}, {"one": 3}, ["a"]])
def test_an_index_without_a_map(index, of):
    index.write_text(json.dumps({"weight_map": of}))
    refused(index, f"test: weight_map must say of each tensor in which file it is; got path={index}, weight_map=")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/a.safetensors", "a.bin", "", "a\nb.safetensors", "9" * 400 + ".safetensors"]
)
def test_an_index_names_files_beside_it_only(index, name):
    index.write_text(json.dumps({"weight_map": {"one": name}}))
    refused(index, f"test: weight_map must name .safetensors files beside the index; got path={index}, file=")


def test_an_index_and_files_that_do_not_fit(index, tmp_path):
    known = json.loads(index.read_text())
    of = known["weight_map"]
    rule = f"test: the index must say where each tensor is; got path={index}, tensor="
    for changed, what in (
        ({name: file for name, file in of.items() if name != "half"}, "half, file=model-0000"),
        (of | {"more": of["half"]}, "more, file=no file, weight_map=model-0000"),
        (of | {"half": of["contiguous"]}, "half, file=model-0000"),
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        refused(index, rule + what)
    index.write_text(json.dumps({"weight_map": of | {"half": "absent.safetensors"}}))
    refused(index, f"test: the file must exist; got path={tmp_path / 'absent.safetensors'}.", FileNotFoundError)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((tmp_path / of["half"]).read_bytes())
    index.write_text(json.dumps({"weight_map": of | {"half": copy.name}}))
    refused(index, "test: every tensor must be in one file; got path=")


def test_files_of_two_models(index, tmp_path):
    file = json.loads(index.read_text())["weight_map"]["half"]
    arrays = {name: ARRAYS[name] for name, of in json.loads(index.read_text())["weight_map"].items() if of == file}
    write_tensor_file(tmp_path / file, named(arrays), {"for": "others"}, where="test")
    text = f"test: all files of a model must have the same metadata; got path={tmp_path / file}, entry=for. "
    refused(index, text)


def test_a_header_of_absurd_size(tmp_path):
    path = tmp_path / "a.safetensors"
    size = 50_000_000
    with open(path, "wb") as file:
        file.write(size.to_bytes(8, "little") + b"{")
        file.truncate(8 + size)
    refused(path, f"test: the header must have at most 4,194,304 bytes; got path={path}, header={size}. ")
