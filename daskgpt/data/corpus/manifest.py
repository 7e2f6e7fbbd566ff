"""What a folder of prepared tokens says of itself, and what a preparation that is under way remembers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing

MANIFEST, JOURNAL, LOCK, VOCABULARY_FILE = "manifest.json", ".journal.json", ".lock", "vocabulary.tiktoken"
VERSION = 1
PARTS = ("train", "val")


@dataclass
class Shard:
    """A file of tokens; its SHA-256 is of the whole file."""

    file: str
    tokens: int
    sha256: str


@dataclass
class Part:
    """What is to be trained on, or held out.

    bytes   of its text in UTF-8, without end-of-text
    """

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)

    @classmethod
    def of(cls, known: dict[str, Any]) -> Part:
        return cls(**known | {"shards": [Shard(**shard) for shard in known["shards"]]})


@dataclass
class Manifest:
    """All that decides the tokens of a folder, and what came of it: a pure function of inputs and settings.

    encoding     by name; a learned one's file lies beside
    ids          of the encoding, end-of-text, the last one, among them
    settings     that decide the tokens
    inputs       number, bytes, and digest of names and sizes of the files
    skipped      documents that could not be decoded
    """

    encoding: str
    ids: int
    settings: dict[str, Any]
    inputs: dict[str, Any]
    train: Part
    val: Part
    skipped: int = 0

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all: with it a folder is complete.

        Errors   OSError where the system refuses
        """
        known = {"version": VERSION, "kind": "daskgpt tokens", **asdict(self)}
        with replacing(folder / MANIFEST, "prepare") as file:
            file.write(json.dumps(known | {"check": digest_of(known)}, indent=1, ensure_ascii=False).encode() + b"\n")


def digest_of(known: Any) -> str:
    """SHA-256 of what JSON writes."""
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path, where: str) -> Manifest:
    """The manifest of a folder.

    Errors   FileNotFoundError where it has none; ValueError where it is damaged or of another version
    """
    path = folder / MANIFEST
    advice = "Prepare it again."
    if not path.is_file():
        begun = (folder / JOURNAL).is_file()
        rule = "the folder must hold prepared tokens, to the end" if begun else "the folder must hold prepared tokens"
        advice = (
            "Give the command that prepared it once more: it goes on." if begun else "Name one of daskgpt.prepare's."
        )
        raise refusal(FileNotFoundError, where, rule, {"folder": folder}, advice)
    try:
        known = json.loads(path.read_bytes())
        check = known.pop("check")
        version = known["version"]
        good = check == digest_of(known)
        manifest = Manifest(
            **{name: known[name] for name in ("encoding", "ids", "settings", "inputs", "skipped")},
            train=Part.of(known["train"]),
            val=Part.of(known["val"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        got = f"path={path} ({type(error).__name__})"
        raise refusal(ValueError, where, "the manifest must be as it was written", got, advice) from None
    rule, newer = f"its version must be {VERSION}", "A newer daskgpt wrote it: read it with that."
    require(version == VERSION, where, rule, {"path": path, "version": version}, newer)
    require(good, where, "the manifest must be as it was written", {"path": path, "check": check[:12]}, advice)
    return manifest
