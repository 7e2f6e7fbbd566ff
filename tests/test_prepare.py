"""Tests of preparing tokens: the same bytes with any scheduler and any number of stops, and errors."""

import fcntl
import gzip
import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from full_disk import full_disk
from machines import KillItself, on_workers
from prepared_texts import BYTES, files_of, prepared, text_of, tokens_of, write_corpus
from pyarrow import parquet

from daskgpt.data import preparation, source, text
from daskgpt.data.dataset import load_dataset
from daskgpt.data.preparation import Preparation, PrepareConfig
from daskgpt.formats.encoding import Encoding, get_encoding
from daskgpt.formats.token_files import JOURNAL, MANIFEST, VOCABULARY_FILE, read_manifest


def codec_of(folder: Path) -> Encoding:
    load_dataset(str(folder))  # which makes a learned vocabulary known
    return get_encoding(read_manifest(folder).encoding)


def pieces_of(folder: Path, part: str) -> list[bytes]:
    """What stands behind each end-of-text, in bytes; its tokens are those of the piece alone."""
    codec, row = codec_of(folder), tokens_of(folder, part)
    assert row[0] == codec.eot_token
    documents = [tokens[1:] for tokens in np.split(row, np.flatnonzero(row == codec.eot_token))[1:]]
    pieces = [b"".join(codec.tokens[token] for token in tokens) for tokens in documents]
    for tokens, piece in zip(documents[::9], pieces[::9]):
        np.testing.assert_array_equal(tokens, codec.encode(piece.decode()))
    return pieces


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("expected"), corpus, *BYTES)


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """A vocabulary of byte pairs, for machines without GPT-2's."""
    return prepared(tmp_path_factory.mktemp("learned"), corpus / "below", "--encoding", "learn:300") / VOCABULARY_FILE


# The tokens


@pytest.mark.parametrize("encoding", ["bytes", "learned"])
def test_pieces_of_both_parts_are_the_whole_text(encoding, learned, tmp_path):
    """Of a text in several blocks; pieces are whole lines."""
    whole, path = text_of(800_000).encode(), tmp_path / "text.txt"
    path.write_bytes(whole)
    assert len(whole) > text.BLOCK_BYTES
    flags = ("--encoding", learned if encoding == "learned" else encoding, "--scheduler", "sync")
    folder = prepared(tmp_path, path, *flags)
    left = {part: pieces_of(folder, part) for part in ("train", "val")}
    assert 0.08 < sum(map(len, left["val"])) / path.stat().st_size < 0.12
    rest = whole
    while rest:
        piece = next(pieces.pop(0) for pieces in left.values() if pieces and rest.startswith(pieces[0]))
        rest = rest[len(piece) :]
        assert not rest or piece.endswith(b"\n")
    assert not any(left.values())


def test_manifest_and_shards_agree(expected, corpus):
    manifest = read_manifest(expected)
    pieces = [piece for part in ("train", "val") for piece in pieces_of(expected, part)]
    for name, part in (("train", manifest.train), ("val", manifest.val)):
        row = tokens_of(expected, name)
        assert part.documents == np.count_nonzero(row == 256)
        assert part.bytes == np.count_nonzero(row != 256)
        assert sum(shard.tokens for shard in part.shards) == part.tokens == row.size
        assert {shard.file: shard.sha256 for shard in part.shards}.items() <= files_of(expected).items()
    texts = (path for path in corpus.rglob("*") if path.suffix in (".txt", ".md"))
    assert sum(map(len, pieces)) == sum(path.stat().st_size for path in texts)
    files = [shard.file for shard in manifest.train.shards]
    assert files == [f"train_{number:06}.bin" for number in range(4)]


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl.gz"])
def test_compressed_files_give_the_same_tokens(kind, tmp_path):
    """Also where they are cut into blocks, and of several parts."""
    documents = [text_of(2000, seed=number) for number in range(400)]
    lines = "".join(json.dumps({"id": 1, "body": document}) + "\n" for document in documents)
    content = ("\n\n".join(documents) if kind == "txt.gz" else lines).encode()
    assert len(content) > text.BLOCK_BYTES
    plain, packed = tmp_path / f"a.{kind.removesuffix('.gz')}", tmp_path / f"a.{kind}"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content[:999], 1) + gzip.compress(content[999:], 1))
    one, other = (prepared(tmp_path, of, *BYTES, "--field", "body", out=f"{of.name}-tokens") for of in (plain, packed))
    for part in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(one, part), tokens_of(other, part))


def test_partitions_change_no_token(tmp_path, monkeypatch):
    """Texts and lines, some longer than a block, cut where blocks end or in one piece."""
    block = text.BLOCK_BYTES
    lines = [json.dumps({"text": text_of(size, seed=size)}) for size in (9, 900_000, 99, 80_000, *range(5, 500))]
    exact = json.dumps({"text": "x" * (block - 13)})  # with its line break, it ends where a block does
    (tmp_path / "1.jsonl").write_text("\n".join([exact, *lines]))
    (tmp_path / "2.txt").write_bytes(b"\xef\xbb\xbf" + text_of(900_000).encode())
    (tmp_path / "3.txt").write_bytes(b" " * (block + 99) + text_of(900_000, seed=1).encode())
    (tmp_path / "4.txt").write_text("北京" * (block // 4))
    (tmp_path / "5.txt").write_text("the end")
    folders = []
    for most in (1024, 2, 1):
        monkeypatch.setattr(preparation, "PARTITIONS", most)
        folders.append(prepared(tmp_path, *sorted(tmp_path.glob("?.*")), *BYTES, out=f"most {most}"))
    counts = [len(read_manifest(folder).train.shards) for folder in folders]
    assert counts[0] > 6 > counts[1] > counts[2] == 1
    for part in ("train", "val"):
        for folder in folders[1:]:
            np.testing.assert_array_equal(tokens_of(folder, part), tokens_of(folders[0], part))
    assert sum(tokens_of(folders[0], part).tobytes().count(b"x\0") for part in ("train", "val")) > block - 99


@pytest.mark.parametrize(
    ("wrong", "rule"), [(b"no json", "JSON in UTF-8"), (b'{"text": "b\xffd"}', "JSON in UTF-8"), (b"[1]", "field text")]
)
def test_a_wrong_line_of_a_later_block_is_found(wrong, rule, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 100)
    monkeypatch.setattr(source, "LOOKED_AT", 200)
    (tmp_path / "a.jsonl").write_bytes((json.dumps({"text": "x" * 37}) + "\n").encode() * 5 + wrong)  # 50 bytes each
    with pytest.raises(ValueError, match=rf"{rule}.*path=.*/a.jsonl, line 2 from byte 200 on, found="):
        prepared(tmp_path, tmp_path / "a.jsonl", *BYTES, "--scheduler", "sync")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_row_groups_are_partitions(tmp_path, monkeypatch):
    bodies = [text_of(500, seed=number) for number in range(60)]
    parquet.write_table(pyarrow.table({"id": range(60), "body": bodies}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": body}) + "\n" for body in bodies))
    monkeypatch.setattr(text, "BLOCK_BYTES", 20_000)
    flags = (*BYTES, "--field", "body")
    lines, many = (prepared(tmp_path, tmp_path / name, *flags, out=f"of {name}") for name in ("a.jsonl", "a.parquet"))
    assert len(read_manifest(many).train.shards) > 3
    monkeypatch.setattr(preparation, "PARTITIONS", 1)
    one = prepared(tmp_path, tmp_path / "a.parquet", *flags, out="one")
    for part in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(one, part), tokens_of(many, part))
        np.testing.assert_array_equal(tokens_of(one, part), tokens_of(lines, part))
    (file,) = source.recognize(str(tmp_path / "a.parquet"), field="body").files
    assert [place for place, _ in text.texts(file, 2, 3)] == [f"row {number}" for number in range(15, 22)]
    with pytest.raises(ValueError, match=r"field id of every record must be text; .*a\.parquet, row [0-9]+, found="):
        prepared(tmp_path, tmp_path / "a.parquet", *BYTES, "--field", "id", out="refused")


# Whoever encodes, however often it was stopped


@pytest.mark.parametrize("who", ["sync", "threads --threads 4"])
def test_schedulers_give_the_same_bytes(who, corpus, expected, tmp_path):
    assert files_of(prepared(tmp_path, corpus, *BYTES, "--scheduler", *who.split())) == files_of(expected)


def test_cluster_gives_the_same_bytes_and_finished_work_is_kept(
    cluster, corpus, expected, tmp_path, monkeypatch, capsys
):
    """Its workers have another working folder than the one that paths are given from."""
    cluster.have(2)
    monkeypatch.chdir(corpus.parent)
    for _ in range(2):
        folder = prepared(tmp_path, corpus.name, *BYTES, "--scheduler", cluster.address)
        assert files_of(folder) == files_of(expected)
    assert "already existed" in capsys.readouterr().out


def test_partitions_of_a_lost_worker_are_made_again(cluster, corpus, expected, tmp_path):
    cluster.have(2)
    once = tmp_path / "killed"
    with on_workers(cluster.address, KillItself("tokenize", 2, once)):
        files = files_of(prepared(tmp_path, corpus, *BYTES, "--scheduler", cluster.address))
    assert files == files_of(expected)
    assert once.exists()
    assert hidden(tmp_path / "out") == {JOURNAL}


def test_workers_that_do_not_share_the_folder_are_named(corpus, tmp_path):
    """As on a machine with another file system."""

    def elsewhere(bag, take):
        shutil.rmtree(tmp_path / "out")
        bag.compute(scheduler="sync")

    config = PrepareConfig(out=str(tmp_path / "out"), encoding="bytes")
    with pytest.raises(FileNotFoundError, match="worker must find the folder"):
        Preparation([str(corpus)], config).run(elsewhere, print)


def test_stopped_preparation_continues_to_the_same_bytes(corpus, expected, tmp_path, monkeypatch):
    """Stopped within the second partition that it begins: the first one is complete then, and made by no other."""
    out, rounds = tmp_path / "out", []
    out.mkdir()
    (out / JOURNAL).touch()  # of a process that was killed at its very beginning
    for _ in range(3):
        with monkeypatch.context() as patch:
            rounds.append(stop_within(2, patch))
            with pytest.raises(RuntimeError, match="stopped"):
                prepared(tmp_path, corpus, *BYTES, "--scheduler", "sync")
        assert not (out / MANIFEST).exists()
        with pytest.raises((FileNotFoundError, ValueError), match="must be complete"):
            load_dataset(str(out))
    with pytest.raises(ValueError, match="of other inputs or settings"):
        prepared(tmp_path, corpus, *BYTES, "--validation-fraction", 0.2)
    rounds.append(stop_within(9, monkeypatch))
    assert files_of(prepared(tmp_path, corpus, *BYTES)) == files_of(expected)
    assert hidden(out) == {JOURNAL}
    assert [len(begun) for begun in rounds] == [2, 2, 2, 1]
    assert all(begun[1] == following[0] for begun, following in pairwise(rounds))
    assert len({name for begun in rounds for name in begun}) == 4


DAMAGED_PARTITIONS = [
    ("train_*.bin", lambda path: path.unlink()),
    ("train_*.bin", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!")),
    (".partition_*.json", lambda path: path.write_bytes(b"")),
    (".partition_*.json", lambda path: path.write_bytes(b"[]")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED_PARTITIONS)
def test_partitions_that_were_damaged_after_a_stop_are_made_again(
    name, damage, corpus, expected, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_within(3, patch)
        with pytest.raises(RuntimeError, match="stopped"):
            prepared(tmp_path, corpus, *BYTES, "--scheduler", "sync")
    damage(next((tmp_path / "out").glob(name)))
    assert files_of(prepared(tmp_path, corpus, *BYTES)) == files_of(expected)


def stop_within(partitions: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Raise an error in this partition of those that are begun, whose numbers are returned."""
    replacing, begun = preparation.replacing, []

    def stopped(path, where):
        begun.extend({path.stem[-6:]} - {*begun})
        if len(begun) == partitions and path.name.startswith("val"):
            raise RuntimeError("stopped")
        return replacing(path, where)

    monkeypatch.setattr(preparation, "replacing", stopped)
    return begun


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(".")}


def test_an_input_that_changes_is_refused(tmp_path):
    changing = tmp_path / "changing.txt"
    changing.write_text("one line\n" * 1000)
    config = PrepareConfig(out=str(tmp_path / "out"), encoding="bytes")

    def computed(bag, take):
        changing.write_text("another line\n" * 1000)
        bag.compute(scheduler="sync")

    with pytest.raises(ValueError, match="an input must not change"):
        Preparation([str(changing)], config).run(computed, print)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_the_standard_library_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "OTHER_MODULES", sys.stdlib_module_names - {"json"})
    assert (prepared(tmp_path, "stdlib", *BYTES) / MANIFEST).is_file()


def test_tasks_write_nothing_once_their_preparation_has_ended(corpus, tmp_path):
    """Threads go on for some time after Ctrl-C or an error elsewhere."""
    bags = []

    def interrupted(bag, take):
        bags.append(bag)
        raise KeyboardInterrupt

    config = PrepareConfig(out=str(tmp_path / "out"), encoding="bytes")
    with pytest.raises(KeyboardInterrupt):
        Preparation([str(corpus)], config).run(interrupted, print)
    with pytest.raises(RuntimeError, match="has ended"):
        bags[0].compute(scheduler="sync")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".bin", ".tmp")]


def test_preparation_continues_after_a_full_disk(corpus, expected, tmp_path):
    with full_disk(500_000), pytest.raises(OSError, match="File too large"):
        prepared(tmp_path, corpus, *BYTES)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert files_of(prepared(tmp_path, corpus, *BYTES)) == files_of(expected)


# Refusals


REFUSED = [
    ("empty.txt", "inputs must hold text"),
    ("short.txt", "part must hold text"),
    ("a.jsonl", "without the field text; fields=title, body"),
    ("a.jsonl --field body", "must be text.*line 1, found=body: 3 .int.[.]"),
    ("~nobody-here/a.txt", "folder of the user must be known.*path=~nobody-here/a.txt"),
]


@pytest.mark.parametrize(("arguments", "keyword"), REFUSED)
def test_inputs_that_are_refused(arguments, keyword, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {"empty.txt": "", "short.txt": "s", "a.jsonl": '{"title": "x", "body": 3}\n'}.items():
        Path(name).write_text(content)
    with pytest.raises(ValueError, match=keyword):
        prepared(tmp_path, *arguments.split(), *BYTES)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_foreign_folders_are_left_alone(corpus, tmp_path):
    flags = (corpus / "below", *BYTES)
    with pytest.raises(ValueError, match="must be new, empty, or left"):
        prepared(tmp_path, *flags, out=corpus)
    assert not (corpus / JOURNAL).exists()
    prepared(tmp_path, *flags)
    (tmp_path / "out" / JOURNAL).unlink()
    with pytest.raises(ValueError, match="must be new, empty, or left"):
        prepared(tmp_path, *flags)


def test_folder_is_locked(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / JOURNAL).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="no other process"):
            prepared(tmp_path, corpus / "below", *BYTES)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [JOURNAL]
    prepared(tmp_path, corpus / "below", *BYTES)


DAMAGES = [
    (MANIFEST, lambda content: content.replace(b'"ids": 257', b'"ids": 258'), "manifest must be unchanged"),
    ("train_000000.bin", lambda content: content[:-2], "by its header"),
    ("val_000000.bin", None, "file must exist"),
]


@pytest.mark.parametrize(("name", "damage", "keyword"), DAMAGES)
def test_a_damaged_folder_is_refused(name, damage, keyword, corpus, expected, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(expected, folder)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage:
        (folder / name).write_bytes(damage(content))
    for reader in (lambda: load_dataset(str(folder)), lambda: prepared(tmp_path, corpus, *BYTES, out=folder)):
        with pytest.raises((ValueError, FileNotFoundError), match=keyword):
            reader()
