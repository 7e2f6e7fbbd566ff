"""Datasets from files, and the batches drawn from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from daskgpt.data.dataset import Dataset, batch, check_tokens, is_token_source, load_dataset, validation_batches
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
    assert dataset.training.dtype == dataset.validation.dtype == np.uint16
    assert (dataset.vocabulary, dataset.encoding_name) == (257, "bytes")


def test_description_says_where_from_and_how_much(book: Path):
    dataset = load_dataset(str(book))
    training, validation = dataset.training.size, dataset.validation.size
    assert dataset.description == (
        f"{book} (1 file): {training:,} training and {validation:,} validation tokens (bytes)"
    )


def test_standard_library_needs_nothing_else():
    dataset = load_dataset("stdlib", "bytes", sequence_length=1024)
    assert dataset.training.size > 2_000_000
    assert abs(dataset.validation.size / dataset.training.size - 1 / 9) < 0.01
    version = ".".join(map(str, sys.version_info[:2]))
    assert dataset.description.startswith(f"standard library of Python {version}")
    assert "\n" not in dataset.description
    check_tokens(dataset.training, dataset.vocabulary)


def test_documents_begin_with_end_of_text(tmp_path: Path):
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").write_text("two")
    (tmp_path / "held.txt").write_text("held out")
    dataset = load_dataset(str(tmp_path / "?.txt"), validation_source=str(tmp_path / "held.txt"))
    assert dataset.training.tolist() == [END, *b"one", END, *b"two"]
    assert dataset.validation.tolist() == [END, *b"held out"]
    assert dataset.description == (
        f"{tmp_path / '?.txt'} (2 files), validation {tmp_path / 'held.txt'} (1 file): "
        "8 training and 9 validation tokens (bytes)"
    )


def test_each_piece_cut_from_a_document_begins_with_end_of_text(book: Path):
    dataset = load_dataset(str(book))
    assert dataset.training[0] == dataset.validation[0] == END
    first = np.flatnonzero(dataset.training == END)
    assert first.size == np.count_nonzero(dataset.validation == END) + 1


def test_validation_fraction(book: Path):
    half = load_dataset(str(book), validation_fraction=0.5)
    assert 0.4 < half.validation.size / 200_000 < 0.6
    for fraction in (0.0, 1.0, -1.0):
        message = (
            f"load_dataset: validation_fraction must lie between 0 and 1; got validation_fraction={fraction}. Try 0.1."
        )
        with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
            load_dataset(str(book), validation_fraction=fraction)


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


def test_ids_beyond_the_vocabulary(tmp_path: Path):
    write_tokens(tmp_path / "train.bin", np.array([1, 257, 300]))
    message = (
        "check_tokens: every id must be at least 0 and below the vocabulary; got id=257, position=1, vocabulary=257. "
        "Use the encoding that the tokens were made with."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        load_dataset(str(tmp_path / "train.bin"), "bytes")


def test_negative_ids():
    check_tokens(np.array([0, 256]), 257)
    with pytest.raises(ValueError, match=r"got id=-1, position=1, vocabulary=257\."):
        check_tokens(np.array([0, -1]), 257)


def test_unknown_encoding(book: Path):
    message = "vocabulary_size: the encoding must be known; got encoding=byte. Did you mean bytes?"
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        load_dataset(str(book), "byte")


@pytest.mark.parametrize(
    ("training", "validation", "short", "count"),
    [("a" * 63, "b" * 100, "training", 64), ("a" * 64, "b" * 63, "validation", 64)],
)
def test_too_little_text(tmp_path: Path, training: str, validation: str, short: str, count: int):
    (tmp_path / "training").write_text(training)
    (tmp_path / "validation").write_text(validation)
    message = (
        f"load_dataset: the {short} part must hold at least sequence_length + 1 = 65 tokens; "
        f"got source={tmp_path / short}, tokens={count}. Give more text or a smaller sequence_length."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        load_dataset(str(tmp_path / "training"), validation_source=str(tmp_path / "validation"), sequence_length=64)


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
    program = (
        "import numpy as np; from daskgpt.data.dataset import batch; "
        "print(batch(np.arange(1000), batch_size=64, sequence_length=16, seed=3, step=5)[0][:, 0].tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout == f"{starts(3, 5)}\n"


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


@pytest.mark.parametrize("where", ["batch", "validation_batches"])
def test_sizes_that_cannot_be(where: str):
    def draw(batch_size: int, sequence_length: int) -> object:
        if where == "batch":
            return batch(TOKENS, batch_size=batch_size, sequence_length=sequence_length, seed=0, step=0)
        return validation_batches(TOKENS, batch_size=batch_size, sequence_length=sequence_length, count=1)

    for name, sizes in {"batch_size": (0, 16), "sequence_length": (4, 0)}.items():
        message = f"{where}: {name} must be at least 1; got {name}=0. Give a positive number."
        with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
            draw(*sizes)
    message = (
        f"{where}: there must be at least sequence_length + 1 = 1001 tokens; got tokens=1000. "
        "Give more text or a smaller sequence_length."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        draw(1, 1000)


@pytest.mark.parametrize(("seed", "step"), [(-1, 0), (0, -1)])
def test_negative_seed_or_step(seed: int, step: int):
    message = f"batch: seed and step must not be negative; got seed={seed}, step={step}. Give 0 or more."
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        batch(TOKENS, batch_size=1, sequence_length=16, seed=seed, step=step)


def test_no_validation_batches():
    message = "validation_batches: count must be at least 1; got count=0. Give a positive number."
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        validation_batches(TOKENS, batch_size=1, sequence_length=16, count=0)


def test_a_dataset_cannot_be_changed(book: Path):
    dataset = load_dataset(str(book))
    assert isinstance(dataset, Dataset)
    with pytest.raises(AttributeError):
        dataset.vocabulary = 1  # type: ignore[misc]
