"""Tests of datasets from files: batches and epochs drawn from them, held-out text, and files of tokens."""

import hashlib
import re
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command_lines import SMALL
from llmc_samples import write_tokens
from prepared_texts import BYTES, prepared, text_of
from small_runs import MODEL, fit, losses_of

import daskgpt
from daskgpt import train
from daskgpt.data import preparation
from daskgpt.data.dataset import (
    EPOCHS,
    BatchLoader,
    Dataset,
    MappedTokens,
    batch,
    check_tokens,
    load_dataset,
    load_validation,
    shuffled,
    validation_batches,
)
from daskgpt.data.source import recognize
from daskgpt.data.text import END, SPAN_CHARACTERS, SPAN_TOKENS, Run, runs, split_text, split_tokens
from daskgpt.formats.token_files import read_tokens

END_OF_TEXT = 256


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """200,000 bytes in numbered lines."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n:014d}\n" for n in range(10_000)))
    return path


def lines(tokens: np.ndarray) -> list[bytes]:
    return bytes(tokens[tokens != END_OF_TEXT].astype(np.uint8)).splitlines()


def test_parts_of_a_text_share_no_line(book: Path):
    dataset = load_dataset(str(book))
    training, validation = lines(dataset.training), lines(dataset.validation)
    assert sorted(training + validation) == book.read_bytes().splitlines()
    assert 0.07 < len(validation) / 10_000 < 0.13
    assert 0.4 < load_dataset(str(book), validation_fraction=0.5).validation.size / 200_000 < 0.6
    assert dataset.training[0] == dataset.validation[0] == END_OF_TEXT
    assert np.count_nonzero(dataset.training == END_OF_TEXT) == np.count_nonzero(dataset.validation == END_OF_TEXT) + 1
    assert dataset.training.dtype == dataset.validation.dtype == np.uint16
    assert (dataset.vocabulary, dataset.encoding_name) == (257, "bytes")


def test_documents_begin_with_end_of_text(tmp_path: Path):
    for name, text in (("1.txt", "one"), ("2.txt", "two")):
        (tmp_path / name).write_text(text)
    ids = load_validation(recognize(str(tmp_path / "?.txt")), "bytes").validation
    assert ids.tolist() == [END_OF_TEXT, *b"one", END_OF_TEXT, *b"two"]
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
    write_tokens(tmp_path / "all.bin", np.array([END_OF_TEXT, *b"0123456789"]))
    assert load_dataset(str(tmp_path / "all.bin"), "bytes").training.tolist()[:3] == [END_OF_TEXT, *b"01"]


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
    assert (tokens.tolist(), targets.tolist()) == ([[END_OF_TEXT] + [97] * 63], [[97] * 64])


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


# Held-out text: the right share, evenly spread, and nothing twice


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.5, 0.75])
@pytest.mark.parametrize("total", [100, 12_345, 1_000_000])
def test_runs_are_consecutive_and_hold_out_the_share(total: int, fraction: float):
    cuts = runs(total, 100, fraction)
    assert (cuts[0].start, cuts[-1].stop) == (0, total)
    assert all(a.stop == b.start and a.held_out != b.held_out for a, b in pairwise(cuts))
    share = sum(run.stop - run.start for run in cuts if run.held_out)
    assert 0 < share < total
    assert abs(share - fraction * total) <= min(100, fraction * total)


def test_held_out_spans_by_fraction():
    held_out = [run for run in runs(3000, 100, 0.1) if run.held_out]
    assert held_out == [Run(400, 500, True), Run(1400, 1500, True), Run(2400, 2500, True)]
    assert runs(1000, 10, 1 - 1e-9) == [Run(0, 1000, True)]
    assert runs(1000, 10, 0.0) == [Run(0, 1000, False)]
    assert split_text(["text", "more"], 0.0) == (["text", "more"], [])


def test_a_piece_continues_as_long_as_its_part_does():
    """Training pieces are nine spans long."""
    text = "".join(f"{n} {'x' * (n * 7 % 90)}\n" for n in range(20_000))
    training, validation = split_text([text], 0.1)
    assert "".join(sorted(training + validation, key=text.index)) == text
    assert max(map(len, training)) > 8 * SPAN_CHARACTERS
    assert len(training) == len(validation) + 1 >= 6


def test_text_without_lines_is_cut_at_spans():
    text = "ä" * (20 * SPAN_CHARACTERS)
    training, validation = split_text([text], 0.1)
    assert [len(piece) for piece in validation] == [SPAN_CHARACTERS] * 2
    assert [len(piece) // SPAN_CHARACTERS for piece in training] == [4, 9, 5]


def test_short_texts_and_distant_line_ends():
    for length in range(1, 60):
        text = "".join("\n" if n % 7 == 6 else chr(65 + n) for n in range(length))
        training, validation = split_text([text[:9], text[9:]], 0.1)
        assert sorted("".join(training + validation)) == sorted(text)
        assert bool(validation) == (length >= 5)
    # Spans of 100 characters, one line end in all: right behind the held-out span.
    text = "a" * 510 + "\n" + "b" * 489
    training, validation = split_text([text], 0.1)
    assert (training, validation) == (["a" * 400, "b" * 489], ["a" * 110 + "\n"])


def test_tokens_are_cut_into_views():
    tokens = np.arange(25 * SPAN_TOKENS, dtype=np.int32)
    training, validation = split_tokens(tokens, 0.1)
    spans = [(int(piece[0]) // SPAN_TOKENS, piece.size // SPAN_TOKENS) for piece in validation]
    assert spans == [(4, 1), (14, 1), (24, 1)]
    assert all(np.shares_memory(piece, tokens) for piece in training + validation)
    np.testing.assert_array_equal(np.sort(np.concatenate(training + validation)), tokens)


def test_held_out_end_is_exact():
    """As others cut the plays: 1,115,394 characters at 0.9 of them."""
    assert runs(1_115_394, SPAN_CHARACTERS, 0.1, END) == [Run(0, 1_003_854, False), Run(1_003_854, 1_115_394, True)]
    words = "first line\nsecond line\n" * 50
    documents = [words[:700], words[700:]]
    training, validation = split_text(documents, 0.5, END)
    assert "".join(training) + "".join(validation) == words
    assert len("".join(validation)) == len(words) // 2
    parts = split_tokens(np.arange(100), 0.25, END)
    assert [part[0].tolist() for part in parts] == [list(range(75)), list(range(75, 100))]


# Token files: llm.c's and nanoGPT's

IDS = np.array([50256, 0, 65535, 7], np.int64)


def test_round_trip_layout_and_mapping(tmp_path: Path):
    path = tmp_path / "a.bin"
    write_tokens(path, IDS)
    content = path.read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 4] + [0] * 253
    assert content[1024:] == b"\x50\xc4\x00\x00\xff\xff\x07\x00"
    tokens = read_tokens(path)
    np.testing.assert_array_equal(tokens, IDS.astype(np.uint16), strict=True)
    assert isinstance(tokens.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_nanogpts_ids_without_a_header(tmp_path: Path):
    for name, tokens in (("train.bin", np.arange(2000) % 777), ("val.bin", IDS[:1])):
        (tmp_path / name).write_bytes(tokens.astype("<u2").tobytes())
        ids = read_tokens(tmp_path / name)
        assert not ids.flags.writeable
        np.testing.assert_array_equal(ids, tokens.astype(np.uint16), strict=True)
    dataset = load_dataset(str(tmp_path / "*.bin"), "gpt2")
    assert "2 files" in dataset.description


def test_ids_of_a_vocabulary_that_is_pickled(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(IDS.astype("<u2").tobytes())
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(ValueError, match="meta.pkl"):
        recognize(str(tmp_path / "train.bin"))
    write_tokens(tmp_path / "own.bin", IDS)  # llm.c's say by themselves what they are
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
    (header(20240520, 1, 1)[:1023], "begin with a header"),
    (header(20240520, 1, 1)[:8], "begin with a header"),
    (header(20240326, 3), "llm.c model"),
    (header(20240801, 7, 2) + bytes(4), "must have 1032 bytes"),
    (header(20240801, 1, 2) + bytes(8), "version must be 7"),
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


# Tokens in several files as one row, orders of epochs, and batches read ahead

ROW = np.arange(1000, dtype=np.uint16)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_epoch_sees_each_sequence_once(count):
    for epoch in range(3):
        order = shuffled(np.arange(count), count, seed=7, epoch=epoch)
        assert sorted(order) == list(range(count))


def test_order_depends_on_epoch_and_seed():
    first, other, third = (shuffled(np.arange(5000), 5000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    for one, two in ((first, other), (first, third), (first, np.arange(5000))):
        assert np.count_nonzero(one == two) < 20
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.06
    # Neighbours do not stay neighbours.
    assert np.count_nonzero(np.abs(np.diff(first)) == 1) < 20
    # An order of billions takes no memory.
    places = np.array([0, 1, 2, 4 * 10**12 - 1])
    order = shuffled(places, 4 * 10**12, seed=0, epoch=0)
    assert len({place for place in order.tolist() if 0 <= place < 4 * 10**12}) == 4
    np.testing.assert_array_equal(shuffled(places[2:], 4 * 10**12, 0, 0), order[2:])


def test_epoch_batches_have_every_target_once():
    """Also where an epoch ends within a batch."""
    shape = {"batch_size": 7, "sequence_length": 10}
    count = 999 // 10
    taken = [batch(ROW, **shape, seed=3, step=step, order=EPOCHS) for step in range(count)]
    starts = np.concatenate([x[:, 0] for x, _ in taken])
    for epoch in range(7):
        starts_of_epoch = starts[epoch * count : (epoch + 1) * count]
        assert sorted(starts_of_epoch) == [10 * number for number in range(count)]
    for x, y in taken:
        np.testing.assert_array_equal(y, x + 1)


def test_an_id_beyond_the_vocabulary_ends_a_batch():
    sizes = {"sequence_length": 10, "vocabulary": 900}
    with pytest.raises(ValueError, match="largest=9[0-9][0-9], vocabulary=900"):
        batch(ROW, batch_size=99, seed=0, step=0, order=EPOCHS, **sizes)
    with pytest.raises(ValueError, match="largest=9[0-9][0-9], vocabulary=900"):
        list(validation_batches(ROW, batch_size=99, count=1, **sizes))
    with pytest.raises(ValueError, match="largest=4294967295"):
        batch(np.array([1, 2**32 - 1] * 9, np.uint32), batch_size=1, seed=0, step=0, **sizes)


def test_next_batches_are_read_ahead():
    readers = []

    class Watched(MappedTokens):
        def __getitem__(self, places):
            readers.append(threading.current_thread().name)
            return super().__getitem__(places)

    loader = BatchLoader(Dataset(Watched([ROW]), ROW, 1000, "bytes", ""), 4, 8, 5, EPOCHS)
    expected = [batch(ROW, batch_size=4, sequence_length=8, seed=5, step=step, order=EPOCHS) for step in range(8)]
    for numbers in ([0], [1], [2, 3], [4, 5], [1], [2, 7]):  # steps that are made again, and some in one
        for number, tokens in zip(numbers, loader.take(numbers)):
            np.testing.assert_array_equal(tokens, expected[number])
    loader.reader.submit(int).result()
    assert len(readers) > 9, "those that come next as well"
    assert all(name.startswith("batches") for name in readers)
    loader.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One text in one file of tokens, and in many."""
    folder = tmp_path_factory.mktemp("folders")
    (folder / "text.txt").write_bytes(text_of(100_000).encode())
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskgpt.data.text.BLOCK_BYTES", 9999)
        for most in (1, 1024):
            patch.setattr(preparation, "PARTITIONS", most)
            made.append(prepared(folder, folder / "text.txt", *BYTES, out=f"at most {most}"))
    return made


def test_training_on_shards_and_resume(folders, tmp_path):
    one, many = folders
    # Shards are mapped, one by one.
    parts = load_dataset(str(many)).training.parts
    assert len([part for part in parts if isinstance(part.base, np.memmap)]) == len(parts) > 50
    flags = [*SMALL, "--sample-tokens", "0", "--schedule", "constant"]
    for name, data, steps in (("one", one, 12), ("many", many, 12), ("short", one, 5)):
        train.main(["--data", str(data), *flags, "--steps", str(steps), "--out", str(tmp_path / name)])
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "many")
    assert 'order = "epochs"' in (tmp_path / "one" / "config.toml").read_text()
    train.main(["--resume", str(tmp_path / "short"), "--steps", "12"])
    assert losses_of(tmp_path / "short") == losses_of(tmp_path / "one")


def test_prepared_tokens_are_not_divided_again(folders, small_text, tmp_path):
    prepared, out = str(folders[0]), str(tmp_path / "run")
    flags = [*SMALL, "--steps", "1", "--sample-tokens", "0", "--out", out]
    for wrong in (["--validation-fraction", "0.2"], ["--held-out", "end"]):
        with pytest.raises(ValueError, match=f"must not be divided; got .*={wrong[1]}, data={re.escape(prepared)}"):
            train.main(["--data", prepared, *wrong, *flags])
    with pytest.raises(ValueError, match="Leave out validation_fraction and held_out"):
        daskgpt.fit(MODEL, {"data": prepared, "sequence_length": 16, "validation_fraction": 0.2, "held_out": "end"})
    assert not Path(out).exists()
    # What is the default, or comes from another run, is not asked for.
    assert train.main(["--data", str(small_text), "--held-out", "end", *flags]) == 0
    begun = ["--init", out, *flags[:-1], str(tmp_path / "second")]
    assert train.main(["--data", prepared, "--held-out", "spans", *begun]) == 0


@pytest.mark.parametrize(("barrier", "place"), [("none", "(in steps 5 to 8)"), ("step", "(in step 7)")])
def test_an_error_of_a_step_names_it(barrier, place, small_text, monkeypatch):
    def damaged(*arguments, step, **options):
        if step == 6:
            raise ValueError("batch: damaged")
        return batch(*arguments, step=step, **options)

    monkeypatch.setattr("daskgpt.data.dataset.batch", damaged)
    dials = {"barrier": barrier, "batch_chunk": 4, "sequence_chunk": 16, "grain": "block", "scheduler": "sync"}
    with pytest.raises(ValueError, match="damaged") as refused:
        fit(small_text, dataflow=dials)
    assert refused.value.__notes__ == [place]
