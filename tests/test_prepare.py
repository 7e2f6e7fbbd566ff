"""Preparing tokens: the same bytes whoever encodes and however often it was stopped, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from command_lines import SMALL, refused, run
from test_hard_places import in_shell, last_line

from daskgpt.data.corpus.manifest import JOURNAL, LOCK, MANIFEST, VOCABULARY_FILE, read_manifest
from daskgpt.data.encodings import encode, get_encoding
from daskgpt.data.prepared import load_prepared
from daskgpt.formats.llmc_tokens import read_tokens
from daskgpt.formats.vocabulary_file import read_vocabulary

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box naïve façades 北京 ☃ 'tis it's"
WORDS = WORDS.split()


def text_of(size: int, seed: int = 0) -> str:
    """Lines of words, with empty lines, spaces and tabs where tokens might cross a cut."""
    draw = np.random.default_rng(seed)
    ends = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", " \n", "\t", "\n\u3000", "\n    "]
    words, endings = draw.integers(len(WORDS), size=size), draw.integers(len(ends), size=size)
    return "".join(WORDS[word] + ends[end] for word, end in zip(words, endings))


def files_of(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in but and not path.name.startswith(".")
    }


def tokens_of(folder: Path, part: str) -> np.ndarray:
    shards = getattr(read_manifest(folder, "test"), part).shards
    return np.concatenate([read_tokens(folder / shard.file) for shard in shards])


def codec_of(folder: Path) -> tiktoken.Encoding:
    load_prepared(folder, "", 1, 8)  # which makes a learned vocabulary known
    return get_encoding(read_manifest(folder, "test").encoding)


def pieces_of(folder: Path, part: str) -> list[bytes]:
    """What stands behind each end-of-text of a row of bytes."""
    row = tokens_of(folder, part)
    return bytes(np.where(row == 256, 0, row).astype(np.uint8)).split(b"\0")[1:]


def prepared(tmp_path: Path, *arguments: object, out: str = "out") -> Path:
    folder = tmp_path / out
    result = run("prepare", *arguments, "--out", folder)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "distributed.nanny" not in line]  # of slow machines
    assert said == []
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three blocks of one text, and some small ones."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "long.txt").write_bytes(text_of(1_500_000).encode())
    for number in range(30):
        (folder / "below" / f"{number:02}.md").write_bytes(text_of(300 + number, seed=number).encode())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\xff")
    return folder


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("expected"), corpus, "--encoding", "bytes", "--shard-tokens", "2M")


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """A vocabulary of byte pairs, for machines without GPT-2's."""
    return prepared(tmp_path_factory.mktemp("learned"), corpus, "--learn-vocabulary", "600") / VOCABULARY_FILE


@pytest.mark.parametrize("encoding", ["bytes", "learned", "gpt2"])
def test_tokens_are_those_of_the_whole_text(encoding, learned, tmp_path):
    """Of a text in several blocks nothing is left out but its validation, and no cut is in a token."""
    if encoding == "gpt2":
        try:
            get_encoding(encoding)
        except FileNotFoundError as error:
            pytest.skip(f"GPT-2's vocabulary is not here: {error}")
    encoding = str(learned) if encoding == "learned" else encoding
    text = text_of(1_400_000)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    assert path.stat().st_size > 2 * 2**22
    fraction = "0.000001"  # no passage of these is held out, so that a second text is needed
    (tmp_path / "second.txt").write_text(_held_out(float(fraction)))
    both = [path, tmp_path / "second.txt", "--validation-fraction", fraction, "--encoding", encoding]
    folder = prepared(tmp_path, *both)
    codec = codec_of(folder)
    np.testing.assert_array_equal(tokens_of(folder, "train"), [codec.eot_token, *encode(codec, text)])


def _held_out(fraction: float) -> str:
    """A text of some tokens that is held out."""
    for number in range(10**8):
        text = f"held out is this text alone, which has the number {number}"
        if int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") < fraction * 2**64:
            return text
    raise AssertionError


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
    long = (corpus / "long.txt").read_bytes()
    assert sorted(pieces, key=len)[-1] in long
    total = sum(path.stat().st_size for path in corpus.rglob("*") if path.suffix in (".txt", ".md"))
    assert sum(map(len, pieces)) == total


@pytest.mark.parametrize("who", ["sync", "threads --threads 1", "threads --threads 4", "local --threads 1"])
def test_the_bytes_are_the_same_whoever_encodes(who, corpus, expected, tmp_path):
    flags = ("--encoding", "bytes", "--shard-tokens", "2M", "--scheduler", *who.split())
    assert files_of(prepared(tmp_path, corpus, *flags)) == files_of(expected)


@pytest.mark.slow
def test_the_bytes_are_the_same_with_two_workers_and_a_learned_vocabulary(corpus, tmp_path):
    flags = ("--learn-vocabulary", "600", "--shard-tokens", "1M")
    one = prepared(tmp_path, corpus, *flags, "--scheduler", "sync", out="one")
    two = prepared(tmp_path, corpus, *flags, "--scheduler", "local", "--threads", "2", out="two")
    assert files_of(one) == files_of(two)
    assert len(files_of(one)) > 4


def test_shards_are_full_but_for_the_last_and_their_sums_right(expected):
    manifest = read_manifest(expected, "test")
    assert [shard.tokens for shard in manifest.train.shards[:-1]] == [2_000_000] * (len(manifest.train.shards) - 1)
    assert len(manifest.train.shards) > 2
    for part in (manifest.train, manifest.val):
        assert sum(shard.tokens for shard in part.shards) == part.tokens
        for shard in part.shards:
            assert files_of(expected)[shard.file] == shard.sha256


def _started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "daskgpt.prepare", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_preparation_that_was_killed_at_its_very_beginning_goes_on(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / LOCK).touch()
    (out / f".{JOURNAL}.1-0a1b2c3d.tmp").touch()
    prepared(tmp_path, corpus / "below", "--encoding", "bytes")
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow
def test_a_preparation_that_is_killed_goes_on_to_the_same_bytes(corpus, learned, tmp_path):
    """Killed whenever the files have grown by some, until one process comes to the end."""
    many = [corpus, corpus, corpus, corpus, corpus, "--encoding", learned, "--shard-tokens", "700k"]
    whole, out = prepared(tmp_path, *many, out="whole"), tmp_path / "out"
    kills = 0
    for wanted in (1, 1_500_000, 3_000_000, 6_000_000):
        process = _started(*many, "--out", out)
        while process.poll() is None and _written(out) < wanted:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        assert not (out / MANIFEST).exists()
        assert "must hold prepared tokens, to the end" in refused(run("train", "--data", out, *SMALL))
    assert kills == 4
    result = run("prepare", *many, "--out", out)
    assert result.returncode == 0, result.stderr
    assert files_of(out) == files_of(whole)
    assert not list(out.glob(".*.tmp"))


def _written(folder: Path) -> int:
    """Bytes of tokens, whole files and others."""
    found = 0
    for path in (*folder.glob("*.bin"), *folder.glob(".*.bin.tmp")):
        with suppress(FileNotFoundError):  # renamed meanwhile
            found += path.stat().st_size
    return found


def test_what_is_done_is_not_done_again(corpus, expected):
    before = files_of(expected)
    result = run("prepare", corpus, "--encoding", "bytes", "--shard-tokens", "2M", "--out", expected)
    assert "was there already" in result.stdout
    assert files_of(expected) == before


@pytest.mark.parametrize("kind", ["gz", "zst", "jsonl", "jsonl.gz", "parquet"])
def test_packed_files_have_the_tokens_of_plain_ones(kind, tmp_path):
    """Whatever carries the documents; of packed text also where it is cut into blocks."""
    documents = [text_of(2000, seed=number) for number in range(400)]
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir(), packed.mkdir()
    lines = "".join(json.dumps({"id": 1, "body": document}) + "\n" for document in documents).encode()
    content = "\n\n".join(documents).encode() if kind in ("gz", "zst") else lines
    (plain / ("a.txt" if kind in ("gz", "zst") else "a.jsonl")).write_bytes(content)
    assert len(content) > 2**22
    if kind.endswith("gz"):
        (packed / f"a.{kind}").write_bytes(gzip.compress(content[:999]) + gzip.compress(content[999:], 1))
    elif kind == "zst":
        zstandard = pytest.importorskip("zstandard")
        pack = zstandard.ZstdCompressor().compress
        (packed / "a.txt.zst").write_bytes(pack(content[:999]) + pack(content[999:]))
    elif kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"id": [1] * 400, "body": documents}), packed / "a.parquet")
    else:
        for number in range(4):
            (packed / f"{number}.jsonl").write_text(
                "\n".join(json.dumps({"body": document}, ensure_ascii=False) for document in documents[number::4])
            )
    flags = ("--encoding", "bytes", "--field", "body")
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
    flags = [path, "--encoding", "bytes", "--out"]
    place = sum(len(line) + 1 for line in good[:50])
    assert refused(run("prepare", *flags, tmp_path / "refused")) == (
        f"prepare: texts must be UTF-8; got file={path}, byte={place + 11}. "
        "Convert it, or say --undecodable replace or skip."
    )
    assert not (tmp_path / "refused" / MANIFEST).exists()
    skipped = prepared(tmp_path, *flags[:-1], "--undecodable", "skip", out="skipped")
    manifest = read_manifest(skipped, "test")
    assert (manifest.train.documents + manifest.val.documents, manifest.skipped) == (100, 2)
    replaced = read_manifest(prepared(tmp_path, *flags[:-1], "--undecodable", "replace", out="replaced"), "test")
    assert (replaced.train.documents + replaced.val.documents, replaced.skipped) == (102, 0)


def test_a_learned_vocabulary_goes_with_the_model(corpus, tmp_path):
    folder = prepared(tmp_path, corpus / "below", "--learn-vocabulary", 300)
    name = read_vocabulary(folder / "vocabulary.tiktoken")
    codec = get_encoding(name)
    assert (codec.n_vocab, codec.eot_token) == (300, 299)
    dataset = load_prepared(str(folder))
    assert dataset.vocabulary == 300
    text = text_of(500, seed=99)
    assert codec.decode(encode(codec, text).tolist()) == text
    assert encode(codec, text).size < 0.7 * len(text.encode())
    out = tmp_path / "run"
    trained = run("train", "--data", folder, *SMALL, "--steps", 20, "--out", out)
    assert trained.returncode == 0, trained.stderr
    (out / "latest" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    for path in folder.iterdir():
        path.unlink()
    written = run("generate", tmp_path / "alone.safetensors", "--prompt", "the quick", "--tokens", 20)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("the quick")


def test_a_vocabulary_is_learned_alike_by_any_number_of_threads(corpus, tmp_path):
    names = []
    for threads in ("1", "2"):
        out = tmp_path / threads
        result = run("prepare", corpus / "below", "--learn-vocabulary", 500, "--out", out, RAYON_NUM_THREADS=threads)
        assert result.returncode == 0, result.stderr
        names.append(read_vocabulary(out / "vocabulary.tiktoken"))
    assert names[0] == names[1]


def test_training_goes_on_with_a_vocabulary_that_came_from_a_file(corpus, tmp_path):
    folder = prepared(tmp_path, corpus / "below", "--learn-vocabulary", 300)
    flags = ("--data", corpus / "below" / "29.md", "--encoding", folder / "vocabulary.tiktoken", *SMALL)
    out = tmp_path / "run"
    assert run("train", *flags, "--steps", 3, "--out", out).returncode == 0
    gone_on = run("train", "--resume", out, "--steps", 5)
    assert gone_on.returncode == 0, gone_on.stderr


def bad_inputs(tmp_path: Path) -> dict[str, tuple[list[object], str]]:
    """Arguments, and how the answer begins."""
    (tmp_path / "a.jsonl").write_text('{"title": "x", "body": 3}\n')
    (tmp_path / "b.jsonl").write_text("no json\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text_of(9000).encode())[:-20])
    (tmp_path / "wrong.zst").write_bytes(b"no zstd at all")
    (tmp_path / "wrong.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "wrong.tiktoken").write_text("AAAA 0\nAAAB 7\n")
    line, more = f"file={tmp_path / 'a.jsonl'}, byte=0", "Name it by --field."
    return {
        "missing": ([tmp_path / "nowhere.txt"], "prepare: the file must exist; got source="),
        "glob": ([tmp_path / "*.none"], "prepare: the glob must match at least one file"),
        "empty": ([tmp_path / "empty.txt"], "prepare: the inputs must hold text; got inputs="),
        "short": ([tmp_path / "short.txt"], "prepare: the "),
        "field": (
            [tmp_path / "a.jsonl"],
            f"prepare: every record must have the field; got {line}, field=text, fields=title, body. {more}",
        ),
        "number": (
            [tmp_path / "a.jsonl", "--field", "body"],
            f"prepare: the field of every record must be text; got {line}",
        ),
        "json": ([tmp_path / "b.jsonl"], "prepare: every line must be JSON; got file="),
        "gzip": ([tmp_path / "cut.gz"], "prepare: a compressed file must be whole; got file="),
        "zstd": ([tmp_path / "wrong.zst"], "prepare: a compressed file must be whole; got file="),
        "parquet": ([tmp_path / "wrong.parquet"], "prepare: the file must be whole Parquet; got file="),
        "encoding": ([tmp_path / "a.jsonl", "--encoding", "gpt3"], "vocabulary_size: the encoding must be known"),
        "file": (
            [tmp_path / "a.jsonl", "--encoding", tmp_path / "wrong.tiktoken"],
            "read_vocabulary: a vocabulary's lines",
        ),
        "both": (
            [tmp_path / "a.jsonl", "--encoding", "gpt2", "--learn-vocabulary", 300],
            "prepare: a vocabulary is learned or",
        ),
        "size": (
            [tmp_path / "a.jsonl", "--learn-vocabulary", 200],
            "prepare: learn_vocabulary must lie between 258 and",
        ),
        "shards": ([tmp_path / "a.jsonl", "--shard-tokens", "many"], "daskgpt.prepare: argument --shard-tokens"),
        "scheduler": ([tmp_path / "short.txt", "--scheduler", "thread"], "open_scheduler: the scheduler must be known"),
    }


BAD = ("missing", "glob", "empty", "short", "field", "number", "json", "gzip", "zstd", "parquet", "encoding", "file")
BAD += ("both", "size", "shards", "scheduler")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_no_folder_of_tokens(name, tmp_path):
    (tmp_path / "inputs").mkdir()
    arguments, message = bad_inputs(tmp_path / "inputs")[name]
    encoding = [] if {"--encoding", "--learn-vocabulary"} & set(map(str, arguments)) else ["--encoding", "bytes"]
    line = refused(run("prepare", *arguments, *encoding, "--out", tmp_path / "out"))
    assert line.startswith(message), line
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_folders_of_somebody_else_and_of_other_settings_are_left_alone(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    flags = (corpus / "below", "--encoding", "bytes", "--out")
    assert "the folder must be new, empty, or begun by the same command" in refused(run("prepare", *flags, other))
    assert [path.name for path in other.iterdir()] == ["letter.txt"]
    out = prepared(tmp_path, *flags[:-1])
    before = files_of(out)
    again = refused(run("prepare", *flags, out, "--shard-tokens", 100))
    assert "the folder must be begun with the same inputs and settings" in again
    assert files_of(out) == before


def test_two_at_once_do_not_write_one_folder(corpus, learned, tmp_path):
    out = tmp_path / "out"
    flags = [corpus, corpus, corpus, "--encoding", learned, "--scheduler", "sync", "--out", out]
    first = _started(*flags)
    while not (out / JOURNAL).exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # it might be done before the other one has begun
    try:
        assert not (out / MANIFEST).exists()
        assert "prepare: no other process must write the folder" in refused(run("prepare", *flags))
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.communicate()[1] == ""
    assert first.returncode == 0


def test_a_full_disk_is_one_line_and_room_lets_it_go_on(corpus, expected, tmp_path):
    """As a limit on the size of a file, which the system refuses in the same way."""
    out = tmp_path / "out"
    arguments = ("prepare", corpus, "--encoding", "bytes", "--shard-tokens", "2M", "--out", out)
    result = in_shell("ulimit -f 500; $RUN", *arguments)
    assert last_line(result).startswith(f"prepare: all of the file must be written; got path={out}")
    assert len(result.stderr.splitlines()) == 1
    assert not list(out.glob("*.bin"))
    assert run(*arguments).returncode == 0
    assert files_of(out) == files_of(expected)


def test_a_damaged_folder_is_refused(expected, tmp_path):
    for name, damage, message in (
        (
            MANIFEST,
            lambda content: content.replace(b'"ids": 257', b'"ids": 258'),
            "the manifest must be as it was written",
        ),
        (MANIFEST, lambda content: content[:100], "the manifest must be as it was written"),
        ("train_000000.bin", lambda content: content[:-2], "tokens must make"),
        ("val_000000.bin", None, "the file must exist"),
    ):
        folder = tmp_path / "folder"
        shutil.copytree(expected, folder)
        path = folder / name
        if damage:
            path.write_bytes(damage(path.read_bytes()))
        else:
            path.unlink()
        assert message in refused(run("train", "--data", folder, *SMALL))
        shutil.rmtree(folder)


def test_training_refuses_what_does_not_fit(expected):
    line = refused(run("train", "--data", expected, "--batch-size", 300_000, "--sequence-length", 64))
    assert "load_prepared: the training part must hold a batch, 300000 x 64 tokens and one more; got folder=" in line
    line = refused(run("train", "--data", expected, "--encoding", "gpt2"))
    assert line.startswith(
        "load_prepared: the encoding must be the one that the tokens were made with; got encoding=gpt2"
    )
    line = refused(run("train", "--data", expected, "--vocabulary", 100))
    assert line.startswith("train: the model must know every token id of the encoding; got encoding=bytes")
