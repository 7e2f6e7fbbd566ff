"""Tests of what a path holds: recognized by content, the same for training, evaluation and preparation."""

import errno
import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from command_lines import SMALL
from llmc_samples import write_tokens
from pyarrow import parquet

from daskgpt import evaluate, prepare, train
from daskgpt.data import source as source_module
from daskgpt.data.dataset import load_dataset, read_text
from daskgpt.data.pairs import read_pairs
from daskgpt.data.source import TRAINING, recognize

TEXT = "".join(f"Zeile {number}: ein Vogel säße im Baum, 日本 €\n" for number in range(900))
PAIRS = [(f"{number} plus 1 is", f" {number + 1}.") for number in range(60)]


def pairs_of(source):
    """The texts of a source's pairs, and what was left out."""
    conversations, _, left_out = read_pairs(source)
    return [tuple(message.content for message in conversation) for conversation in conversations], left_out


def lines(records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def pairs_as(prompt: str, response: str) -> list[dict[str, str]]:
    return [{prompt: ask, response: answer} for ask, answer in PAIRS]


def written(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts_of(source: str) -> list[str]:
    return read_text(recognize(source))


# Characters and compression


@pytest.mark.parametrize("charset", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_texts_are_the_same_with_a_mark_and_in_all_packings(charset, pack, tmp_path):
    source = written(tmp_path / "t.txt", pack(TEXT.encode(charset)))
    assert texts_of(source) == [TEXT]
    for name, form in (("l.jsonl", lines([{"text": TEXT}])), ("p.jsonl", lines(pairs_as("prompt", "response")))):
        written(tmp_path / name, pack(form.encode(charset)))
    assert texts_of(str(tmp_path / "l.jsonl")) == [TEXT]
    assert pairs_of(recognize(str(tmp_path / "p.jsonl")))[0] == PAIRS
    for name, encoded in (("plain", TEXT.encode()), ("other", TEXT.encode("utf-8-sig"))):
        source = written(tmp_path / name / "t.txt", encoded)
        prepare.main([source, "--encoding", "bytes", "--out", str(tmp_path / f"{name}-tokens")])
    plain, other = ((tmp_path / f"{name}-tokens" / "train_000000.bin").read_bytes() for name in ("plain", "other"))
    assert plain == other


@pytest.mark.parametrize("share", [0.02, 0.5, 1])
def test_compressed_files_that_are_cut_off_are_refused(share, tmp_path):
    packed = gzip.compress(" ".join(map(str, np.random.default_rng(0).integers(0, 10**9, 90_000))).encode())
    path = written(tmp_path / "t", packed[: int(len(packed) * share) - 1])
    with pytest.raises(ValueError, match="a compressed file must be complete"):
        texts_of(path)


def test_a_file_that_is_cut_within_a_character(tmp_path):
    """The first bytes that are looked at may end anywhere."""
    for shift in range(4):
        text = "a" * shift + "€" * 20_000
        assert texts_of(written(tmp_path / "t.txt", text)) == [text]


# Token files


def test_own_shards_have_the_encoding_of_their_manifest(tmp_path, capsys):
    folder = tmp_path / "tokens"
    (tmp_path / "below").mkdir()
    prepare.main([written(tmp_path / "t.txt", TEXT), "--encoding", "bytes", "--out", str(folder)])
    source = recognize(str(folder / "train_*.bin"))
    assert (source.kind, source.encoding) == ("token ids", "bytes")
    assert load_dataset(str(folder / "train_000000.bin")).encoding_name == "bytes"
    with pytest.raises(ValueError, match="must be that of the tokens; got encoding=gpt2.*folder of the model"):
        load_dataset(str(folder / "train_000000.bin"), "gpt2")
    write_tokens(tmp_path / "below" / "others.bin", np.arange(99))
    shutil.copytree(folder, tmp_path / "below" / "tokens")
    with pytest.raises(ValueError, match="of one encoding"):
        recognize(str(tmp_path / "below" / "**" / "*.bin"))
    (tmp_path / "link.bin").symlink_to(folder / "train_000000.bin")
    assert recognize(str(tmp_path / "link.bin")).encoding == "bytes"


# Records


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("pairs.JSONL", pairs_as("prompt", "response")),
        ("pairs.ndjson", pairs_as("prompt", "completion")),
        ("pairs.json", pairs_as("question", "answer")),
        ("pairs.json", [row | {"input": ""} for row in pairs_as("instruction", "output")]),
        ("folder/a.jsonl", pairs_as("instruction", "response")),
        ("long.json", [{"prompt": "é" * 2**14, "response": "b"}, *pairs_as("prompt", "response")]),
    ],
)
def test_pairs_are_recognized(name, records, tmp_path):
    long = [("é" * 2**14, "b")] * name.startswith("long")
    written(tmp_path / name, lines(records))
    source = recognize(str(tmp_path / name.split("/")[0]))
    assert source.kind == "pairs"
    assert pairs_of(source) == (long + PAIRS, [])
    with pytest.raises(ValueError, match=r"data: the source must hold text; got .*holds pairs.*--preset finetune"):
        prepare.main([str(tmp_path / name), "--out", str(tmp_path / "tokens")])


FIRST = {"instruction": "Add.", "output": "3"}  # the first line decides what a file is
BEYOND_PROMPTS = [
    ({"input": "1, 2"}, ("Add.\n1, 2", "3")),
    ({"context": "1, 2", "input": None}, ("Add.\n1, 2", "3")),
    ({"question": "Sum?", "context": "1, 2", "answer": "3", "output": None}, ("Sum?\n1, 2", "3")),
    ({"system": "Be kind.", "tools": []}, ("Be kind.", "Add.", "3")),
    ({"system": "", "conversations": None, "tools": "[]", "history": "null"}, ("Add.", "3")),
]


@pytest.mark.parametrize(("more", "texts"), BEYOND_PROMPTS)
def test_what_a_record_says_beside_its_prompt_is_kept(more, texts, tmp_path):
    record = more if "question" in more else FIRST | more
    assert pairs_of(recognize(written(tmp_path / "a.jsonl", lines([FIRST, record]))))[0] == [("Add.", "3"), texts]


@pytest.mark.parametrize("name", ["tools", "history", "tool_calls", "function_call", "reasoning_content"])
def test_what_has_no_place_in_a_conversation_is_refused(name, tmp_path):
    message = TALK | {"role": "assistant", name: [{"name": "f"}]}
    for record, kind in ((FIRST | {name: "[1]"}, "record"), ({"messages": [TALK, message]}, "message")):
        source = recognize(written(tmp_path / "a.jsonl", lines([FIRST, record])))
        with pytest.raises(ValueError, match=rf"line 2, found=a {kind} whose {name} would be lost\."):
            read_pairs(source)


def test_lists_of_records_are_refused(tmp_path):
    long = {"prompt": "é" * 2**14, "response": "b"}
    for records in ([long], pairs_as("instruction", "output"), [{"text": TEXT}], [{"conversations": []}]):
        path = written(tmp_path / "list.json", json.dumps(records, indent=1))
        with pytest.raises(ValueError, match=r"is a JSON list of records\). Write each .* jq"):
            recognize(path)


def test_other_json_is_text(tmp_path):
    contents = {"list.json": '["a", {"text": 1}]', "list.txt": '[{"text": "a"}] is a list.'}
    contents |= {"a.txt": lines([{"text": TEXT}]), "a.json": json.dumps({"name": "settings"}, indent=1)}
    for name, content in contents.items():
        assert texts_of(written(tmp_path / name, content)) == [content]


def test_no_more_than_a_record_is_read_to_recognize_a_file(tmp_path, monkeypatch):
    """A line may be a file of gigabytes."""
    path = written(tmp_path / "a.jsonl", lines([{"other": "b" * 100}]))
    with pytest.raises(ValueError, match="holds records without the field text"):
        recognize(path)
    monkeypatch.setattr(source_module, "LONGEST_RECORD", 100)
    with pytest.raises(ValueError, match="the field text of every record must be text; got path=.*, line 1"):
        texts_of(path)


def test_parquet_holds_text_pairs_or_chats(tmp_path, monkeypatch):
    rows = {
        "pairs": pairs_as("prompt", "response"),
        "chats": [{"messages": [TALK, TALK | {"role": "assistant"}]}] * 2,
        "text": [{"id": 1, "text": "one"}, {"id": 2, "text": None}, {"id": 3, "text": "three"}],
    }
    paths = {name: str(tmp_path / f"{name}.parquet") for name in rows}
    for name, path in paths.items():
        table = pyarrow.Table.from_pylist(rows[name])
        others = pyarrow.array([2**61] * len(table), pyarrow.timestamp("us"))  # which Python cannot express
        parquet.write_table(table.append_column("time", others), path)
    assert pairs_of(recognize(paths["pairs"]))[0] == PAIRS
    assert pairs_of(recognize(paths["chats"]))[0] == [("a", "a")] * 2
    assert recognize(paths["pairs"]).described == "1 file, 1 of Parquet"
    assert texts_of(paths["text"]) == ["one", "three"]
    content = Path(paths["text"]).read_bytes()
    # A page, not what describes it; and the end, which describes all pages.
    for damaged in (content[:4] + b"\xff" * (len(content) // 4) + content[4 + len(content) // 4 :], content[:-9]):
        with pytest.raises(ValueError, match=r"data: the file must be complete Parquet; got file=.*text.* Make it"):
            texts_of(written(tmp_path / "text.parquet", damaged))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RuntimeError, match=r"data: pyarrow must be installed; .*daskgpt\[prepare\]"):
        recognize(paths["pairs"])


def test_empty_pairs_are_left_out_by_number_and_half_characters_replaced(tmp_path):
    content = lines(pairs_as("prompt", "response"))
    content += '{"prompt": "a \\ud83d b", "response": "c"}\n{"prompt": "a", "response": null}\n'
    path = written(tmp_path / "a.jsonl", content)
    assert pairs_of(recognize(path)) == ([*PAIRS, ("a ? b", "c")], ["a.jsonl line 62"])
    described = load_dataset(path, sequence_length=32).description
    assert "1 left out: empty, or without an assistant (a.jsonl line 62)" in described
    content = '{"text": "half \\ud83d of one"}\n' + lines([{"text": TEXT}, {"text": "\U0001f600"}])
    assert texts_of(written(tmp_path / "t.jsonl", content)) == ["half ? of one", TEXT, "\U0001f600"]


TALK = {"role": "user", "content": "a"}


@pytest.mark.parametrize("wrong", [0, 7, False, [], ["a"], {}, {"a": "b"}])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "response": "b"},
        {"instruction": "a", "input": "b", "output": "c"},
        {"role": "user", "content": "a"},
    ],
)
def test_what_is_no_text_in_a_pair_or_chat_is_refused_by_line(record, wrong, tmp_path):
    for name in record:
        rows = [record, record | {name: wrong}]
        rows = [{"messages": [row, TALK | {"role": "assistant"}]} for row in rows] if "role" in record else rows
        source = recognize(written(tmp_path / "a.jsonl", lines(rows)))
        got = rf"{name}: {re.escape(str(wrong))} \({type(wrong).__name__}\)\."
        with pytest.raises(ValueError, match=rf"a record must have .*a\.jsonl, line 2, found={got}"):
            read_pairs(source)


def test_messages_without_a_role_are_left_out(tmp_path):
    rows = [{"messages": [{"role": role, "content": "a"}, TALK | {"role": "assistant"}]} for role in ("user", None)]
    path = written(tmp_path / "a.jsonl", lines([*rows, {"messages": None}]))
    assert read_pairs(recognize(path))[1:] == (["a.jsonl line 1"], ["a.jsonl line 2", "a.jsonl line 3"])


def test_records_of_other_names_are_told_which_are_known(tmp_path):
    path = written(tmp_path / "a.jsonl", lines(pairs_as("Prompt", "Response")))
    advice_for = {TRAINING: "Name the fields prompt and response", ("text",): "daskgpt prepare .*--field"}
    for accepted, advice in advice_for.items():
        with pytest.raises(ValueError, match=f"fields=Prompt, Response.. {advice}"):
            recognize(path, accepted)


def test_folders_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    written(tmp_path / "a.txt", TEXT)
    (tmp_path / "below").mkdir()
    scanned = os.scandir

    def scandir(path):
        if Path(path).name == "below":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scanned(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match=r"data: .*/below \(Permission denied\)"):
        recognize(str(tmp_path))


# Folders and globs


def test_what_is_left_out_of_a_folder_is_said(tmp_path):
    for name in ("a.txt", "b.txt", "below/c.md"):
        written(tmp_path / name, TEXT)
    written(tmp_path / "latin.txt", "café".encode("latin-1"))
    write_tokens(tmp_path / "train.bin", np.arange(99))
    written(tmp_path / "pairs.jsonl", lines(pairs_as("prompt", "response")))
    written(tmp_path / "below" / "photo.jpg", b"\xff\xd8\xff\xe0 and more")
    description = load_dataset(str(tmp_path)).description
    assert "7 files, 4 left out: below/photo.jpg is not UTF-8 text (byte 0); latin.txt is not UTF-8 " in description
    assert "; and 1 more" in description
    written(tmp_path / "c.txt", gzip.compress(TEXT.encode()))
    assert recognize(str(tmp_path)).described.startswith("8 files, 4 left out: ")
    assert recognize(str(tmp_path / "pairs.*")).described == "1 file, 1 of JSON lines"


def test_links(tmp_path):
    """Those to files are read; those to folders may lead in circles, and are not followed below a folder or by **."""
    written(tmp_path / "texts" / "a.txt", TEXT)
    for name, place in {"b.txt": "a.txt", "c.txt": "nothing", "circle": ".", "other": "../texts"}.items():
        (tmp_path / "texts" / name).symlink_to(place)
    source = recognize(str(tmp_path / "texts"))
    assert [file.name for file in source.files] == ["a.txt", "b.txt"]
    assert {file.name for file in source.left_out} == {"circle", "other", "c.txt"}
    assert "other is a link to a folder, or to nothing" in source.described
    for pattern in ("**", "**/*.txt", "texts/*.txt", "t*/**/[ab].txt", "texts/circle/*.txt"):
        assert [file.name for file in recognize(f"{tmp_path}/{pattern}").files] == ["a.txt", "b.txt"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "texts").symlink_to("../texts")
    with pytest.raises(ValueError, match=r"only: texts \(is a link to a folder, or to nothing\). Name the folder"):
        recognize(str(tmp_path / "only"))


def test_a_file_that_turns_out_not_to_be_text_is_refused(tmp_path):
    late = written(tmp_path / "late.txt", b"a" * 50_000 + b"\xff" + TEXT.encode())
    with pytest.raises(ValueError, match="must be UTF-8 text; got .*first wrong byte=50000.*iconv"):
        load_dataset(late)


def test_runs_and_prepared_tokens_below_a_folder_are_no_text(tmp_path):
    written(tmp_path / "t.txt", TEXT)
    train.main(["--data", str(tmp_path / "t.txt"), *SMALL, "--steps", "1", "--out", str(tmp_path / "run")])
    prepare.main([str(tmp_path / "t.txt"), "--encoding", "bytes", "--out", str(tmp_path / "tokens")])
    written(tmp_path / "site" / "manifest.json", '{"name": "a web page"}')
    source = recognize(str(tmp_path))
    assert [file.name for file in source.files] == ["site/manifest.json", "t.txt"]
    left_out = {file.name: file.described for file in source.left_out}
    assert left_out == {"run": "is a run or a model", "tokens": "is prepared tokens"}
    (tmp_path / "t.txt").unlink()
    shutil.rmtree(tmp_path / "site")
    (tmp_path / "tokens").rename(tmp_path / ".tokens")
    with pytest.raises(ValueError, match=r": run \(is a run or a model\). Give the text"):
        recognize(str(tmp_path))
    (tmp_path / "run").rename(tmp_path / ".run")
    (tmp_path / ".tokens").rename(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"tokens \(is prepared tokens\). daskgpt train takes it: --data .*/tokens\."):
        recognize(str(tmp_path))
    for command in (train.main, lambda flags: evaluate.main([str(tmp_path / ".run"), *flags])):
        with pytest.raises(ValueError, match=r"must hold .*got source=.*a run or a model.*Give the text"):
            command(["--data", str(tmp_path / ".run")])


# What is refused

BINARY = bytes(range(256))
OTHERS = {
    "a.docx": (b"PK\x03\x04" + BINARY, "not UTF-8 text.*Export it as text"),
    "a.tar.gz": (gzip.compress(bytes(257) + b"ustar" + bytes(300)), "not UTF-8 text.*unpack it"),
    "a.gguf": (b"GGUF\x03\0\0\0" + BINARY, "not UTF-8 text.*--init"),
    "pytorch.bin": (b"PK\x03\x04" + BINARY, "pickled Python objects"),
    "pickle.bin": (b"\x80\x04\x95" + BINARY, "pickled Python objects"),
    "lfs.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS.*git lfs pull"),
    "questions.bin": (np.array([20240522, 1], "<i4").tobytes() + bytes(1016), "llm.c evaluation set"),
    "windows.txt": (TEXT.encode("utf-16"), "not UTF-8 text .byte 0.*iconv"),
    "table": (b"abc\0def", "not UTF-8 text .byte 3"),
    "wide.bin": (np.arange(99, dtype="<i4").tobytes(), "ids of 4 bytes or more"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_with_what_helps(name, tmp_path):
    content, keyword = OTHERS[name]
    with pytest.raises(ValueError, match=keyword):
        load_dataset(written(tmp_path / name, content))


@pytest.mark.parametrize("source", ["", " ", "nowhere.txt", "*.none", "/dev/null", "pipe"])
def test_nothing_is_no_source(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    told = "must be named|must exist|at least one file|regular file"
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        recognize(source)


# Data for validation


def test_validation_data_replaces_the_held_out_part(tmp_path):
    text, other = written(tmp_path / "t.txt", TEXT), written(tmp_path / "other.txt", "something else, " * 50)
    dataset = load_dataset(text, validation_data=other)
    assert bytes(dataset.training[1:].tolist()) == TEXT.encode()
    assert bytes(dataset.validation[1:].tolist()) == b"something else, " * 50
    assert f"validation on {other}" in dataset.description
    prepare.main([text, "--encoding", "bytes", "--out", str(tmp_path / "tokens")])
    held = load_dataset(str(tmp_path / "tokens")).validation
    mixed = load_dataset(text, validation_data=str(tmp_path / "tokens"))
    np.testing.assert_array_equal(mixed.validation[:], held[:])
    assert len({dataset.digest, mixed.digest, load_dataset(text).digest}) == 3
    with pytest.raises(ValueError, match="both sources must be pairs, or none"):
        load_dataset(text, validation_data=written(tmp_path / "p.jsonl", lines(pairs_as("prompt", "response"))))
