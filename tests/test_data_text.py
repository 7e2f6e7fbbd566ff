"""Tests of text sources: the standard library, a file, a folder, a glob."""

import sysconfig
from pathlib import Path

import pytest

import daskgpt.data.source
from daskgpt.data import text
from daskgpt.data.source import recognize, standard_library


def read_text(source: str) -> list[str]:
    return text.read_text(recognize(source))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text beside what is not text; it is the home folder as well."""
    for name in ("b/test", ".hidden", "empty"):
        (tmp_path / name).mkdir(parents=True)
    files = {"b/two.txt": b"two\n", "b/test/three.md": "drei: ä\r\n".encode(), "a.txt": b"one\n", "blank.txt": b" \n"}
    files |= {"a[1].text": b"brackets", "picture": b"\xff\xd8\xff\xe0", "table": b"abc\0def"}
    for name, content in (files | {".hidden/four.txt": b"four\n", ".five": b"five\n"}).items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_standard_library_is_a_few_megabytes_of_modules_in_order():
    documents = read_text("stdlib")
    names = [file.name for file in standard_library(Path(sysconfig.get_path("stdlib")))]
    assert {"abc.py", "json/decoder.py", "typing.py"} <= set(names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "encodings"}
    assert any("def namedtuple" in document for document in documents)
    assert 2_000_000 < sum(len(document.encode()) for document in documents) <= 9_000_000


def test_standard_library_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    documents = read_text("stdlib")[:3]
    size = sum(len(document.encode()) for document in documents)
    for limit, count in ((size, 3), (size - 1, 2)):
        monkeypatch.setattr(daskgpt.data.source, "STANDARD_LIBRARY_BYTES", limit)
        assert read_text("stdlib") == documents[:count]


def test_files_are_read_in_order(folder: Path):
    assert read_text(str(folder / "b" / "test" / "three.md")) == ["drei: ä\r\n"]
    sources = {"~": ["one\n", "brackets", "drei: ä\r\n", "two\n"], "~/**/*.txt": ["one\n", "two\n"]}
    sources |= {"~/[ap]*": ["one\n", "brackets"], "~/a[1].text": ["brackets"], "~/a.txt": ["one\n"]}
    for source, texts in sources.items():
        for name in (source, source.replace("~", str(folder))):
            assert read_text(name) == texts, name


REFUSED = [
    ("none.txt", FileNotFoundError, "file must exist"),
    ("*.none", FileNotFoundError, "glob must match"),
    ("blank.txt", ValueError, "must not be empty"),
    ("picture", ValueError, "picture.*not UTF-8 text"),
    ("[pt]*", ValueError, "must hold text.*picture.*not UTF-8"),
    ("empty", ValueError, "empty"),
]


@pytest.mark.parametrize(("source", "kind", "keyword"), REFUSED)
def test_sources_that_are_refused(folder: Path, source: str, kind: type[Exception], keyword: str):
    with pytest.raises(kind, match=keyword):
        read_text(str(folder / source))
