"""Tests of datasets from files, and of the batches drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskgpt.data.dataset import batch, check_tokens, is_token_source, load_dataset, validation_batches
from daskgpt.formats.llmc_tokens import write_tokens

END = 256


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """200,000 bytes in numbered lines."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n:014d}\n" for n in range(10_000)))
    return path


def lines(tokens: np.ndarray) -> list[bytes]:
    return bytes(tokens[tokens != END].astype(np.uint8)).splitlines()


def test_parts_of_a_text_share_no_line(book: Path):
    dataset = load_dataset(str(book))
    training, validation = lines(dataset.training), lines(dataset.validation)
    assert sorted(training + validation) == book.read_bytes().splitlines()
    assert 0.07 < len(validation) / 10_000 < 0.13
    assert 0.4 < load_dataset(str(book), validation_fraction=0.5).validation.size / 200_000 < 0.6
    assert dataset.training[0] == dataset.validation[0] == END
    assert np.count_nonzero(dataset.training == END) == np.count_nonzero(dataset.validation == END) + 1
    assert dataset.training.dtype == dataset.validation.dtype == np.uint16
    assert (dataset.vocabulary, dataset.encoding_name) == (257, "bytes")


def test_documents_begin_with_end_of_text(tmp_path: Path):
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").write_text("two")
    (tmp_path / "held.txt").write_text("held out")
    dataset = load_dataset(str(tmp_path / "?.txt"), validation_source=str(tmp_path / "held.txt"))
    assert dataset.training.tolist() == [END, *b"one", END, *b"two"]
    assert dataset.validation.tolist() == [END, *b"held out"]
    assert "?.txt (2 files), validation" in dataset.description
    assert "(1 file): 8 training and 9 validation tokens (bytes)" in dataset.description


def test_token_files_are_taken_for_gpt2s(tmp_path: Path):
    write_tokens(tmp_path / "train.bin", np.arange(50257))
    write_tokens(tmp_path / "val.bin", np.arange(100))
    dataset = load_dataset(str(tmp_path / "train.bin"), validation_source=str(tmp_path / "val.bin"))
    assert (dataset.vocabulary, dataset.encoding_name) == (50257, "gpt2")
    assert isinstance(dataset.training.base, np.memmap)
    np.testing.assert_array_equal(dataset.training, np.arange(50257))
    np.testing.assert_array_equal(dataset.validation, np.arange(100))


def test_one_token_file_is_split_into_spans(tmp_path: Path):
    write_tokens(tmp_path / "all.bin", np.arange(50256))
    dataset = load_dataset(str(tmp_path / "all.bin"))
    validation = dataset.validation[dataset.validation != 50256]
    training = dataset.training[dataset.training != 50256]
    np.testing.assert_array_equal(np.sort(np.concatenate([training, validation])), np.arange(50256))
    assert 4096 <= validation.size <= 2 * 4096


def test_end_of_text_is_not_written_twice(tmp_path: Path):
    write_tokens(tmp_path / "all.bin", np.array([END, *b"0123456789"]))
    dataset = load_dataset(str(tmp_path / "all.bin"), "bytes")
    assert dataset.training.tolist()[:3] == [END, *b"01"]


def test_token_files_with_a_text_for_validation(tmp_path: Path):
    write_tokens(tmp_path / "train.bin", np.array(list(b"training")))
    (tmp_path / "val.txt").write_text("validation")
    dataset = load_dataset(str(tmp_path / "train.bin"), "bytes", validation_source=str(tmp_path / "val.txt"))
    assert bytes(dataset.training.tolist()) == b"training"
    assert dataset.validation.tolist() == [END, *b"validation"]


def test_token_sources_are_known_by_their_ending():
    assert is_token_source("data/part_*.bin")
    assert not is_token_source("data/bin")


@pytest.mark.parametrize(
    ("settings", "keyword"),
    [
        ({"encoding": "byte"}, "Did you mean bytes"),
        *[({"validation_fraction": fraction}, "must lie between 0 and 1") for fraction in (0.0, 1.0, -1.0)],
        ({"encoding": "learn:many"}, "learn: and a number"),
        ({"encoding": "learn:12"}, "must lie between 258"),
        ({"source": "tokens.bin", "encoding": "learn:300"}, "learned from text"),
        ({"source": "tokens.bin", "encoding": "bytes"}, "id=257, position=1, vocabulary=257"),
        ({"source": "63", "validation_source": "64", "sequence_length": 64}, "training part.*tokens=64"),
        ({"source": "64", "validation_source": "63", "sequence_length": 64}, "validation part.*tokens=64"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], keyword: str, book: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(book.parent)
    write_tokens("tokens.bin", np.array([1, 257, 300]))
    for size in (63, 64):
        Path(str(size)).write_text("a" * size)
    with pytest.raises(ValueError, match=keyword):
        load_dataset(**{"source": str(book), **settings})


def test_negative_ids():
    check_tokens(np.array([0, 256]), 257)
    with pytest.raises(ValueError, match="id=-1, position=1"):
        check_tokens(np.array([0, -1]), 257)


def test_just_enough_text(tmp_path: Path):
    (tmp_path / "training").write_text("a" * 64)
    source = str(tmp_path / "training")
    dataset = load_dataset(source, validation_source=source, sequence_length=64)
    tokens, targets = batch(dataset.training, batch_size=1, sequence_length=64, seed=0, step=0)
    assert tokens.tolist() == [[END] + [97] * 63]
    assert targets.tolist() == [[97] * 64]


TOKENS = np.arange(1000, dtype=np.uint16)


def test_targets_are_the_next_tokens():
    tokens, targets = batch(TOKENS, batch_size=4, sequence_length=16, seed=1, step=2)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert targets.flags.c_contiguous
    np.testing.assert_array_equal(targets, tokens + 1)
    np.testing.assert_array_equal(tokens, tokens[:, :1] + np.arange(16))


def starts(seed: int, step: int, batch_size: int = 64) -> list[int]:
    return batch(TOKENS, batch_size=batch_size, sequence_length=16, seed=seed, step=step)[0][:, 0].tolist()


def test_a_batch_depends_on_seed_and_step_alone():
    np.random.default_rng(0).random()
    assert starts(3, 5) == starts(3, 5)
    drawn = [starts(seed, step) for seed in range(4) for step in range(4)]
    assert len({tuple(one) for one in drawn}) == 16


def test_known_starts():
    """A run that is continued elsewhere must draw what it would have drawn here."""
    assert starts(0, 0, 4) == [553, 781, 820, 501]


def test_every_start_occurs():
    few = np.arange(20, dtype=np.uint16)
    tokens, targets = batch(few, batch_size=400, sequence_length=16, seed=0, step=0)
    assert set(tokens[:, 0].tolist()) == {0, 1, 2, 3}
    assert targets.max() == 19


def test_batch_leaves_its_tokens_alone(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS)
    mapped = load_dataset(str(tmp_path / "a.bin"), validation_source=str(tmp_path / "a.bin")).training
    tokens, _ = batch(mapped, batch_size=4, sequence_length=16, seed=1, step=2)
    tokens[:] = 0
    np.testing.assert_array_equal(mapped, TOKENS)


def test_validation_windows_are_fixed_and_reach_from_end_to_end():
    batches = list(validation_batches(TOKENS, batch_size=3, sequence_length=100, count=4))
    again = list(validation_batches(TOKENS, batch_size=3, sequence_length=100, count=4))
    np.testing.assert_array_equal(np.array(batches), np.array(again))
    assert np.array(batches).shape == (4, 2, 3, 100)
    first = [int(row[0]) for tokens, _ in batches for row in tokens]
    assert (first[0], first[-1]) == (0, 899)
    assert set(np.diff(first)) == {81, 82}
    for tokens, targets in batches:
        assert tokens.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(targets, tokens + 1)


def test_one_validation_window():
    ((tokens, targets),) = validation_batches(TOKENS, batch_size=1, sequence_length=999, count=1)
    assert (tokens[0, 0], targets[0, -1]) == (0, 999)


@pytest.mark.parametrize(
    ("settings", "keyword"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"sequence_length": 1000}, "tokens=1000"),
    ],
)
def test_sizes_that_cannot_be(settings: dict[str, int], keyword: str):
    sizes = {"batch_size": 1, "sequence_length": 16} | settings
    with pytest.raises(ValueError, match=keyword):
        batch(TOKENS, **sizes, seed=0, step=0)
    with pytest.raises(ValueError, match=keyword):
        validation_batches(TOKENS, **sizes, count=1)


def test_numbers_that_cannot_be():
    for seed, step in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="must not be negative"):
            batch(TOKENS, batch_size=1, sequence_length=16, seed=seed, step=step)
    with pytest.raises(ValueError, match="count must be at least 1"):
        validation_batches(TOKENS, batch_size=1, sequence_length=16, count=0)
