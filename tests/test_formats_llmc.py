"""Tests of llm.c's files: golden values, round trips, bfloat16, memory, whole or absent writes, and refusals."""

import os

import llmc_samples
import numpy as np
import pytest
from full_disk import full_disk
from llmc_samples import (
    CONFIG,
    DEBUG_STATE,
    MODEL,
    SMALL,
    assert_same_bits,
    read_debug_state,
    read_model,
    small_parameters,
    write_debug_state,
)

from daskgpt.formats.llmc import write_model
from daskgpt.model.parameters import parameter_shapes

# Round trips


def test_golden_files_are_written_again_byte_for_byte(tmp_path):
    config, parameters = read_model(MODEL)
    assert config == CONFIG
    assert {name: values.shape for name, values in parameters.items()} == parameter_shapes(CONFIG)
    assert parameters["wte.weight"].any(axis=1).tolist() == [row < CONFIG.vocabulary for row in range(512)]
    write_model(tmp_path / "model.bin", config, parameters)
    assert (tmp_path / "model.bin").read_bytes() == MODEL.read_bytes()
    write_debug_state(tmp_path / "state.bin", config, read_debug_state(DEBUG_STATE, config))
    assert (tmp_path / "state.bin").read_bytes() == DEBUG_STATE.read_bytes()


def test_round_trip_keeps_every_bit_and_the_padded_rows(tmp_path):
    parameters = small_parameters()
    parameters["ln_f.bias"][:] = [-0.0, np.inf, np.nan, np.float32(1e-42)]
    assert parameters["wte.weight"][SMALL.vocabulary :].all()
    path = tmp_path / "model.bin"
    write_model(str(path), SMALL, parameters)
    config, again = read_model(str(path))
    assert config == SMALL
    assert_same_bits(parameters, again)
    for name, values in again.items():
        assert (values if values.base is None else values.base).nbytes == values.nbytes, name


@pytest.mark.parametrize("version", [3, 5])
def test_order_and_memory_layout_of_the_given_parameters_do_not_matter(tmp_path, version):
    parameters = small_parameters()
    transposed = {name: np.asfortranarray(parameters[name]) for name in reversed(parameters)}
    for values in transposed.values():
        values.flags.writeable = False
    write_model(tmp_path / "plain.bin", SMALL, parameters, version)
    write_model(tmp_path / "transposed.bin", SMALL, transposed, version)
    assert (tmp_path / "plain.bin").read_bytes() == (tmp_path / "transposed.bin").read_bytes()


# bfloat16


def test_version_5_rounds_to_the_nearest_and_reads_back_the_same(tmp_path):
    config, parameters = read_model(MODEL)
    write_model(tmp_path / "first.bin", config, parameters, version=5)
    assert np.fromfile(tmp_path / "first.bin", "<i4", 8).tolist() == [20240326, 5, 64, 509, 3, 4, 64, 512]
    rounded = read_model(tmp_path / "first.bin")[1]
    for name, values in parameters.items():
        # 8 significant bits: half a unit of the last place is at most 2**-8 of the value.
        np.testing.assert_allclose(rounded[name], values, rtol=2**-8, atol=0)
    write_model(tmp_path / "second.bin", config, rounded, version=5)
    assert (tmp_path / "second.bin").read_bytes() == (tmp_path / "first.bin").read_bytes()


# Files that are whole or absent


def test_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "model.bin"
    target.write_bytes(b"the model of yesterday")
    with full_disk(300_000), pytest.raises(OSError, match="File too large"):
        write_model(target, *read_model(MODEL))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.bin": b"the model of yesterday"}


def test_written_file_replaces_the_old_one(tmp_path):
    target, other = tmp_path / "model.bin", tmp_path / "other"
    for path in (target, other):
        path.write_bytes(b"old")
    write_model(target, SMALL, small_parameters())
    assert_same_bits(small_parameters(), read_model(target)[1])
    assert target.stat().st_mode == other.stat().st_mode


# Refusals

MOST = 2**31 - 1


REFUSED = [
    ({0: 20240327}, None, "It is an llm.c debug state"),
    ({0: 20240520}, None, "token file"),
    ({0: 7}, None, "not an llm.c file"),
    *[({}, size, "header of 1024 bytes") for size in (0, 3, 1023)],
    *[({1: version}, None, "version must be 3") for version in (0, 2, 4, 6, -3)],
    *[({}, 748_800 - missing, "748800 bytes.*truncated") for missing in (1, 4, 300_000)],
    *[({1: 5}, 374_912 - missing, "374912 bytes.*truncated") for missing in (1, 4)],
    ({}, 748_807, "7 bytes follow"),
    ({5: 5}, None, "heads must divide"),
    ({4: 0}, None, "blocks must be at least 1"),
    ({7: 508}, None, "padded_vocabulary must be at least"),
    *[({at: value, 7: MOST}, None, "at most") for at, value in ((4, MOST), (6, MOST - 3), (3, MOST))],
]


@pytest.mark.parametrize(("numbers", "size", "keyword"), REFUSED)
def test_files_that_are_refused(tmp_path, numbers, size, keyword):
    """Files with other header numbers, cut or lengthened to `size` bytes: refused before anything large is held."""
    data = bytearray(MODEL.read_bytes())
    for index, number in numbers.items():
        data[4 * index : 4 * index + 4] = number.to_bytes(4, "little", signed=True)
    (tmp_path / "file.bin").write_bytes(data)
    os.truncate(tmp_path / "file.bin", len(data) if size is None else size)

    def refuse():
        with pytest.raises(ValueError, match=keyword):
            read_model(tmp_path / "file.bin")

    assert llmc_samples.peak_bytes(refuse) < 10e6


@pytest.mark.parametrize(
    ("path", "error", "keyword"),
    [(".", ValueError, "path must name a file"), ("absent/model.bin", FileNotFoundError, "folder must exist")],
)
def test_bad_paths_and_versions_are_refused(tmp_path, path, error, keyword):
    with pytest.raises(error, match=keyword):
        write_model(tmp_path / path, SMALL, small_parameters())
    with pytest.raises(ValueError, match="version must be 3"):
        write_model(tmp_path / "model.bin", SMALL, small_parameters(), 4)
    assert os.listdir(tmp_path) == []
