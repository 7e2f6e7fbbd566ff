"""Tests of datasets from files, and of the batches drawn from them."""

from pathlib import Path

import numpy as np
import pytest
from llmc_samples import write_tokens

from daskgpt.data.dataset import batch, check_tokens, load_dataset, load_validation, validation_batches
from daskgpt.data.source import recognize

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
    for name, text in (("1.txt", "one"), ("2.txt", "two")):
        (tmp_path / name).write_text(text)
    ids = load_validation(recognize(str(tmp_path / "?.txt")), "bytes").validation
    assert ids.tolist() == [END, *b"one", END, *b"two"]
    (tmp_path / "2.txt").write_text("two" * 9)
    described = load_dataset(str(tmp_path / "?.txt"), validation_fraction=0.1).description
    assert "?.txt (2 files): 30 training and 4 validation tokens (bytes)" in described


def test_token_files_default_to_gpt2(tmp_path: Path):
    write_tokens(tmp_path / "train.bin", np.arange(50257))
    dataset = load_dataset(str(tmp_path / "train.bin"))
    assert (dataset.vocabulary, dataset.encoding_name) == (50257, "gpt2")
    ids = load_validation(recognize(str(tmp_path / "train.bin")), "gpt2").validation
    assert isinstance(ids.base, np.memmap)
    np.testing.assert_array_equal(ids, np.arange(50257))


def test_one_token_file_is_split_into_spans(tmp_path: Path):
    write_tokens(tmp_path / "all.bin", np.arange(50256))
    dataset = load_dataset(str(tmp_path / "all.bin"))
    validation = dataset.validation[dataset.validation != 50256]
    training = dataset.training[dataset.training != 50256]
    np.testing.assert_array_equal(np.sort(np.concatenate([training, validation])), np.arange(50256))
    assert 4096 <= validation.size <= 2 * 4096
    # End of text is not written twice.
    write_tokens(tmp_path / "all.bin", np.array([END, *b"0123456789"]))
    assert load_dataset(str(tmp_path / "all.bin"), "bytes").training.tolist()[:3] == [END, *b"01"]


REFUSED = [
    ({"encoding": "byte"}, "Did you mean bytes"),
    ({"encoding": "learn:many"}, "learn: and a number"),
    ({"encoding": "learn:12"}, "from 258 to"),
    ({"source": "tokens.bin", "encoding": "learn:300"}, "learned from text"),
    ({"source": "tokens.bin", "encoding": "bytes"}, "largest=300, vocabulary=257"),
    ({"source": "63", "sequence_length": 64}, "training part.*tokens="),
    ({"source": "630", "sequence_length": 64}, "validation part.*tokens=64"),
]


@pytest.mark.parametrize(("settings", "keyword"), REFUSED)
def test_bad_sources_are_refused(settings, keyword, book, monkeypatch):
    monkeypatch.chdir(book.parent)
    write_tokens("tokens.bin", np.array([1, 257, 300]))
    for size in (63, 630):
        Path(str(size)).write_text("a" * size)
    with pytest.raises(ValueError, match=keyword):
        load_dataset(**{"source": str(book), **settings})


def test_smallest_accepted_ids_and_texts(tmp_path: Path):
    check_tokens(np.array([0, 256]), 257)
    with pytest.raises(ValueError, match="least=-1"):
        check_tokens(np.array([0, -1]), 257)
    source = tmp_path / "training"
    source.write_text("a" * 640)
    dataset = load_dataset(str(source), sequence_length=64)
    tokens, targets = batch(dataset.validation, batch_size=1, sequence_length=64, seed=0, step=0)
    assert (tokens.tolist(), targets.tolist()) == ([[END] + [97] * 63], [[97] * 64])


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


def test_batch_depends_only_on_seed_and_step():
    assert starts(3, 5) == starts(3, 5)
    assert len({tuple(starts(seed, step)) for seed in range(4) for step in range(4)}) == 16
    # A run that is continued elsewhere must draw what it would have drawn here; and every start occurs.
    assert starts(0, 0, 4) == [553, 781, 820, 501]
    tokens, targets = batch(TOKENS[:20], batch_size=400, sequence_length=16, seed=0, step=0)
    assert set(tokens[:, 0].tolist()) == {0, 1, 2, 3}
    assert targets.max() == 19


def test_validation_windows_are_fixed_and_reach_from_end_to_end():
    batches = list(validation_batches(TOKENS, batch_size=3, sequence_length=100, count=4))
    assert np.array(batches).shape == (4, 2, 3, 100)
    first = [int(row[0]) for tokens, _ in batches for row in tokens]
    assert (first[0], first[-1]) == (0, 899)
    assert set(np.diff(first)) == {81, 82}
    for tokens, targets in batches:
        assert tokens.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(targets, tokens + 1)
    ((tokens, targets),) = validation_batches(TOKENS, batch_size=1, sequence_length=999, count=1)
    assert (tokens[0, 0], targets[0, -1]) == (0, 999)
