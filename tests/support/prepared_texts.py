"""Texts for the tests of `prepare`, and helpers that compare its output."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from daskgpt import prepare
from daskgpt.formats.encoding import KNOWN
from daskgpt.formats.token_files import read_manifest, read_tokens

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box naïve façades 北京 ☃ 'tis it's"
WORDS = WORDS.split()
BYTES = ("--encoding", "bytes")


def text_of(size: int, seed: int = 0) -> str:
    """Lines of words, with empty lines, spaces and tabs where tokens might cross a cut."""
    draw = np.random.default_rng(seed)
    ends = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", " \n", "\t", "\n\u3000", "\n    "]
    words, endings = draw.integers(len(WORDS), size=size), draw.integers(len(ends), size=size)
    return "".join(WORDS[word] + ends[end] for word, end in zip(words, endings))


def write_corpus(folder: Path) -> Path:
    """Three blocks of one text, and some small ones."""
    (folder / "below").mkdir(parents=True)
    (folder / "long.txt").write_bytes(text_of(1_500_000).encode())
    for number in range(30):
        (folder / "below" / f"{number:02}.md").write_bytes(text_of(300 + number, seed=number).encode())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\xff")
    return folder


def prepared(tmp_path: Path, *arguments: object, out: str = "out") -> Path:
    folder = tmp_path / out
    assert prepare.main([*map(str, arguments), "--out", str(folder)]) == 0
    return folder


def files_of(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Hashes of all files that are not hidden."""
    paths = (path for path in sorted(folder.iterdir()) if path.name not in but and not path.name.startswith("."))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def tokens_of(folder: Path, part: str) -> np.ndarray:
    shards = getattr(read_manifest(folder), part).shards
    return np.concatenate([read_tokens(folder / shard.file) for shard in shards])


def forget_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a process that has read no vocabulary."""
    for name in KNOWN.keys() - {"bytes"}:
        monkeypatch.delitem(KNOWN, name)
