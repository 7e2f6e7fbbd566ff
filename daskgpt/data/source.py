"""Contents of a path, recognized once, before anything else is read.

Training, evaluation and preparation ask here what a file, folder, glob or pipe is, so they agree. Some kilobytes of
each file are read. Of a folder or glob, files of one kind are taken and the others are named with a reason; a single
file that cannot be used is refused with the name of its format and what helps.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import matching_files, printable
from daskgpt.data.file_kinds import EXPORT, FIELD, KINDS, MODEL, PAIRS, QUESTIONS, TEXT, TOKENS, look
from daskgpt.data.reading import ARRAY, DOCUMENT, LINES, PARQUET, WHERE, File, is_pipe, spooled
from daskgpt.data.token_folder import encoding_of, is_prepared, read_manifest

STANDARD_LIBRARY = "stdlib"
PREPARED = "prepared tokens"
TRAINING = (TEXT, PAIRS, TOKENS, PREPARED)


@dataclass(frozen=True)
class Source:
    """Contents of a path.

    name      the path as it was given
    kind      one of KINDS or PREPARED
    files     those that are taken, in order; of prepared tokens none
    left_out  names and reasons of the others
    lacking   records of text without a text of whole characters, as file and line
    encoding  of token ids, where the manifest beside them names it
    """

    name: str
    kind: str
    files: tuple[File, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    lacking: tuple[str, ...] = ()
    encoding: str = ""

    @property
    def described(self) -> str:
        """The line for people: what was taken and what was left out."""
        count, left = len(self.files), self.left_out
        notes = sorted({note for file in self.files for note in _notes(file)})
        text = f"{count:,} file{'s' * (count != 1)}" + (f" of {', '.join(notes)}" if notes else "")
        if left:
            text = f"{count + len(left):,} files" + (f" of {', '.join(notes)}" if notes else "")
            shown = [f"{name} {reason}" for name, reason in left[:3]]
            more = [f"and {len(left) - 3:,} more"] if len(left) > 3 else []
            text += f", {len(left):,} left out: {printable('; '.join(shown + more))}"
        if count := len(self.lacking):
            record = f"{count:,} record{'s' * (count != 1)}"
            text += f"; {record} left out: half a character ({printable(self.lacking[0])})"
        return text


def _notes(file: File) -> list[str]:
    """Return what is uncommon about a file."""
    charset = "" if file.charset.startswith("utf-8") else file.charset.upper()
    wide = f"{np.dtype(file.dtype).itemsize}-byte ids" if file.dtype not in ("", "<u2") else ""
    form = {DOCUMENT: "", LINES: "JSON lines", ARRAY: "JSON", PARQUET: PARQUET}.get(file.form, "CSV")
    return [note for note in (charset, file.packing, form, wide) if note]


def recognize(
    source: str,
    accepted: Collection[str] = TRAINING,
    field: str = FIELD,
    where: str = WHERE,
    *,
    lenient: bool = False,
) -> Source:
    """Return what a path, a glob or a pipe holds.

    accepted   kinds that the caller can use
    field      name of the text in records
    lenient    whether text may have bytes that are not UTF-8

    Cost       some kilobytes of each file are read; a pipe is copied to a temporary file
    Errors     FileNotFoundError if nothing is there; ValueError naming the format of what cannot be used, with what
               helps; RuntimeError for a format whose library is not installed; OSError if a file cannot be read
    """
    rule = "a source must be named"
    require(bool(source.strip()), where, rule, {"source": repr(source)}, f"Give a path, or {STANDARD_LIBRARY}.")
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        return Source(source, TEXT, tuple(_plain(path, root) for path in standard_library(root)))
    path = Path(source).expanduser()
    left_out: list[tuple[str, str]] = []
    alone = False
    if path.is_dir():
        what, advice = _folder_kind(path)
        if what == PREPARED and PREPARED in accepted:
            return Source(source, PREPARED)
        rule, got = f"the source must hold {_names(accepted)}", {"source": f"{source} ({what})"}
        require(not what, where, rule, got, advice)
        named = [(file, file.relative_to(path).as_posix()) for file in files_below(path, left_out=left_out)]
        accepted = [kind for kind in accepted if kind != TOKENS]  # those for validation may be among them
    elif is_pipe(path):
        alone, named = True, [(spooled(path), path.name)]
    else:
        alone = path.is_file()
        named = [(file, file.name) for file in matching_files(source, where)]
    files = [look(file, name, accepted, field, where, lenient) for file, name in named]
    taken = [kind for kind in KINDS if kind in accepted and any(file.kind == kind for file in files)][:1]
    if not taken:
        raise _refusal(source, files, accepted, where, alone, left_out)
    left_out += [(file.name, file.reason or f"holds {file.kind}") for file in files if file.kind not in taken]
    kept = tuple(file for file in files if file.kind in taken)
    return Source(source, taken[0], kept, tuple(left_out), encoding=_encoding_of(kept) if taken == [TOKENS] else "")


# What takes a kind that the caller does not.
_USES = {
    PAIRS: "Train on pairs directly: daskgpt train --preset finetune --init MODEL --data FILE.",
    QUESTIONS: "Questions are for daskgpt evaluate.",
    TOKENS: "Name token files by a glob, as in --data 'FOLDER/train*.bin' --validation-data 'FOLDER/val*.bin'.",
}


def _refusal(
    source: str,
    files: list[File],
    accepted: Collection[str],
    where: str,
    alone: bool,
    left_out: list[tuple[str, str]],
) -> Exception:
    """Return the error for a source without a file that can be used."""
    rule = f"the source must hold {_names(accepted)}"
    first = next((file for file in files if file.size), None) or next(iter(files), None)
    if left_out and not first:
        name, reason = left_out[0]
        what, advice = _folder_kind(folder := Path(source).expanduser() / name)
        advice = f"Name it: {folder}." if what in accepted else advice
        return refusal(ValueError, where, rule, f"source={source} ({name} {reason})", advice)
    if first is None or not any(file.size for file in files):
        return refusal(ValueError, where, rule, {"source": f"{source} (empty)"}, "Give a source that holds text.")
    what, advice = first.reason or f"holds {first.kind}", first.advice or _USES.get(first.kind, EXPORT)
    place = source if alone else f"{source}: {first.name}"
    return refusal(ValueError, where, rule, f"source={place} ({what})", advice)


def _names(kinds: Collection[str]) -> str:
    *others, last = [kind for kind in (*KINDS, PREPARED) if kind in kinds]
    return f"{', '.join(others)} or {last}" if others else last


# Folders


def _folder_kind(folder: Path) -> tuple[str, str]:
    """Return what a folder is beside a collection of files, and advice; "" if it is just that."""
    if is_prepared(folder):
        return PREPARED, "daskgpt train takes prepared tokens."
    if (folder / "config.toml").is_file() and (folder / "chain.jsonl").is_file():
        return "a run of daskgpt", "Give the text that it was trained on; a run is a model, for --init."
    names = {"config.json", "state.json"}
    model = any(folder.glob("*.safetensors")) or (folder / "pytorch_model.bin").is_file()
    if model and any((folder / name).is_file() for name in names):
        return "a model", MODEL
    return "", ""


def files_below(
    folder: Path, skipped: frozenset[str] = frozenset(), left_out: list[tuple[str, str]] | None = None
) -> list[Path]:
    """Return all files in a folder and below it, sorted, except hidden ones and those in folders of skipped names.

    left_out   if given, runs, models and prepared tokens below the folder are not entered but listed here
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        for name in list(folders) if left_out is not None else ():
            if what := _folder_kind(Path(parent, name))[0]:
                folders.remove(name)
                assert left_out is not None
                left_out.append((Path(parent, name).relative_to(folder).as_posix(), f"is {what}"))
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    # By parts, not by the text of the path, so that the order does not depend on the separator of folders.
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


# Whole files up to this size in all. Python 3.11 to 3.13 stay below it; a later, larger library is cut.
STANDARD_LIBRARY_BYTES = 9_000_000
# Copies of other programs, an editor, and tables in the form of modules, from which a model would learn little.
_OTHER_MODULES = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_OTHER_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


def standard_library(root: Path) -> list[Path]:
    """Return the files of the library at `root`, up to a total size.

    Only names that Python itself lists count: a distribution may add files.
    """
    found, size = list[Path](), 0
    for path in files_below(root, _OTHER_FOLDERS):
        top = path.relative_to(root).parts[0].removesuffix(".py")
        if path.suffix == ".py" and top in sys.stdlib_module_names and top not in _OTHER_MODULES:
            size += path.stat().st_size
            if size > STANDARD_LIBRARY_BYTES:
                break
            found.append(path)
    rule, advice = "the source of the standard library must be installed", "Give a text file instead."
    require(bool(found), WHERE, rule, {"folder": root}, advice, FileNotFoundError)
    return found


def _plain(path: Path, root: Path) -> File:
    return File(str(path), path.relative_to(root).as_posix(), TEXT, size=path.stat().st_size)


def _encoding_of(files: Collection[File]) -> str:
    """Return the encoding of token files by the manifests of their folders, which must agree; "" without one."""
    names = set()
    paths = [Path(file.path).resolve() for file in files]  # a link may point to a shard
    for folder in {path.parent for path in paths}:
        here = {path.name for path in paths if path.parent == folder}
        manifest = read_manifest(folder, WHERE) if is_prepared(folder) else None
        shards = {shard.file for part in (manifest.train, manifest.val) for shard in part.shards} if manifest else set()
        names |= {encoding_of(folder, manifest, WHERE) if manifest and name in shards else "" for name in here}
    rule, got = "token files must be of one encoding", {"encodings": ", ".join(sorted(names))}
    require(len(names) < 2, WHERE, rule, got, "Name files of one folder.")
    return names.pop() if names else ""
