"""Tests of preparing tokens: the same bytes with any scheduler and any number of stops, and errors."""

import fcntl
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from command_lines import SMALL
from full_disk import full_disk
from prepared_texts import BYTES, files_of, prepared, text_of, tokens_of, write_corpus

from daskgpt import generate, prepare, train
from daskgpt.config.run import DataConfig
from daskgpt.data.dataset import load_dataset
from daskgpt.data.token_folder import JOURNAL, LOCK, MANIFEST, VOCABULARY_FILE, FolderWriter, read_manifest
from daskgpt.data.tokenizer import encode, get_encoding
from daskgpt.formats import vocabulary
from daskgpt.formats.vocabulary import read_vocabulary
from daskgpt.training.start import open_dataset

SHARDS = (*BYTES, "--shard-tokens", "2M")


def codec_of(folder: Path) -> tiktoken.Encoding:
    load_dataset(str(folder))  # which makes a learned vocabulary known
    return get_encoding(read_manifest(folder, "test").encoding)


def pieces_of(folder: Path, part: str) -> list[bytes]:
    """What stands behind each end-of-text of a row of bytes."""
    row = tokens_of(folder, part)
    return bytes(np.where(row == 256, 0, row).astype(np.uint8)).split(b"\0")[1:]


def trained(*arguments: object) -> None:
    assert train.main([*map(str, arguments), "--sample-tokens", "0"]) == 0


def forget_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a process that has read no learned vocabulary."""
    for name in vocabulary.KNOWN.keys() - {"bytes"}:
        monkeypatch.delitem(vocabulary.KNOWN, name)


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


@pytest.mark.parametrize("encoding", ["bytes", "learned"])
def test_tokens_match_the_whole_text(encoding, learned, tmp_path, monkeypatch):
    """Of a text in several blocks nothing is left out but its validation, and no cut is in a token."""
    text, path = text_of(800_000), tmp_path / "text.txt"
    path.write_bytes(text.encode())
    assert path.stat().st_size > 2**22
    (tmp_path / "second.txt").write_text("what is held out, and nothing else")
    monkeypatch.setattr("daskgpt.data.preparation._is_held_out", lambda encoded, _: encoded.startswith(b"what is"))
    flags = ("--encoding", learned if encoding == "learned" else encoding, "--scheduler", "sync")
    folder = prepared(tmp_path, path, tmp_path / "second.txt", *flags)
    codec = codec_of(folder)
    for part, whole in (("train", text), ("val", "what is held out, and nothing else")):
        np.testing.assert_array_equal(tokens_of(folder, part), [codec.eot_token, *encode(codec, whole)])


def test_every_passage_is_in_one_part(expected, corpus):
    """What is joined from both parts are the texts, cut at end-of-text."""
    manifest = read_manifest(expected, "test")
    pieces = []
    for part in ("train", "val"):
        row = tokens_of(expected, part)
        assert row[0] == 256
        pieces += pieces_of(expected, part)
        assert getattr(manifest, part).documents == np.count_nonzero(row == 256)
        assert getattr(manifest, part).bytes == np.count_nonzero(row != 256)
    assert 0.07 < manifest.val.bytes / (manifest.val.bytes + manifest.train.bytes) < 0.13
    assert sorted(pieces, key=len)[-1] in (corpus / "long.txt").read_bytes()
    texts = (path for path in corpus.rglob("*") if path.suffix in (".txt", ".md"))
    assert sum(map(len, pieces)) == sum(path.stat().st_size for path in texts)
    # Shards are full but for the last, and their sums right.
    assert [shard.tokens for shard in manifest.train.shards[:-1]] == [2_000_000] * (len(manifest.train.shards) - 1)
    assert len(manifest.train.shards) > 2
    for part in (manifest.train, manifest.val):
        assert sum(shard.tokens for shard in part.shards) == part.tokens
        assert {shard.file: shard.sha256 for shard in part.shards}.items() <= files_of(expected).items()


@pytest.mark.parametrize("kind", ["gz", "zst", "jsonl", "jsonl.gz", "parquet"])
def test_compressed_files_give_the_same_tokens(kind, tmp_path):
    """Whatever carries the documents; of packed text also where it is cut into blocks."""
    documents = [text_of(2000, seed=number) for number in range(400)]
    packed = tmp_path / "packed"
    packed.mkdir()
    plain = tmp_path / ("a.txt" if kind in ("gz", "zst") else "a.jsonl")
    lines = "".join(json.dumps({"id": 1, "body": document}) + "\n" for document in documents)
    content = ("\n\n".join(documents) if kind in ("gz", "zst") else lines).encode()
    plain.write_bytes(content)
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
    one, other = (prepared(tmp_path, of, *BYTES, "--field", "body", out=f"{of.name}-tokens") for of in (plain, packed))
    if kind == "jsonl":  # in another order
        assert sorted(pieces_of(one, "train")) == sorted(pieces_of(other, "train"))
    else:
        assert files_of(one, but=(MANIFEST,)) == files_of(other, but=(MANIFEST,))


def test_a_separator_divides_a_text_into_documents(learned, tmp_path):
    text, stories = tmp_path / "stories.txt", [f"Story {number}.\nIt ends." for number in range(5000)]
    text.write_text("\n<|endoftext|>\n".join(stories))
    folder = prepared(tmp_path, text, "--separator", "<|endoftext|>", "--encoding", learned)
    codec = codec_of(folder)
    decoded = "".join(codec.decode(tokens_of(folder, part).tolist()) for part in ("train", "val"))
    assert sorted(decoded.split("<|endoftext|>")[1:]) == sorted(stories)
    inside = prepared(tmp_path, text, "--encoding", learned, "--validation-fraction", 0.5, out="inside")
    manifest = read_manifest(inside, "test")
    marks = sum(np.count_nonzero(tokens_of(inside, part) == codec.eot_token) for part in ("train", "val"))
    assert marks == manifest.train.documents + manifest.val.documents < 100, "else it is text like any other"


def test_undecodable_bytes(tmp_path):
    path, good = tmp_path / "a.jsonl", [json.dumps({"text": f"good {number}"}).encode() for number in range(100)]
    path.write_bytes(b"\n".join([*good[:50], b'{"text": "b\xffd"}', b'{"text": "half \\ud83d"}', *good[50:]]))
    place = sum(len(line) + 1 for line in good[:50]) + 11
    with pytest.raises(ValueError, match=f"not UTF-8 text .byte {place:,}"):
        prepared(tmp_path, path, *BYTES, out="refused")
    assert not (tmp_path / "refused" / MANIFEST).exists()
    for policy, documents, skipped in (("skip", 100, 2), ("replace", 102, 0)):
        manifest = read_manifest(prepared(tmp_path, path, *BYTES, "--undecodable", policy, out=policy), "test")
        assert (manifest.train.documents + manifest.val.documents, manifest.skipped) == (documents, skipped)


# Whoever encodes, however often it was stopped


@pytest.mark.parametrize("who", ["sync", "threads --threads 1", "threads --threads 4"])
def test_schedulers_give_the_same_bytes(who, corpus, expected, tmp_path):
    assert files_of(prepared(tmp_path, corpus, *SHARDS, "--scheduler", *who.split())) == files_of(expected)


def test_cluster_gives_the_same_bytes_and_finished_work_is_kept(cluster, corpus, expected, tmp_path, capsys):
    cluster.have(2)
    for _ in range(2):
        assert files_of(prepared(tmp_path, corpus, *SHARDS, "--scheduler", cluster.address)) == files_of(expected)
    assert "already existed" in capsys.readouterr().out


@pytest.mark.parametrize("between", [1, 2, 32])
def test_stopped_preparation_continues_to_the_same_bytes(between, corpus, expected, tmp_path, monkeypatch):
    """Stopped before each block, with a journal that knows all blocks before it, or some."""
    monkeypatch.setattr("daskgpt.data.token_folder.BLOCKS_BETWEEN", between)
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
        with pytest.raises((FileNotFoundError, ValueError), match="must be complete"):
            load_dataset(str(out))
    monkeypatch.setattr(FolderWriter, "take", take)
    assert files_of(prepared(tmp_path, corpus, *SHARDS)) == files_of(expected)
    assert not list(out.glob(".*.tmp"))
    assert begun == {1: [0, 0, 1, 1, 2, 2, 3], 2: [0, 0, 1, 0, 1, 2, 2, 3], 32: [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]}[between]


@pytest.mark.parametrize("flags", [BYTES, ("--learn-vocabulary", 300)])
def test_an_unfinished_folder_begins_again_with_corrected_inputs(flags, corpus, tmp_path, monkeypatch, capsys):
    inputs, take = tmp_path / "inputs", FolderWriter.take
    shutil.copytree(corpus, inputs)
    flags = (inputs, *flags, "--shard-tokens", "100k", "--scheduler", "sync")
    monkeypatch.setattr("daskgpt.data.token_folder.BLOCKS_BETWEEN", 1)

    def stopped(folder, block):
        if folder.blocks == 2:
            raise ValueError("a bad record")
        take(folder, block)

    with monkeypatch.context() as patch:
        patch.setattr(FolderWriter, "take", stopped)
        with pytest.raises(ValueError, match="a bad record"):
            prepared(tmp_path, *flags)
    assert len(list((tmp_path / "out").glob("train_*.bin"))) > 9
    with pytest.raises(ValueError, match="of other inputs or settings"):
        prepared(tmp_path, *flags, "--validation-fraction", 0.2)
    changed = inputs / "below" / "00.md"
    changed.write_text(text_of(999))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(OSError, match="killed"):
            prepared(tmp_path, *flags)
    shutil.copy2(corpus / "below" / "00.md", changed)  # the first inputs again, which cannot continue now either
    files = files_of(prepared(tmp_path, *flags))
    assert "begun again" in capsys.readouterr().out
    assert files == files_of(prepared(tmp_path, *flags, out="anew"))


def killed(path: Path, missing_ok: bool = False) -> None:
    raise OSError(f"killed before {path} was removed")


CORRECTIONS = [
    ("a.jsonl", "a.jsonl --field title"),
    ("short.txt", "short.txt b.txt"),
    ("short.txt --validation-fraction 0.1", "pair.txt --separator |"),
]


@pytest.mark.parametrize(("arguments", "corrected"), CORRECTIONS)
def test_flags_may_be_corrected_before_the_first_file(arguments, corrected, inputs, tmp_path):
    Path("a.jsonl").write_text("".join(f'{{"title": "{number} x", "body": 3}}\n' for number in range(99)))
    Path("b.txt").write_text(text_of(90_000))
    Path("pair.txt").write_text("|".join(map(str, range(99))))
    with pytest.raises(ValueError, match="must hold text"):
        prepared(tmp_path, *arguments.split(), *BYTES)
    prepared(tmp_path, *corrected.split(), *BYTES)


def test_preparation_continues_after_a_full_disk(corpus, expected, tmp_path):
    with full_disk(500_000), pytest.raises(OSError, match="File too large"):
        prepared(tmp_path, corpus, *SHARDS)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert files_of(prepared(tmp_path, corpus, *SHARDS)) == files_of(expected)


# Learned vocabularies


def test_learned_vocabulary_is_stored_with_the_model(corpus, tmp_path, monkeypatch, capsys):
    folder = prepared(tmp_path, corpus / "below", "--learn-vocabulary", 300)
    codec = get_encoding(read_vocabulary(folder / VOCABULARY_FILE))
    assert (codec.n_vocab, codec.eot_token) == (300, 299)
    assert load_dataset(str(folder)).vocabulary == 300
    text = text_of(500, seed=99)
    assert codec.decode(encode(codec, text).tolist()) == text
    assert encode(codec, text).size < 0.7 * len(text.encode())
    out = tmp_path / "run"
    trained("--data", folder, *SMALL, "--steps", 3, "--out", out)
    (out / "latest" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    shutil.rmtree(folder)
    forget_vocabularies(monkeypatch)
    capsys.readouterr()
    assert generate.main([str(tmp_path / "alone.safetensors"), "--prompt", "the quick", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_resume_with_a_vocabulary_from_a_file(corpus, learned, tmp_path, monkeypatch):
    out = tmp_path / "run"
    trained("--data", corpus / "below" / "29.md", "--encoding", learned, *SMALL, "--steps", 2, "--out", out)
    forget_vocabularies(monkeypatch)
    assert train.main(["--resume", str(out), "--steps", "3"]) == 0


# Refusals


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    (tmp_path / "inputs").mkdir()
    monkeypatch.chdir(tmp_path / "inputs")
    contents = {"a.jsonl": '{"title": "x", "body": 3}\n', "b.jsonl": "no json\n", "c.jsonl": "[1]\n"}
    contents |= {"empty.txt": "", "short.txt": "short", "wrong.tiktoken": "AAAA 0\nAAAB 7\n"}
    for name, content in (contents | {"wrong.parquet": "neither", "cut.parquet": "PAR1 and no more"}).items():
        Path(name).write_text(content)
    Path("wrong.zst").write_bytes(b"\x28\xb5\x2f\xfd neither")
    Path("cut.gz").write_bytes(gzip.compress(text_of(9000).encode())[:-20])


REFUSED = [
    ("*.none", FileNotFoundError, "glob must match"),
    ("empty.txt", ValueError, "inputs must hold text"),
    ("short.txt", ValueError, "part must hold text"),
    ("a.jsonl", ValueError, "without the field text; fields=title, body"),
    ("c.jsonl", ValueError, "fields=list"),
    ("a.jsonl --field body", ValueError, "must be text.*byte=0"),
    ("b.jsonl", ValueError, "must be JSON"),
    ("cut.gz", ValueError, "compressed file must be complete"),
    ("wrong.zst", ValueError, "damaged zstd"),
    ("wrong.parquet", ValueError, "not Parquet"),
    ("cut.parquet", ValueError, "not complete Parquet"),
    ("short.txt --encoding wrong.tiktoken", ValueError, "vocabulary's lines"),
    ("a.jsonl --encoding gpt2 --learn-vocabulary 300", ValueError, "learned or given"),
    ("a.jsonl --shard-tokens 3G", ValueError, "shard_tokens"),
    ("short.txt --scheduler thread", ValueError, "scheduler must be known"),
]


@pytest.mark.parametrize(("arguments", "error", "keyword"), REFUSED)
def test_inputs_that_are_refused(arguments, error, keyword, inputs, tmp_path):
    encoding = () if {"--encoding", "--learn-vocabulary"} & set(arguments.split()) else BYTES
    with pytest.raises(error, match=keyword):
        prepared(tmp_path, *arguments.split(), *encoding)
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("flags", [["--shard-tokens", "many"], ["--undecodable", "ignore"]])
def test_flags_that_are_refused(flags, inputs, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare.main(["short.txt", *BYTES, "--out", "out", *flags])
    assert flags[0] in capsys.readouterr().err


def test_columns_that_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, column, keyword in (
        ("body", ["x"], "without the field text; fields=body"),
        ("text", [1], "must hold texts"),
    ):
        parquet.write_table(arrow.table({name: column}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=keyword):
            prepared(tmp_path, tmp_path / "a.parquet", *BYTES, out=name)


def test_foreign_folders_are_left_alone(corpus, tmp_path):
    flags = (corpus / "below", *BYTES)
    with pytest.raises(ValueError, match="must be new, empty, or left"):
        prepared(tmp_path, *flags, out=corpus)
    assert not (corpus / LOCK).exists()
    before = files_of(prepared(tmp_path, *flags))
    with pytest.raises(ValueError, match="of other inputs or settings"):
        prepared(tmp_path, *flags, "--shard-tokens", 100)
    assert files_of(tmp_path / "out") == before
    (tmp_path / "out" / JOURNAL).unlink()
    with pytest.raises(ValueError, match="must be new, empty, or left"):
        prepared(tmp_path, *flags)


def test_folder_is_locked(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="no other process"):
            prepared(tmp_path, corpus / "below", *BYTES)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]
    prepared(tmp_path, corpus / "below", *BYTES)


DAMAGES = [
    (MANIFEST, lambda content: content.replace(b'"ids": 257', b'"ids": 258'), "manifest must be unchanged"),
    ("train_000000.bin", lambda content: content[:-2], "by its header"),
    ("val_000000.bin", None, "file must exist"),
]


@pytest.mark.parametrize(("name", "damage", "keyword"), DAMAGES)
def test_a_damaged_folder_is_refused(name, damage, keyword, expected, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(expected, folder)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage:
        (folder / name).write_bytes(damage(content))
    with pytest.raises((ValueError, FileNotFoundError), match=keyword):
        load_dataset(str(folder))


def test_training_refuses_mismatched_tokens(expected, tmp_path):
    for flags, keyword in (
        ("--encoding gpt2", "must be that of the tokens"),
        ("--vocabulary 100", "must know every token id"),
    ):
        with pytest.raises(ValueError, match=keyword):
            train.main(["--data", str(expected), *flags.split(), "--out", str(tmp_path / "run")])


def test_a_part_holds_one_token_more_than_its_sequences(expected):
    manifest = read_manifest(expected, "test")
    tokens, batches = manifest.val.tokens, (manifest.train.tokens - 1) // 64
    data = DataConfig(data=str(expected))
    for batch_size, length in ((1, tokens - 1), (batches, 64)):
        dataset = open_dataset(replace(data, batch_size=batch_size, sequence_length=length), 257)
        assert (dataset.validation.size, dataset.training.size) == (tokens, manifest.train.tokens)
    for batch_size, length in ((1, tokens), (batches + 1, 64)):
        with pytest.raises(ValueError, match="must hold a"):
            open_dataset(replace(data, batch_size=batch_size, sequence_length=length), 257)
