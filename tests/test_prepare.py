"""Tests of preparing tokens: the same bytes whoever encodes and however often it was stopped, and refusals."""

from __future__ import annotations

import fcntl
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from command_lines import SMALL
from full_disk import full_disk
from prepared_texts import BYTES, files_of, prepared, text_of, tokens_of, write_corpus

from daskgpt import generate, prepare, train
from daskgpt.data.corpus.folder import FolderWriter
from daskgpt.data.corpus.manifest import JOURNAL, LOCK, MANIFEST, VOCABULARY_FILE, read_manifest
from daskgpt.data.encodings import encode, get_encoding
from daskgpt.data.prepared import load_prepared
from daskgpt.formats import vocabulary_file
from daskgpt.formats.vocabulary_file import read_vocabulary

SHARDS = (*BYTES, "--shard-tokens", "2M")


def codec_of(folder: Path) -> tiktoken.Encoding:
    load_prepared(folder, "", 1, 8)  # which makes a learned vocabulary known
    return get_encoding(read_manifest(folder, "test").encoding)


def pieces_of(folder: Path, part: str) -> list[bytes]:
    """What stands behind each end-of-text of a row of bytes."""
    row = tokens_of(folder, part)
    return bytes(np.where(row == 256, 0, row).astype(np.uint8)).split(b"\0")[1:]


def trained(*arguments: object) -> None:
    assert train.main([*map(str, arguments), "--sample-tokens", "0"]) == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("expected"), corpus, *SHARDS)


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """A vocabulary of byte pairs, for machines without GPT-2's."""
    return prepared(tmp_path_factory.mktemp("learned"), corpus / "below", "--learn-vocabulary", 300) / VOCABULARY_FILE


# The tokens


@pytest.mark.parametrize("encoding", ["bytes", "learned", "gpt2"])
def test_tokens_are_those_of_the_whole_text(encoding, learned, tmp_path, monkeypatch):
    """Of a text in several blocks nothing is left out but its validation, and no cut is in a token."""
    if encoding == "gpt2":
        try:
            get_encoding(encoding)
        except FileNotFoundError as error:
            pytest.skip(f"GPT-2's vocabulary is not here: {error}")
    encoding = str(learned) if encoding == "learned" else encoding
    text = text_of(800_000)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    assert path.stat().st_size > 2**22
    (tmp_path / "second.txt").write_text("what is held out, and nothing else")
    monkeypatch.setattr("daskgpt.data.corpus.documents._is_held_out", lambda encoded, _: encoded.startswith(b"what is"))
    folder = prepared(tmp_path, path, tmp_path / "second.txt", "--encoding", encoding, "--scheduler", "sync")
    codec = codec_of(folder)
    np.testing.assert_array_equal(tokens_of(folder, "train"), [codec.eot_token, *encode(codec, text)])
    np.testing.assert_array_equal(
        tokens_of(folder, "val"), [codec.eot_token, *encode(codec, "what is held out, and nothing else")]
    )


def test_every_passage_is_in_one_part_behind_an_end_of_text(expected, corpus):
    """What is joined from both parts are the texts, cut at end-of-text."""
    manifest = read_manifest(expected, "test")
    pieces = []
    for part in ("train", "val"):
        row = tokens_of(expected, part)
        assert row[0] == 256
        pieces += pieces_of(expected, part)
        assert getattr(manifest, part).documents == np.count_nonzero(row == 256)
        assert getattr(manifest, part).bytes == np.count_nonzero(row != 256)
    held_out = manifest.val.bytes / (manifest.val.bytes + manifest.train.bytes)
    assert 0.07 < held_out < 0.13
    assert sorted(pieces, key=len)[-1] in (corpus / "long.txt").read_bytes()
    total = sum(path.stat().st_size for path in corpus.rglob("*") if path.suffix in (".txt", ".md"))
    assert sum(map(len, pieces)) == total


def test_shards_are_full_but_for_the_last_and_their_sums_right(expected):
    manifest = read_manifest(expected, "test")
    assert [shard.tokens for shard in manifest.train.shards[:-1]] == [2_000_000] * (len(manifest.train.shards) - 1)
    assert len(manifest.train.shards) > 2
    for part in (manifest.train, manifest.val):
        assert sum(shard.tokens for shard in part.shards) == part.tokens
        for shard in part.shards:
            assert files_of(expected)[shard.file] == shard.sha256


@pytest.mark.parametrize("kind", ["gz", "zst", "jsonl", "jsonl.gz", "parquet"])
def test_packed_files_have_the_tokens_of_plain_ones(kind, tmp_path):
    """Whatever carries the documents; of packed text also where it is cut into blocks."""
    documents = [text_of(2000, seed=number) for number in range(400)]
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    packed.mkdir()
    lines = "".join(json.dumps({"id": 1, "body": document}) + "\n" for document in documents).encode()
    content = "\n\n".join(documents).encode() if kind in ("gz", "zst") else lines
    (plain / ("a.txt" if kind in ("gz", "zst") else "a.jsonl")).write_bytes(content)
    assert len(content) > 2**22
    if kind.endswith("gz"):
        (packed / f"a.{kind}").write_bytes(gzip.compress(content[:999], 1) + gzip.compress(content[999:], 1))
    elif kind == "zst":
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
        (packed / "a.txt.zst").write_bytes(pack(content[:999]) + pack(content[999:]))
    elif kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"id": [1] * 400, "body": documents}), packed / "a.parquet")
    else:
        for number in range(4):
            records = [json.dumps({"body": document}, ensure_ascii=False) for document in documents[number::4]]
            (packed / f"{number}.jsonl").write_text("\n".join(records))
    flags = (*BYTES, "--field", "body")
    one, other = prepared(tmp_path, plain, *flags, out="one"), prepared(tmp_path, packed, *flags, out="other")
    if kind == "jsonl":  # in another order
        assert sorted(pieces_of(one, "train")) == sorted(pieces_of(other, "train"))
    else:
        assert files_of(one, but=(MANIFEST,)) == files_of(other, but=(MANIFEST,))


def test_a_separator_divides_a_text_into_documents(learned, tmp_path):
    text = tmp_path / "stories.txt"
    stories = [f"Story {number}.\nIt ends." for number in range(5000)]
    text.write_text("\n<|endoftext|>\n".join(stories))
    folder = prepared(tmp_path, text, "--separator", "<|endoftext|>", "--encoding", learned)
    codec = codec_of(folder)
    found = "".join(codec.decode(tokens_of(folder, part).tolist()) for part in ("train", "val"))
    assert sorted(found.split("<|endoftext|>")[1:]) == sorted(stories)
    inside = prepared(tmp_path, text, "--encoding", learned, "--validation-fraction", 0.5, out="inside")
    manifest = read_manifest(inside, "test")
    marks = sum(np.count_nonzero(tokens_of(inside, part) == codec.eot_token) for part in ("train", "val"))
    assert marks == manifest.train.documents + manifest.val.documents < 100, "else it is text like any other"


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"good {number}"}).encode() for number in range(100)]
    path.write_bytes(b"\n".join([*good[:50], b'{"text": "b\xffd"}', b'{"text": "half \\ud83d"}', *good[50:]]))
    place = sum(len(line) + 1 for line in good[:50]) + 11
    with pytest.raises(ValueError, match=f"must be UTF-8.*byte={place}"):
        prepared(tmp_path, path, *BYTES, out="refused")
    assert not (tmp_path / "refused" / MANIFEST).exists()
    for policy, documents, skipped in (("skip", 100, 2), ("replace", 102, 0)):
        manifest = read_manifest(prepared(tmp_path, path, *BYTES, "--undecodable", policy, out=policy), "test")
        assert (manifest.train.documents + manifest.val.documents, manifest.skipped) == (documents, skipped)


# Whoever encodes, however often it was stopped


@pytest.mark.parametrize("who", ["sync", "threads --threads 1", "threads --threads 4"])
def test_the_bytes_are_the_same_whoever_encodes(who, corpus, expected, tmp_path):
    assert files_of(prepared(tmp_path, corpus, *SHARDS, "--scheduler", *who.split())) == files_of(expected)


def test_the_bytes_are_the_same_of_a_cluster(cluster, corpus, expected, tmp_path):
    cluster.have(2)
    assert files_of(prepared(tmp_path, corpus, *SHARDS, "--scheduler", cluster.address)) == files_of(expected)


@pytest.mark.parametrize("between", [1, 2, 32])
def test_a_preparation_that_is_stopped_goes_on_to_the_same_bytes(between, corpus, expected, tmp_path, monkeypatch):
    """Stopped before each block, with a journal that knows all blocks before it, or some."""
    monkeypatch.setattr("daskgpt.data.corpus.folder.BLOCKS_BETWEEN", between)
    out, take, begun = tmp_path / "out", FolderWriter.take, []
    out.mkdir()
    for name in (LOCK, f".{JOURNAL}.1-0a1b2c3d.tmp"):  # of a process that was killed at its very beginning
        (out / name).touch()
    for stop in range(4):

        def stopped(folder, block, stop=stop):
            begun.append(folder.blocks)
            if folder.blocks == stop:
                raise RuntimeError("stopped")
            take(folder, block)

        monkeypatch.setattr(FolderWriter, "take", stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            prepared(tmp_path, corpus, *SHARDS, "--scheduler", "sync")
        assert not (out / MANIFEST).exists()
        with pytest.raises((FileNotFoundError, ValueError), match="must hold prepared tokens, to the end"):
            load_prepared(out)
    monkeypatch.setattr(FolderWriter, "take", take)
    assert files_of(prepared(tmp_path, corpus, *SHARDS)) == files_of(expected)
    assert not list(out.glob(".*.tmp"))
    assert begun == {1: [0, 0, 1, 1, 2, 2, 3], 2: [0, 0, 1, 0, 1, 2, 2, 3], 32: [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]}[between]


def test_what_is_done_is_not_done_again(corpus, expected, capsys):
    before = files_of(expected)
    prepared(expected.parent, corpus, *SHARDS)
    assert "was there already" in capsys.readouterr().out
    assert files_of(expected) == before


def test_a_full_disk_is_one_error_and_room_lets_it_go_on(corpus, expected, tmp_path):
    with full_disk(500_000), pytest.raises(OSError, match="File too large"):
        prepared(tmp_path, corpus, *SHARDS)
    assert not list((tmp_path / "out").glob("*.bin"))
    assert files_of(prepared(tmp_path, corpus, *SHARDS)) == files_of(expected)


# Learned vocabularies


def test_a_learned_vocabulary_goes_with_the_model(corpus, tmp_path, monkeypatch, capsys):
    folder = prepared(tmp_path, corpus / "below", "--learn-vocabulary", 300)
    codec = get_encoding(read_vocabulary(folder / VOCABULARY_FILE))
    assert (codec.n_vocab, codec.eot_token) == (300, 299)
    assert load_prepared(str(folder)).vocabulary == 300
    text = text_of(500, seed=99)
    assert codec.decode(encode(codec, text).tolist()) == text
    assert encode(codec, text).size < 0.7 * len(text.encode())
    out = tmp_path / "run"
    trained("--data", folder, *SMALL, "--steps", 3, "--out", out)
    (out / "latest" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    shutil.rmtree(folder)
    for known in ("_known", "_contents"):  # as in a process that has not read the vocabulary
        monkeypatch.setattr(vocabulary_file, known, {})
    capsys.readouterr()
    assert generate.main([str(tmp_path / "alone.safetensors"), "--prompt", "the quick", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_training_goes_on_with_a_vocabulary_that_came_from_a_file(corpus, learned, tmp_path, monkeypatch):
    out = tmp_path / "run"
    trained("--data", corpus / "below" / "29.md", "--encoding", learned, *SMALL, "--steps", 2, "--out", out)
    for known in ("_known", "_contents"):
        monkeypatch.setattr(vocabulary_file, known, {})
    assert train.main(["--resume", str(out), "--steps", "3"]) == 0


# Refusals


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"title": "x", "body": 3}\n')
    (folder / "b.jsonl").write_text("no json\n")
    (folder / "c.jsonl").write_text("[1]\n")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("short")
    (folder / "cut.gz").write_bytes(gzip.compress(text_of(9000).encode())[:-20])
    (folder / "wrong.zst").write_bytes(b"no zstd at all")
    (folder / "wrong.parquet").write_bytes(b"no parquet at all")
    (folder / "wrong.tiktoken").write_text("AAAA 0\nAAAB 7\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "error", "keyword"),
    [
        ("nowhere.txt", FileNotFoundError, "file must exist"),
        ("*.none", FileNotFoundError, "glob must match"),
        ("empty.txt", ValueError, "inputs must hold text"),
        ("short.txt", ValueError, "part must hold text"),
        ("a.jsonl", ValueError, "byte=0, field=text, fields=title, body"),
        ("c.jsonl", ValueError, "fields=list"),
        ("a.jsonl --field body", ValueError, "must be text.*byte=0"),
        ("b.jsonl", ValueError, "must be JSON"),
        ("cut.gz", ValueError, "compressed file must be whole"),
        ("wrong.zst", ValueError, "compressed file must be whole"),
        ("wrong.parquet", ValueError, "whole Parquet"),
        ("a.jsonl --encoding gpt3", ValueError, "encoding must be known"),
        ("a.jsonl --encoding wrong.tiktoken", ValueError, "vocabulary's lines"),
        ("a.jsonl --encoding gpt2 --learn-vocabulary 300", ValueError, "learned or given"),
        ("a.jsonl --learn-vocabulary 200", ValueError, "must lie between 258"),
        ("a.jsonl --shard-tokens 3G", ValueError, "shard_tokens"),
        ("short.txt --scheduler thread", ValueError, "scheduler must be known"),
    ],
)
def test_inputs_that_are_refused(arguments, error, keyword, inputs, tmp_path):
    encoding = () if {"--encoding", "--learn-vocabulary"} & set(arguments.split()) else BYTES
    with pytest.raises(error, match=keyword):
        prepared(tmp_path, *arguments.split(), *encoding)
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("flags", [["--shard-tokens", "many"], ["--undecodable", "ignore"], ["--out"]])
def test_flags_that_are_refused(flags, inputs, capsys):
    with pytest.raises(SystemExit) as ended:
        prepare.main(["short.txt", *BYTES, "--out", "out", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "keyword"), [({"body": ["x"]}, "column of that name.*columns=body"), ({"text": [1]}, "must hold texts")]
)
def test_columns_that_are_refused(column, keyword, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(column), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=keyword):
        prepared(tmp_path, tmp_path / "a.parquet", *BYTES)


def test_folders_of_somebody_else_and_of_other_settings_are_left_alone(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    flags = (corpus / "below", *BYTES)
    with pytest.raises(ValueError, match="must be new, empty, or begun"):
        prepared(tmp_path, *flags, out="other")
    assert [path.name for path in other.iterdir()] == ["letter.txt"]
    before = files_of(prepared(tmp_path, *flags))
    with pytest.raises(ValueError, match="same inputs and settings"):
        prepared(tmp_path, *flags, "--shard-tokens", 100)
    assert files_of(tmp_path / "out") == before
    (tmp_path / "out" / JOURNAL).unlink()
    with pytest.raises(ValueError, match="must be new, empty, or begun"):
        prepared(tmp_path, *flags)


def test_two_at_once_do_not_write_one_folder(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="no other process"):
            prepared(tmp_path, corpus / "below", *BYTES)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]
    prepared(tmp_path, corpus / "below", *BYTES)


@pytest.mark.parametrize(
    ("name", "damage", "keyword"),
    [
        (MANIFEST, lambda content: content.replace(b'"ids": 257', b'"ids": 258'), "manifest must be as it was written"),
        (MANIFEST, lambda content: content[:100], "manifest must be as it was written"),
        ("train_000000.bin", lambda content: content[:-2], "tokens must make"),
        ("val_000000.bin", None, "file must exist"),
    ],
)
def test_a_damaged_folder_is_refused(name, damage, keyword, expected, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(expected, folder)
    if damage:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=keyword):
        load_prepared(folder)


@pytest.mark.parametrize(
    ("flags", "keyword"),
    [
        ("--encoding gpt2", "encoding must be the one"),
        ("--vocabulary 100", "must know every token id"),
    ],
)
def test_training_refuses_what_does_not_fit(flags, keyword, expected, tmp_path):
    with pytest.raises(ValueError, match=keyword):
        train.main(["--data", str(expected), *flags.split(), "--out", str(tmp_path / "run")])


def test_a_part_holds_one_token_more_than_its_sequences(expected):
    manifest = read_manifest(expected, "test")
    tokens, batches = manifest.val.tokens, (manifest.train.tokens - 1) // 8
    assert load_prepared(expected, "", 1, tokens - 1).validation.size == tokens
    assert load_prepared(expected, "", batches, 8).training.size == manifest.train.tokens
    for batch_size, length in ((1, tokens), (batches + 1, 8)):
        with pytest.raises(ValueError, match="must hold a"):
            load_prepared(expected, "", batch_size, length)
