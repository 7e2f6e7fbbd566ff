"""Contents of a path, recognized once, before anything else is read.

Training, evaluation and preparation ask here what a file, folder or glob is, so they agree. Some kilobytes of each file
are read. Of a folder or glob, files of one kind are taken and the others are named with a reason; a single file that
cannot be used is refused with what it is and what helps.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from daskgpt.config.errors import number_of, refusal, require
from daskgpt.config.files import expanded, matching_files, printable, readable
from daskgpt.data.text import CHATS, FIELD, LINES, PAIR_FIELDS, PARQUET, WHERE, File, opened, opened_parquet
from daskgpt.formats import token_files
from daskgpt.formats.stored_model import is_pickled
from daskgpt.formats.token_files import encoding_of_folder, is_prepared

STANDARD_LIBRARY = "stdlib"
# Kinds of sources. Of the files in a folder, the first kind is taken.
KINDS = TEXT, PAIRS, TOKENS = "text", "pairs", "token ids"
PREPARED = "prepared tokens"
TRAINING = (*KINDS, PREPARED)

LOOKED_AT = 2**14  # first bytes of a file
LONGEST_RECORD = 2**26  # whose fields are looked at


@dataclass(frozen=True)
class Source:
    """Contents of a path.

    name      the path as it was given
    kind      one of KINDS or PREPARED
    files     those that are taken, in order; of prepared tokens none
    left_out  other files, and folders below the path
    encoding  of prepared tokens, and of token ids where the manifest beside them names it
    """

    name: str
    kind: str
    files: tuple[File, ...] = ()
    left_out: tuple[File, ...] = ()
    encoding: str = ""

    @property
    def described(self) -> str:
        """The line for people: what was taken and what was left out."""
        text = number_of(len(self.files) + len(self.left_out), "file")
        for form in (LINES, PARQUET):
            if number := sum(file.records == form for file in self.files):
                text += f", {number:,} of {form}"
        if self.left_out:
            shown = "; ".join(f"{file.name} {file.described}" for file in self.left_out[:3])
            more = f"; and {len(self.left_out) - 3:,} more" if len(self.left_out) > 3 else ""
            text += f", {len(self.left_out):,} left out: {printable(shown)}{more}"
        return text


def recognize(source: str, accepted: Collection[str] = TRAINING, field: str = FIELD) -> Source:
    """Return what a path or a glob holds.

    accepted   kinds that the caller can use
    field      name of the text in records

    Cost       some kilobytes of each file are read, of JSON lines the first one, of Parquet the description
    Errors     FileNotFoundError if nothing is there; ValueError naming what cannot be used, with what helps, and as of
               `encoding_of_folder` and `opened_parquet`; OSError if a file cannot be read
    """
    rule = "a source must be named"
    require(bool(source.strip()), WHERE, rule, {"source": repr(source)}, f"Give a path, or {STANDARD_LIBRARY}.")
    if source == STANDARD_LIBRARY:
        return Source(source, TEXT, standard_library(Path(sysconfig.get_path("stdlib"))))
    path, rule = expanded(source), f"the source must hold {' or '.join(accepted)}"
    kinds = [kind for kind in KINDS if kind in accepted]
    if path.is_dir():
        kind, advice = _folder_kind(path)
        if kind == PREPARED and PREPARED in accepted:
            return Source(source, PREPARED, encoding=encoding_of_folder(path))
        require(not kind, WHERE, rule, {"source": f"{source} ({kind})"}, advice)
        paths, folders = files_below(path)
        files = [look(file, file.relative_to(path).as_posix(), kinds, field) for file in paths]
        for folder in folders:
            kind, advice = _folder_kind(folder)
            if not kind:
                kind, advice = "a link to a folder, or to nothing", "Name the folder itself."
            files.append(File(str(folder), folder.relative_to(path).as_posix(), reason=f"is {kind}", advice=advice))
        kinds = [kind for kind in kinds if kind != TOKENS]  # those for validation may be among them
    else:
        files = [look(file, file.name, kinds, field) for file in matching_files(source, WHERE)]
    kind = next((kind for kind in kinds if any(file.kind == kind for file in files)), "")
    if kind:
        taken = tuple(file for file in files if file.kind == kind)
        left_out = tuple(file for file in files if file.kind != kind)
        return Source(source, kind, taken, left_out, _encoding_beside(taken) if kind == TOKENS else "")
    if file := next((file for file in files if file.size or file.reason), None):
        place = source if path.is_file() else f"{source}: {file.name}"
        raise refusal(ValueError, WHERE, rule, f"source={place} ({file.described})", file.advice or _USES[file.kind])
    raise refusal(ValueError, WHERE, rule, f"source={source} (empty)", "Give a source that holds text.")


def _encoding_beside(files: Collection[File]) -> str:
    """Return the encoding of token files by the manifests of their folders, which must agree; "" without one."""
    folders = {Path(file.path).resolve().parent for file in files}  # a link may point to a shard
    names = {encoding_of_folder(folder) if is_prepared(folder) else "" for folder in folders}
    rule, got = "token files must be of one encoding", {"encodings": ", ".join(sorted(names))}
    require(len(names) == 1, WHERE, rule, got, "Name files of one folder.")
    return names.pop()


# Files

# What takes a kind that the caller does not.
_USES = {
    PAIRS: "Train on pairs directly: daskgpt train --preset finetune --init MODEL --data FILE.",
    TOKENS: "Name token files by a glob, as in --data 'FOLDER/train*.bin' --validation-data 'FOLDER/val*.bin'.",
}
_GIVE_TEXT = "Give the text that it was made from."
_EXPORT = "Export it as text in UTF-8 (iconv, pdftotext), or unpack it; a model belongs to --init."
_GZIP = b"\x1f\x8b\x08"
_RECORD_ENDINGS = (".jsonl", ".ndjson", ".json")


def look(path: Path, name: str, accepted: Collection[str], field: str) -> File:
    """Return what a file is, by its first bytes, its name and its surroundings.

    Errors    as of `recognize`
    """
    with readable(path, WHERE):
        status = path.stat()
    file = File(str(path), name, field=field, size=status.st_size, modified=status.st_mtime_ns)
    start = _beginning(file)
    if start.startswith(b"PAR1"):
        with opened_parquet(file) as parquet:
            return _of_records(replace(file, records=PARQUET), parquet.schema_arrow.names, accepted)
    if start.startswith(_GZIP):
        file = replace(file, compressed=True)
        start = _beginning(file)
    if start.startswith(b"version https://git-lfs"):
        return replace(file, reason="is a pointer of Git LFS in place of the file", advice="Run git lfs pull.")
    magic = int.from_bytes(start[:4], "little")
    if not file.compressed and (path.suffix == ".bin" or magic in token_files.KINDS):
        reason = "" if magic in token_files.TOKEN_DTYPES else _no_ids(path, start)
        return replace(file, reason=reason, advice=_GIVE_TEXT) if reason else replace(file, kind=TOKENS)
    if (wrong := _wrong_byte(start)) >= 0:
        return replace(file, reason=f"is not UTF-8 text (byte {wrong:,})", advice=_EXPORT)
    ending = Path(name.lower().removesuffix(".gz")).suffix
    if ending not in _RECORD_ENDINGS:
        return replace(file, kind=TEXT)
    fields = _first_fields(file)
    of_records = _of_records(replace(file, records=LINES), fields, accepted)
    if of_records.kind:
        return of_records
    if ending == ".json":  # any other JSON is text, but for a list of records
        advice = "Write each record on a line of its own: jq -c '.[]' LIST.json > LINES.jsonl."
        listed = re.match(rb"\s*\[\s*\{", start)
        return replace(file, reason="is a JSON list of records", advice=advice) if listed else replace(file, kind=TEXT)
    # Without fields, the reader of lines names the first wrong one.
    return of_records if fields else replace(file, kind=TEXT, records=LINES)


def _of_records(file: File, fields: Collection[str], accepted: Collection[str]) -> File:
    """Return a file of records with its kind, by the names of their fields; without one, with the reason."""
    if holds_conversation(fields) and (PAIRS in accepted or file.field not in fields):
        return replace(file, kind=PAIRS, field="")
    if file.field in fields:
        return replace(file, kind=TEXT)
    reason = f"holds records without the field {file.field}; fields={', '.join(fields)[:80]}"
    for_pairs = "Name the fields prompt and response, or messages, or text."
    advice = for_pairs if PAIRS in accepted else "daskgpt prepare takes another name by --field."
    return replace(file, reason=reason, advice=advice)


def _beginning(file: File) -> bytes:
    with opened(file) as stream:
        return stream.read(LOOKED_AT)


def _no_ids(path: Path, start: bytes) -> str:
    """Return what a file is that could be taken for token ids without a header; "" for ids."""
    magic, words = int.from_bytes(start[:4], "little"), np.frombuffer(start[: len(start) // 4 * 4], "<u2")
    if magic in token_files.KINDS:
        return f"is an llm.c {token_files.KINDS[magic]}"
    if is_pickled(start):
        return "holds pickled Python objects, which are not opened"
    if path.with_name(token_files.META).exists():
        return f"holds ids of the characters in {token_files.META}, pickled Python objects, which are not opened"
    wide = words.size >= 32 and words.any() and not words[1::2].any()
    return "holds ids of 4 bytes or more, which need llm.c's header" if wide else ""


def _wrong_byte(start: bytes) -> int:
    """Return the place of the first byte that is none of a text, among the first ones of a file; -1 without one."""
    try:  # they may end within a character
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < LOOKED_AT)
    except UnicodeDecodeError as error:
        return error.start
    return start.find(0) if start.count(0) > len(start) / 100 else -1


def _first_fields(file: File) -> tuple[str, ...]:
    """Return the names in the first line of a file that is not blank, if that is an object in JSON; else none."""
    with opened(file) as stream:
        lines = iter(partial(stream.readline, LONGEST_RECORD), b"")
        line = next((line for line in lines if line.strip()), b"")
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        return tuple(record) if isinstance(record, dict) else ()
    return ()


def holds_conversation(names: Collection[str]) -> bool:
    """Return whether a record with these names is a pair or a chat."""
    pairs = any(asking[0] in names and answering in names for asking, answering in PAIR_FIELDS)
    return pairs or any(name in names for name in CHATS)


# Folders


def _folder_kind(folder: Path) -> tuple[str, str]:
    """Return what a folder is beside a collection of files, and advice; "" if it is just that."""
    with readable(folder, WHERE):
        if is_prepared(folder):
            return PREPARED, f"daskgpt train takes it: --data {folder}."
        model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        if model or (folder / "chain.jsonl").is_file():
            return "a run or a model", "Give the text that it was trained on; a model belongs to --init."
    return "", ""


def files_below(folder: Path, skipped: Collection[str] = ()) -> tuple[list[Path], list[Path]]:
    """Return all files in a folder and below it, sorted, and what is neither read nor entered there: folders that are
    runs, models or prepared tokens, links to folders, and links to nothing. Hidden files and folders, and folders of
    skipped names, are in neither.

    Errors   OSError for a folder that cannot be read
    """

    def refuse(error: OSError) -> None:
        with readable(error.filename, WHERE):
            raise error

    files, others = list[Path](), list[Path]()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        below = [Path(parent, name) for name in folders if not name.startswith(".") and name not in skipped]
        inside = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [path for path in inside if path.is_file()]
        no_files = (path for path in below + inside if not path.is_file())
        others += (left_out := [path for path in no_files if path.is_symlink() or _folder_kind(path)[0]])
        folders[:] = [path.name for path in below if path not in left_out]
    # By parts, not by the text of the path, so that the order does not depend on the separator of folders.
    return sorted(files, key=lambda path: path.parts), sorted(others)


# Copies of other programs, an editor, and tables in the form of modules, from which a model would learn little.
OTHER_MODULES = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_OTHER_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}


def standard_library(root: Path) -> tuple[File, ...]:
    """Return the files of the library at `root`.

    Only names that Python itself lists count: a distribution may add files.
    """
    files = list[File]()
    modules = sys.stdlib_module_names - OTHER_MODULES
    for path in files_below(root, _OTHER_FOLDERS)[0]:
        name = path.relative_to(root)
        if path.suffix == ".py" and name.parts[0].removesuffix(".py") in modules:
            status = path.stat()
            files.append(File(str(path), name.as_posix(), TEXT, size=status.st_size, modified=status.st_mtime_ns))
    rule, advice = "the source of the standard library must be installed", "Give a text file instead."
    require(bool(files), WHERE, rule, {"folder": root}, advice, FileNotFoundError)
    return tuple(files)
