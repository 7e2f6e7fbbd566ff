"""Tests of text sources: the standard library, a file, a folder, a glob."""

from __future__ import annotations

from pathlib import Path

import pytest

import daskgpt.data.text
from daskgpt.data.text import Document, read_text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text beside what is not text; it is the home folder as well."""
    (tmp_path / "b" / "test").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two\n")
    (tmp_path / "b" / "test" / "three.md").write_text("drei: ä\r\n", encoding="utf-8", newline="")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "a[1].text").write_text("brackets")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff\xe0")
    (tmp_path / "table").write_bytes(b"abc\0def")
    (tmp_path / ".hidden" / "four.txt").write_text("four\n")
    (tmp_path / ".five").write_text("five\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_standard_library_is_a_few_megabytes_of_modules_in_order():
    documents = read_text("stdlib")
    names = [document.name for document in documents]
    assert {"abc.py", "json/decoder.py", "typing.py"} <= set(names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "encodings"}
    assert "def namedtuple" in next(d.text for d in documents if d.name == "collections/__init__.py")
    assert 2_000_000 < sum(len(document.text.encode()) for document in documents) <= 9_000_000


def test_standard_library_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    documents = read_text("stdlib")[:3]
    size = sum(len(document.text.encode()) for document in documents)
    for limit, count in ((size, 3), (size - 1, 2)):
        monkeypatch.setattr(daskgpt.data.text, "STANDARD_LIBRARY_BYTES", limit)
        assert read_text("stdlib") == documents[:count]


def test_standard_library_without_source(tmp_path: Path):
    (tmp_path / "abc.pyc").write_bytes(b"compiled")
    with pytest.raises(FileNotFoundError, match="there as source"):
        daskgpt.data.text._standard_library(tmp_path)


def test_file_keeps_every_character(folder: Path):
    assert read_text(str(folder / "b" / "test" / "three.md")) == [Document("three.md", "drei: ä\r\n")]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("~", ["one\n", "brackets", "drei: ä\r\n", "two\n"]),
        ("~/**/*.txt", ["one\n", "two\n"]),
        ("~/[ap]*", ["one\n", "brackets"]),
        ("~/a[1].text", ["brackets"]),
        ("~/a.txt", ["one\n"]),
    ],
)
def test_what_is_read_in_order(folder: Path, source: str, texts: list[str]):
    for name in (source, source.replace("~", str(folder))):
        assert [document.text for document in read_text(name)] == texts


@pytest.mark.parametrize(
    ("source", "kind", "keyword"),
    [
        ("none.txt", FileNotFoundError, "file must exist"),
        ("*.none", FileNotFoundError, "glob must match"),
        ("blank.txt", ValueError, "must not be empty"),
        ("picture", ValueError, "first wrong byte=0"),
        ("[pt]*", ValueError, "at least one file must be UTF-8.*files=2"),
        ("empty", ValueError, "files=0"),
    ],
)
def test_sources_that_are_refused(folder: Path, source: str, kind: type[Exception], keyword: str):
    with pytest.raises(kind, match=keyword):
        read_text(str(folder / source))
