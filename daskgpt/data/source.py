"""Contents of a path, recognized once, before anything else is read.

Training, evaluation and preparation ask here what a file, folder, glob or pipe is, so they agree. Some kilobytes of
each file are read. Of a folder or glob, files of one kind are taken and the others are named with a reason; a single
file that cannot be used is refused with the name of its format and what helps.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require, require_package
from daskgpt.config.files import matching_files, printable, readable
from daskgpt.data import reading
from daskgpt.data.reading import ARRAY, DOCUMENT, FIELD, LINES, PARQUET, TABLES, WHERE, File
from daskgpt.data.token_folder import encoding_of, is_prepared, read_manifest
from daskgpt.formats import llmc
from daskgpt.formats.stored_model import PICKLE_ENDINGS

STANDARD_LIBRARY = "stdlib"
# Kinds of sources. Of the files in a folder, the first kind is taken.
KINDS = TEXT, PAIRS, TOKENS, QUESTIONS = "text", "pairs", "token ids", "questions"
PREPARED = "prepared tokens"
TRAINING = (TEXT, PAIRS, TOKENS, PREPARED)

LOOKED_AT = 2**14  # first bytes of a file; more only if its first record is longer
LONGEST_RECORD = 2**26
# Names of a prompt and its response in records. The second name of a prompt may be missing or empty.
PAIR_FIELDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "response"),
    (("prompt",), "completion"),
    (("instruction", "input"), "output"),
    (("instruction", "input"), "response"),
    (("question",), "answer"),
    (("input",), "output"),
)
QUESTION_FIELDS = {"ctx", "endings"}
# Names of the messages of a chat, with those of role and content in each.
CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}


@dataclass(frozen=True)
class Source:
    """Contents of a path.

    name      the path as it was given
    kind      one of KINDS or PREPARED
    files     those that are taken, in order; of prepared tokens none
    left_out  names and reasons of the others
    encoding  of token ids, where the manifest beside them names it
    """

    name: str
    kind: str
    files: tuple[File, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    encoding: str = ""

    @property
    def described(self) -> str:
        """The line for people: what was taken and what was left out."""
        count = len(self.files) + len(self.left_out)
        notes = sorted({note for file in self.files for note in _notes(file)})
        text = f"{count:,} file{'s' * (count != 1)}" + (f" of {', '.join(notes)}" if notes else "")
        if self.left_out:
            shown = "; ".join(f"{name} {reason}" for name, reason in self.left_out[:3])
            more = f"; and {len(self.left_out) - 3:,} more" if len(self.left_out) > 3 else ""
            text += f", {len(self.left_out):,} left out: {printable(shown)}{more}"
        return text


def _notes(file: File) -> list[str]:
    """Return what is uncommon about a file."""
    wide = f"{np.dtype(file.dtype).itemsize}-byte ids" if file.dtype not in ("", "<u2") else ""
    form = {DOCUMENT: "", LINES: "JSON lines", ARRAY: "JSON", PARQUET: PARQUET}.get(file.form, "CSV")
    return [note for note in (file.packing, form, wide) if note]


def recognize(source: str, accepted: Collection[str] = TRAINING, field: str = FIELD, where: str = WHERE) -> Source:
    """Return what a path, a glob or a pipe holds.

    accepted   kinds that the caller can use
    field      name of the text in records

    Cost       some kilobytes of each file are read; a pipe is copied to a temporary file
    Errors     FileNotFoundError if nothing is there; ValueError naming the format of what cannot be used, with what
               helps; RuntimeError for a format whose library is not installed; OSError if a file cannot be read
    """
    rule = "a source must be named"
    require(bool(source.strip()), where, rule, {"source": repr(source)}, f"Give a path, or {STANDARD_LIBRARY}.")
    if source == STANDARD_LIBRARY:
        return Source(source, TEXT, standard_library(Path(sysconfig.get_path("stdlib"))))
    path, rule = Path(source).expanduser(), f"the source must hold {_names(accepted)}"
    left_out: list[tuple[str, str]] = []
    if path.is_dir():
        kind, advice = _folder_kind(path)
        if kind == PREPARED and PREPARED in accepted:
            return Source(source, PREPARED)
        require(not kind, where, rule, {"source": f"{source} ({kind})"}, advice)
        paths, others = files_below(path)
        left_out = [(folder.relative_to(path).as_posix(), f"is {_folder_kind(folder)[0]}") for folder in others]
        named = [(file, file.relative_to(path).as_posix()) for file in paths]
        # Of token files, those for validation may be among them.
        taken = [kind for kind in KINDS if kind in accepted and kind != TOKENS]
    else:
        paths = [path] if reading.is_pipe(path) else matching_files(source, where)
        named = [(reading.copy_of_pipe(file) if reading.is_pipe(file) else file, file.name) for file in paths]
        taken = [kind for kind in KINDS if kind in accepted]
    files = [look(file, name, taken, field, where) for file, name in named]
    kind = next((kind for kind in taken if any(file.kind == kind for file in files)), "")
    if kind:
        left_out += [(file.name, file.reason or f"holds {file.kind}") for file in files if file.kind != kind]
        files = [file for file in files if file.kind == kind]
        return Source(source, kind, tuple(files), tuple(left_out), _encoding_beside(files) if kind == TOKENS else "")
    if file := next((file for file in files if file.size), None):
        place = source if path.is_file() or reading.is_pipe(path) else f"{source}: {file.name}"
        advice = file.advice or _USES.get(file.kind, _EXPORT)
        raise refusal(ValueError, where, rule, f"source={place} ({file.reason or f'holds {file.kind}'})", advice)
    kind, advice = _folder_kind(others[0]) if path.is_dir() and others else ("", "Give a source that holds text.")
    advice = f"Name it: {others[0]}." if kind and kind in accepted else advice
    what = f"{left_out[0][0]} is {kind}" if kind else "empty"
    raise refusal(ValueError, where, rule, f"source={source} ({what})", advice)


def _names(kinds: Collection[str]) -> str:
    *others, last = [kind for kind in (*KINDS, PREPARED) if kind in kinds]
    return f"{', '.join(others)} or {last}" if others else last


def _encoding_beside(files: Collection[File]) -> str:
    """Return the encoding of token files by the manifests of their folders, which must agree; "" without one."""
    folders = {Path(file.path).resolve().parent for file in files}  # a link may point to a shard
    names = {
        encoding_of(folder, read_manifest(folder, WHERE), WHERE) if is_prepared(folder) else "" for folder in folders
    }
    rule, got = "token files must be of one encoding", {"encodings": ", ".join(sorted(names))}
    require(len(names) == 1, WHERE, rule, got, "Name files of one folder.")
    return names.pop()


# Files

# What takes a kind that the caller does not.
_USES = {
    PAIRS: "Train on pairs directly: daskgpt train --preset finetune --init MODEL --data FILE.",
    QUESTIONS: "Questions are for daskgpt evaluate.",
    TOKENS: "Name token files by a glob, as in --data 'FOLDER/train*.bin' --validation-data 'FOLDER/val*.bin'.",
}
_MAKE_AGAIN = "Make it again."
_GIVE_TEXT = "Give the text that it was made from."
_MODEL = "Train on text; a model belongs to --init."
_EXPORT = "Export it as plain text."
_RECODE = "Convert it, as by iconv -f latin1 -t UTF-8 (or -f UTF-16); token files end in .bin."
_PACKINGS = {b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
# What helps with files of other formats, by their endings; they are no text.
_ADVICE = {
    (".docx", ".epub", ".odt", ".doc", ".rtf"): _EXPORT,
    (".pdf",): "Extract its text, for example with pdftotext.",
    (".zip", ".tar", ".tgz", ".7z", ".rar"): "Unpack it, and name the folder.",
    (".npy", ".npz"): "Write its ids alone: array.astype('<u2').tofile('ids.bin').",
    (".arrow", ".db", ".sqlite", ".h5"): "Write its texts as a text file, JSON lines or Parquet.",
    (".safetensors", ".gguf"): _MODEL,
}
_RECORD_ENDINGS = {".jsonl", ".ndjson"}


def look(path: Path, name: str, accepted: Collection[str], field: str, where: str) -> File:
    """Return what a file is, by its first bytes and its surroundings.

    Errors    as of `recognize`
    """
    with readable(path, where):
        status, start = path.stat(), _beginning(str(path), "")
    file = File(str(path), name, size=status.st_size, modified=status.st_mtime_ns)
    packing = next((packing for magic, packing in _PACKINGS.items() if start.startswith(magic)), "")
    if packing:
        if packing == "zstd":
            require_package("pyarrow", "prepare", where)
        try:
            start = _beginning(file.path, packing)
        except reading.DAMAGED as error:
            return replace(file, reason=f"is damaged {packing} ({error})", advice=f"Decompress it. {_MAKE_AGAIN}")
        file = replace(file, packing=packing)
    endings = Path(name.lower()).suffixes[-2 if packing else -1 :]
    reason, advice = _other_format(file, start)
    if reason:
        return replace(file, reason=reason, advice=advice)
    if dtype := "" if packing else _dtype_of_ids(file, start):
        return replace(file, kind=TOKENS, dtype=dtype)
    if start.startswith(b"PAR1") and not packing:
        require_package("pyarrow", "prepare", where)
        try:
            with reading.opened_parquet(file, where) as parquet:
                file = replace(file, form=PARQUET, fields=tuple(parquet.schema_arrow.names))
        except (ValueError, OSError) as error:
            return replace(file, reason=f"is not complete Parquet ({error})", advice=_MAKE_AGAIN)
        return _of_records(file, accepted, field, records=True)
    text, wrong = _decoded(start)
    if wrong >= 0:
        return replace(file, reason=f"is not UTF-8 text (byte {wrong:,})", advice=_advice(*endings))
    file = replace(file, mark=len(codecs.BOM_UTF8) * text.startswith("\ufeff"))
    named_records = not _RECORD_ENDINGS.isdisjoint(endings)
    form, fields = _first_record(file, start) if text.strip() else (DOCUMENT, ())
    if fields:
        # Any JSON is text, too: as records count lines of files that are named so, and records of known fields.
        file = replace(file, form=form, fields=fields)
        return _of_records(file, accepted, field, records=form == LINES and named_records)
    # The reader of lines names the first wrong one.
    return replace(file, kind=TEXT, form=LINES if named_records and text.strip() else DOCUMENT)


def _beginning(path: str, packing: str, size: int = LOOKED_AT) -> bytes:
    with reading.OPENERS[packing](path, "rb") as file:
        return bytes(file.read(size))


def _decoded(start: bytes) -> tuple[str, int]:
    """Return the text of the first bytes of a file, which may end within a character, and the place of the first byte
    that is none of a text; -1 without one.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < LOOKED_AT)
        return text, start.find(0) if start.count(0) > len(start) / 100 else -1
    except UnicodeDecodeError as error:
        return "", error.start


def _of_records(file: File, accepted: Collection[str], field: str, *, records: bool) -> File:
    """Return a file of records with its kind, by the fields of the first one.

    records   whether a file with other fields holds records all the same, and not just text
    """
    names = set(file.fields)
    if PAIRS in accepted and (pair_fields(file.fields) or (names & CHATS.keys() and file.form not in TABLES)):
        return replace(file, kind=PAIRS)
    if names >= QUESTION_FIELDS and QUESTIONS in accepted:
        return replace(file, kind=QUESTIONS)
    if field in names and file.form not in TABLES:
        return replace(file, kind=TEXT)
    if chats := ", ".join(names & CHATS.keys()):
        return replace(file, reason=f"holds chats ({chats})", advice=_EXPORT)
    if pair_fields(file.fields) or names >= QUESTION_FIELDS:
        return replace(file, kind=PAIRS if pair_fields(file.fields) else QUESTIONS)
    if records:
        reason = f"holds records without the field {field}; fields={', '.join(file.fields)[:80]}"
        return replace(file, reason=reason, advice="daskgpt prepare takes another name by --field.")
    return replace(file, kind=TEXT, form=DOCUMENT, fields=())


def pair_fields(names: Collection[str]) -> tuple[tuple[str, ...], str] | None:
    """Return the names of prompt and response among the names of a record, None without them; case does not count."""
    written = {name.strip().lower(): name for name in names}
    for asking, answering in PAIR_FIELDS:
        if {asking[0], answering} <= written.keys():
            return tuple(written.get(name, name) for name in asking), written[answering]
    return None


def _first_record(file: File, start: bytes) -> tuple[str, tuple[str, ...]]:
    """Return the form of a text's records, and the names in the first one; none for other text."""
    text = start[file.mark :].decode(errors="ignore").lstrip()
    form = {"{": LINES, "[": ARRAY}.get(text[:1])
    if form is None:
        return _first_row(text)
    text = text[form == ARRAY :].lstrip()
    try:
        record, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        return DOCUMENT, ()
    except json.JSONDecodeError as error:
        # A record that is cut ends within a string, or at most a number, a word or two escapes before the cut.
        if not (error.msg.startswith("Unterminated") or error.pos > len(text) - 16):
            return DOCUMENT, ()
        longer = _beginning(file.path, file.packing, min(8 * len(start), LONGEST_RECORD))
        return _first_record(file, longer) if len(start) < len(longer) else (DOCUMENT, ())
    # One object over several lines is text.
    several = form == LINES and "\n" in text[:end]
    return (DOCUMENT, ()) if several or not isinstance(record, dict) else (form, tuple(record))


def _first_row(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the names in the first line of a table of pairs; none for other text."""
    line = text.partition("\n")[0].strip()
    for separator in TABLES if len(line) < 1000 else ():
        names = tuple(name.strip() for name in next(csv.reader([line], delimiter=separator), []))
        if pair_fields(names):
            return separator, names
    return DOCUMENT, ()


def _dtype_of_ids(file: File, start: bytes) -> str:
    """Return the dtype of the ids in a token file; "" for other files.

    Ids without a header are wider than two bytes if each id's second half is 0.
    """
    magic = int.from_bytes(start[:4], "little")
    if magic in llmc.TOKEN_DTYPES:
        return llmc.TOKEN_DTYPES[magic]
    text, _ = _decoded(start)
    # Ids of two bytes hardly ever look like text.
    if not file.name.endswith(".bin") or (text and "".join(text.split()).isprintable()):
        return ""
    words = np.frombuffer(start[: len(start) // 8 * 8], "<u2")
    if words.size >= 32 and words.any():
        if file.size % 8 == 0 and not words[2::4].any() and not words[3::4].any():
            return "<i8"
        if file.size % 4 == 0 and not words[1::2].any():
            return "<u4"
    return "<u2"


def _other_format(file: File, start: bytes) -> tuple[str, str]:
    """Return what a file of another program's format is, and what helps, if it could be taken for text or token ids; ""
    for others.
    """
    path, magic = Path(file.path), int.from_bytes(start[:4], "little")
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS in place of the file", "Run git lfs pull."
    if path.suffix == ".parquet" and not start.startswith(b"PAR1"):
        return "is not Parquet, as it is named", _MAKE_AGAIN
    if start.startswith((b"%PDF", b"{\\rtf")):
        return "is a document, not plain text", _advice(".pdf" if start[:1] == b"%" else ".rtf")
    if magic in llmc.KINDS.keys() - llmc.TOKEN_DTYPES.keys():
        return f"is an llm.c {llmc.KINDS[magic]}", _MODEL
    # After the protocol, a pickle has one of few instructions; ids may begin with these two bytes, too.
    pickled = start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" and start[2:3] in b"\x95}](cXqK\x8a"
    if pickled or path.suffix in PICKLE_ENDINGS or (path.suffix == ".bin" and start.startswith(b"PK\3\4")):
        return "holds pickled Python objects, which are not opened", _GIVE_TEXT
    if path.suffix == ".bin" and magic not in llmc.TOKEN_DTYPES:
        if path.with_suffix(".idx").is_file():
            return "holds token ids of Megatron, whose .idx is beside it", _GIVE_TEXT
        if path.with_name(llmc.META).exists():
            return (
                f"holds ids of the characters in {llmc.META}, pickled Python objects, which are not opened",
                _GIVE_TEXT,
            )
    return "", ""


def _advice(*endings: str) -> str:
    return next((advice for names, advice in _ADVICE.items() if not set(names).isdisjoint(endings)), _RECODE)


# Folders


def _folder_kind(folder: Path) -> tuple[str, str]:
    """Return what a folder is beside a collection of files, and advice; "" if it is just that."""
    if is_prepared(folder):
        return PREPARED, "daskgpt train takes prepared tokens."
    if (folder / "config.toml").is_file() and (folder / "chain.jsonl").is_file():
        return "a run of daskgpt", "Give the text that it was trained on; a run is a model, for --init."
    model = any(folder.glob("*.safetensors")) or (folder / "pytorch_model.bin").is_file()
    if model and any((folder / name).is_file() for name in ("config.json", "state.json")):
        return "a model", _MODEL
    return "", ""


def files_below(folder: Path, skipped: Collection[str] = ()) -> tuple[list[Path], list[Path]]:
    """Return all files in a folder and below it, sorted, and the folders there that are runs, models or prepared
    tokens, which are not entered. Hidden files and folders, and folders of skipped names, are in neither.
    """
    files, others = list[Path](), list[Path]()
    for parent, folders, names in os.walk(folder):
        below = [Path(parent, name) for name in folders if not name.startswith(".") and name not in skipped]
        others += [path for path in below if _folder_kind(path)[0]]
        folders[:] = [path.name for path in below if path not in others]
        files += [path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()]
    # By parts, not by the text of the path, so that the order does not depend on the separator of folders.
    return sorted(files, key=lambda path: path.parts), others


# Whole files up to this size in all. Python 3.11 to 3.13 stay below it; a later, larger library is cut.
STANDARD_LIBRARY_BYTES = 9_000_000
# Copies of other programs, an editor, and tables in the form of modules, from which a model would learn little.
_OTHER_MODULES = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_OTHER_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}


def standard_library(root: Path) -> tuple[File, ...]:
    """Return the files of the library at `root`, up to a total size.

    Only names that Python itself lists count: a distribution may add files.
    """
    files, size = list[File](), 0
    modules = sys.stdlib_module_names - _OTHER_MODULES
    for path in files_below(root, _OTHER_FOLDERS)[0]:
        name = path.relative_to(root)
        if path.suffix == ".py" and name.parts[0].removesuffix(".py") in modules:
            files.append(File(str(path), name.as_posix(), TEXT, size=path.stat().st_size))
            size += files[-1].size
            if size > STANDARD_LIBRARY_BYTES:
                files.pop()
                break
    rule, advice = "the source of the standard library must be installed", "Give a text file instead."
    require(bool(files), WHERE, rule, {"folder": root}, advice, FileNotFoundError)
    return tuple(files)
