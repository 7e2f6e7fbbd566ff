"""Tests of token files: llm.c's and nanoGPT's, written and read back, and refusals."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from llmc_samples import write_tokens

from daskgpt.data.dataset import load_dataset, load_validation
from daskgpt.data.source import recognize
from daskgpt.formats.llmc import read_tokens

TOKENS = np.array([50256, 0, 65535, 7], np.int64)


def test_round_trip_layout_and_mapping(tmp_path: Path):
    path = tmp_path / "a.bin"
    write_tokens(path, TOKENS)
    content = path.read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 4] + [0] * 253
    assert content[1024:] == b"\x50\xc4\x00\x00\xff\xff\x07\x00"
    tokens = read_tokens(path)
    np.testing.assert_array_equal(tokens, TOKENS.astype(np.uint16), strict=True)
    assert isinstance(tokens.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_nanogpts_ids_without_a_header(tmp_path: Path):
    for name, tokens in (("train.bin", np.arange(2000) % 777), ("val.bin", TOKENS[:1])):
        (tmp_path / name).write_bytes(tokens.astype("<u2").tobytes())
        ids = read_tokens(tmp_path / name)
        assert not ids.flags.writeable
        np.testing.assert_array_equal(ids, tokens.astype(np.uint16), strict=True)
    dataset = load_dataset(str(tmp_path / "*.bin"), "gpt2")
    assert "2 files" in dataset.description


def test_ids_of_a_vocabulary_that_is_pickled(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(ValueError, match="meta.pkl"):
        recognize(str(tmp_path / "train.bin"))
    write_tokens(tmp_path / "own.bin", TOKENS)  # llm.c's say by themselves what they are
    assert recognize(str(tmp_path / "own.bin")).kind == "token ids"


def test_glob_puts_files_in_a_row(tmp_path: Path):
    for name in ("part_000002.bin", "part_000001.bin", "other.bin"):
        write_tokens(tmp_path / name, np.array([len(name), int("2" in name)]))
    dataset = load_validation(recognize(str(tmp_path / "part_*.bin")), "bytes")
    assert dataset.validation.tolist() == [15, 0, 15, 1]
    # Checkpoints have the digest, so it must not change.
    assert dataset.digest == hashlib.sha256(np.array([15, 0, 15, 1], "<u2")).hexdigest()


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


NOT_WHOLE = [
    (b"", "bytes=0"),
    (header(20240520, 1, 1)[:1023], "begin with a header"),
    (header(20240326, 3), "llm.c model"),
    (header(20240801, 7, 2) + bytes(4), "must have 1032 bytes"),
    (header(20240801, 1, 2) + bytes(8), "version must be 7"),
    (header(20240521, 1, 1) + b"ab", "magic=20240521"),
    (b"abc", "2 bytes each"),
    (header(20240520, 2, 1) + b"ab", "version=2"),
    (header(20240520, 1, 0), "count=0"),
    (header(20240520, 1, 3) + b"abcde", "1030 bytes.*bytes=1029.*truncated"),
    (header(20240520, 1, 3) + b"abcdefg", "1030 bytes.*bytes=1031.*follow"),
]


@pytest.mark.parametrize(("content", "keyword"), NOT_WHOLE)
def test_incomplete_files_are_refused(tmp_path: Path, content: bytes, keyword: str):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=keyword):
        read_tokens(tmp_path / "a.bin")
