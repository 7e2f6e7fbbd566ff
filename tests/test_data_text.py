"""Text sources: the standard library, a file, a folder, a glob."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import daskgpt.data.text
from daskgpt.data.text import Document, read_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text beside what is not text."""
    (tmp_path / "b" / "test").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two\n")
    (tmp_path / "b" / "test" / "three.md").write_text("drei: ä\r\n", encoding="utf-8", newline="")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff\xe0")
    (tmp_path / "table").write_bytes(b"abc\0def")
    (tmp_path / ".hidden" / "four.txt").write_text("four\n")
    (tmp_path / ".five").write_text("five\n")
    return tmp_path


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def test_standard_library_is_text_of_modules_in_order():
    documents = read_text("stdlib")
    names = [document.name for document in documents]
    assert {"abc.py", "json/decoder.py", "typing.py"} <= set(names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "encodings"}
    assert "def namedtuple" in next(d.text for d in documents if d.name == "collections/__init__.py")


def test_standard_library_is_a_few_megabytes_and_the_same_each_time():
    documents = read_text("stdlib")
    assert 2_000_000 < sum(len(document.text.encode()) for document in documents) <= 9_000_000
    assert documents == read_text("stdlib")


def test_standard_library_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daskgpt.data.text, "STANDARD_LIBRARY_BYTES", 100_000)
    documents = read_text("stdlib")
    assert 10_000 < sum(len(document.text.encode()) for document in documents) <= 100_000


def test_standard_library_without_source(tmp_path: Path):
    (tmp_path / "abc.pyc").write_bytes(b"compiled")
    with pytest.raises(FileNotFoundError) as error:
        daskgpt.data.text._standard_library(tmp_path)
    assert str(error.value) == (
        f"read_text: the standard library must be there as source; got folder={tmp_path}. Give a text file instead."
    )


def test_file_keeps_every_character(folder: Path):
    assert read_text(str(folder / "b" / "test" / "three.md")) == [Document("three.md", "drei: ä\r\n")]


def test_folder_is_read_in_order_without_binary_blank_and_hidden_files(folder: Path):
    assert texts(read_text(str(folder))) == ["one\n", "drei: ä\r\n", "two\n"]


def test_glob_is_read_in_order(folder: Path):
    assert texts(read_text(str(folder / "**" / "*.txt"))) == ["one\n", "two\n"]
    assert texts(read_text(str(folder / "[ap]*"))) == ["one\n"]


def test_a_name_with_brackets_is_a_file(tmp_path: Path):
    (tmp_path / "a[1].txt").write_text("text")
    assert texts(read_text(str(tmp_path / "a[1].txt"))) == ["text"]


def test_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert texts(read_text("~/a.txt")) == ["one\n"]
    assert texts(read_text("~/a*")) == ["one\n"]


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("none.txt", FileNotFoundError, "read_text: the file must exist; got source={source}. Check the path."),
        (
            "*.none",
            FileNotFoundError,
            "read_text: the glob must match at least one file; got source={source}. Check the path; ** spans folders.",
        ),
        (
            "blank.txt",
            ValueError,
            "read_text: the text must not be empty; got source={source}. Give a source that holds text.",
        ),
        (
            "picture",
            ValueError,
            "read_text: the file must be UTF-8 text; got source={source}, first wrong byte=0. "
            "Convert it, for example with iconv -t UTF-8.",
        ),
        (
            "[pt]*",
            ValueError,
            "read_text: at least one file must be UTF-8 text; got source={source}, files=2. "
            "Name token files by a path or glob that ends in .bin.",
        ),
    ],
)
def test_errors(folder: Path, source: str, kind: type[Exception], message: str):
    path = str(folder / source)
    with pytest.raises(kind, match=re.escape(message.format(source=path)) + "$"):
        read_text(path)


def test_empty_folder(tmp_path: Path):
    with pytest.raises(ValueError, match=r"at least one file must be UTF-8 text; got source=.*, files=0\."):
        read_text(str(tmp_path))
