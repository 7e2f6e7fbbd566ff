"""Tests of tokens in several files as one row, orders of epochs, and batches read ahead."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from command_lines import SMALL
from prepared_texts import BYTES, prepared, text_of
from small_runs import MODEL, fit, losses_of

import daskgpt
from daskgpt import train
from daskgpt.data import preparation, text
from daskgpt.data.dataset import (
    EPOCHS,
    BatchLoader,
    Dataset,
    MappedTokens,
    batch,
    load_dataset,
    shuffled,
    validation_batches,
)

ROW = np.arange(1000, dtype=np.uint16)


@pytest.mark.parametrize("cuts", [[], [1], [500], [10, 11, 990], list(range(1, 1000))])
def test_parts_are_read_as_one_row(cuts):
    tokens = MappedTokens(np.split(ROW, cuts))
    assert (tokens.size, tokens.dtype) == (1000, np.uint16)
    for part in (slice(None), slice(5, 700), slice(-30, None), slice(10, 10), slice(3, 900, 7)):
        np.testing.assert_array_equal(tokens[part], ROW[part])
    places = np.random.default_rng(1).integers(0, 1000, (7, 9))
    np.testing.assert_array_equal(tokens[places], ROW[places])


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


def test_batches_do_not_depend_on_file_ends():
    shape = {"batch_size": 7, "sequence_length": 10, "seed": 3, "step": 5}
    for order in ("random", EPOCHS):
        whole = batch(ROW, **shape, order=order)
        for cuts in ([3], [500, 501], list(range(0, 1000, 7))):
            parts = batch(MappedTokens(np.split(ROW, cuts)), **shape, order=order)
            np.testing.assert_array_equal(parts, whole)
    # An id beyond the vocabulary ends a batch.
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
        patch.setattr(text, "BLOCK_BYTES", 9999)
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
