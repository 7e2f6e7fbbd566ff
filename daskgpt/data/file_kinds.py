"""Kinds of files, recognized by their first bytes and their surroundings."""

from __future__ import annotations

import codecs
import csv
import json
import unicodedata
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require_package
from daskgpt.config.files import readable
from daskgpt.data.reading import ARRAY, DOCUMENT, LINES, PARQUET, TABLES, File, packing_errors, unpacked
from daskgpt.formats import llmc
from daskgpt.formats.stored_model import PICKLE_ENDINGS

TOKEN_ENDING = ".bin"

# Kinds of files. Of those in a folder, the first kind is taken.
KINDS = TEXT, PAIRS, TOKENS, QUESTIONS = "text", "pairs", "token ids", "questions"
_RECORD_ENDINGS = {".jsonl", ".ndjson"}

LOOKED_AT = 2**14  # first bytes of a file; more only if its first record is longer
LONGEST_RECORD = 2**26
FIELD = "text"  # of records, by default
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
CHAT_FIELDS = ("messages", "conversations")

PREPARE = "daskgpt prepare takes another name by --field."
_UNPACK = "Unpack it, and name the folder."
EXPORT = "Export it as plain text."
_CONVERT = "Write its texts as a text file, JSON lines or Parquet."
MODEL = "Train on text; a model belongs to --init."
_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_PACKINGS = ((b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"))
# Formats that hold no text for us, by their first bytes, with what helps.
_OTHERS = (
    (b"%PDF", "a PDF document", "Extract its text, for example with pdftotext."),
    (b"{\\rtf", "an RTF document", EXPORT),
    (b"\xd0\xcf\x11\xe0", "a document of an older Microsoft Office", EXPORT),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"Rar!", "a RAR archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "Decompress it."),
    (b"\x89PNG", "a PNG image", "Give text."),
    (b"\xff\xd8\xff", "a JPEG image", "Give text."),
    (b"GIF8", "a GIF image", "Give text."),
    (b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (b"\x89HDF", "an HDF5 file", _CONVERT),
    (b"\x93NUMPY", "a NumPy array", "Write its ids alone: array.astype('<u2').tofile('ids.bin')."),
    (b"ARROW1", "an Arrow file", _CONVERT),
    (b"\xff\xff\xff\xff", "an Arrow stream", _CONVERT),
    (b"Obj\x01", "an Avro file", _CONVERT),
    (b"ORC", "an ORC file", _CONVERT),
    (b"version https://git-lfs", "a pointer of Git LFS in place of the file", "Run git lfs pull."),
    (b"GGUF", "a GGUF model", MODEL),
    (b"\x7fELF", "a program", "Give text."),
    (b"MMIDIDX\0\0", "the index of Megatron's token ids", "Give the text that the ids were made from."),
)
_ZIPS = {".docx": "a Word document", ".xlsx": "an Excel table", ".pptx": "a PowerPoint presentation"}
_ZIPS |= {".odt": "an OpenDocument text", ".epub": "an EPUB book", ".npz": "an archive of NumPy arrays"}


def look(path: Path, name: str, accepted: Collection[str], field: str, where: str, lenient: bool) -> File:
    """Return what a file is, by its first bytes and its surroundings.

    lenient   whether text may have bytes that are not UTF-8

    Errors    as of `recognize`
    """
    with readable(path, where):
        known, start = path.stat(), _beginning(path, "")
    file = File(str(path), name, size=known.st_size, modified=known.st_mtime_ns)
    packing = next((packing for magic, packing in _PACKINGS if start.startswith(magic)), "")
    if packing == "zstd":
        require_package("zstandard", "prepare", where)
    if not packing:
        return _looked(file, start, accepted, field, where, lenient)
    file = replace(file, packing=packing)
    try:
        start = _beginning(path, packing)
    except packing_errors() as error:
        return replace(file, reason=f"is damaged {packing} ({error})", advice="Make it again.")
    if start[257:262] == b"ustar":
        return replace(file, reason="is a tar archive", advice=_UNPACK)
    found = _looked(file, start, accepted, field, where, lenient)
    if (found.kind in (TOKENS, QUESTIONS) and found.form == DOCUMENT) or found.form == PARQUET:
        return replace(found, kind="", reason=f"holds {found.kind} in {packing}", advice="Decompress it.")
    return found


def _looked(file: File, start: bytes, accepted: Collection[str], field: str, where: str, lenient: bool) -> File:
    """Return what a file with this beginning, already unpacked, is."""
    for found in (_ids(file, start), _other(file, start)):
        if found is not None:
            return found
    if start.startswith(b"PAR1"):
        require_package("pyarrow", "prepare", where)
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(file.path) as parquet:
                names = tuple(parquet.schema_arrow.names)
        except (ValueError, OSError) as error:
            text = str(error).splitlines()[0][:100]
            return replace(file, reason=f"is not complete Parquet ({text})", advice="Make it again.")
        return _recorded(replace(file, form=PARQUET, fields=names), accepted, field, records=True)
    if _ending(file) == ".parquet":
        return replace(file, reason="is not Parquet, as it is named", advice="Make it again.")
    charset = charset_of(start, whole=len(start) < LOOKED_AT)
    if not charset and (lenient and 0 not in start):
        charset = "utf-8"
    if not charset:
        advice = "Convert it, as by iconv -f latin1 -t UTF-8, or see prepare --undecodable; token files end in .bin."
        return replace(file, reason=f"is not UTF-8 text (byte {_first_wrong(start):,})", advice=advice)
    file = replace(file, charset=charset)
    if not start.strip():
        return replace(file, kind=TEXT)
    form, fields = _first_record(file, start)
    if fields:
        # Any JSON is text, too: as records count lines of files that are named so, and records of known fields.
        records = form == LINES and _ending(file) in _RECORD_ENDINGS
        return _recorded(replace(file, form=form, fields=fields), accepted, field, records=records)
    if _ending(file) in _RECORD_ENDINGS:
        return replace(file, kind=TEXT, form=LINES)  # its reader names the first wrong line
    return replace(file, kind=TEXT)


def _ending(file: File) -> str:
    suffixes = [suffix.lower() for suffix in Path(file.name).suffixes]
    return suffixes[-2] if file.packing and len(suffixes) > 1 else (suffixes or [""])[-1]


def _recorded(file: File, accepted: Collection[str], field: str, *, records: bool) -> File:
    """Return a file of records with its kind, by the fields of the first one.

    records   whether a file with other fields holds records all the same, and not just text
    """
    names = set(file.fields)
    pairs, chat = pair_fields(file.fields), next((name for name in CHAT_FIELDS if name in names), "")
    if pairs and PAIRS in accepted:
        return replace(file, kind=PAIRS)
    if names >= QUESTION_FIELDS and QUESTIONS in accepted:
        return replace(file, kind=QUESTIONS)
    if field in names and file.form in (LINES, PARQUET, ARRAY):
        return replace(file, kind=TEXT)
    if chat:
        advice = (
            'Write each exchange as a line {"prompt": ..., "response": ...}, in the form that the model is to learn.'
        )
        return replace(file, reason=f"holds chats ({chat}), which have no form without a template", advice=advice)
    if pairs or names >= QUESTION_FIELDS:
        return replace(file, kind=PAIRS if pairs else QUESTIONS)
    if records:
        listed = ", ".join(file.fields)[:80]
        return replace(file, reason=f"holds records without the field {field}; fields={listed}", advice=PREPARE)
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
    text = start.decode(file.charset, "ignore").lstrip()
    form = {"{": LINES, "[": ARRAY}.get(text[:1])
    if form is None:
        return _first_row(text)
    text = text[form == ARRAY :].lstrip()
    try:
        record, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        return DOCUMENT, ()
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - 1
        size = 8 * len(start)
        if not cut or len(start) < LOOKED_AT or size > LONGEST_RECORD:
            return DOCUMENT, ()
        longer = _beginning(Path(file.path), file.packing, size)
        return _first_record(file, longer) if len(longer) > len(start) else (DOCUMENT, ())
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


def _beginning(path: Path, packing: str, size: int = LOOKED_AT) -> bytes:
    with unpacked(str(path), packing) as file:
        return file.read(size)


def _ids(file: File, start: bytes) -> File | None:
    """Return a file of token ids or of questions by ids, with their dtype; None if there is no sign of one."""
    number, path = int.from_bytes(start[:4], "little"), Path(file.path)
    if number in llmc.KINDS and len(start) >= 4:
        if number == llmc.QUESTIONS:
            return replace(file, kind=QUESTIONS)
        if number in llmc.TOKEN_DTYPES:
            return replace(file, kind=TOKENS, dtype=llmc.TOKEN_DTYPES[number])
        return replace(file, reason=f"is an llm.c {llmc.KINDS[number]}", advice=MODEL)
    if Path(file.name).suffix != TOKEN_ENDING or _is_prose(start) or _other(file, start):
        return None
    advice = "Give the text that the ids were made from."
    if path.with_suffix(".idx").is_file():
        return replace(file, reason="holds token ids of Megatron, whose .idx is beside it", advice=advice)
    if path.with_name(llmc.META).exists():
        reason = f"holds ids of the characters in {llmc.META}, pickled Python objects, which are not opened"
        return replace(file, reason=reason, advice=advice)
    return replace(file, kind=TOKENS, dtype=dtype_of(start, file.size))


def _is_prose(start: bytes) -> bool:
    """Return whether a file that is named like token ids holds text: ids of two bytes hardly ever look so."""
    text = _decoded(start, "utf-8", len(start) < LOOKED_AT)
    return bool(text) and all(map(_is_written, text or ""))


def dtype_of(start: bytes, size: int) -> str:
    """Return the dtype of ids without a header: wider than two bytes if each id's second half is 0."""
    words = np.frombuffer(start[: len(start) // 8 * 8], "<u2")
    if words.size >= 32 and words.any():
        if size % 8 == 0 and not words[2::4].any() and not words[3::4].any():
            return "<i8"
        if size % 4 == 0 and not words[1::2].any():
            return "<u4"
    return "<u2"


def _other(file: File, start: bytes) -> File | None:
    """Return a file of another program's format, None if there is no sign of one."""
    for magic, what, advice in _OTHERS:
        if start.startswith(magic):
            return replace(file, reason=f"is {what}", advice=advice)
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        what = _ZIPS.get(Path(file.name).suffix.lower(), "")
        pickled = Path(file.name).suffix.lower() in (*PICKLE_ENDINGS, ".bin")
        what = what or ("pickled Python objects, which are not opened" if pickled else "a zip archive")
        return replace(file, reason=f"is {what}", advice=_UNPACK if what == "a zip archive" else EXPORT)
    # After the protocol, a pickle has one of few instructions; ids may begin with these two bytes, too.
    pickled = start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" and start[2:3] in b"\x95}](cXqK\x8a"
    if pickled or Path(file.name).suffix in PICKLE_ENDINGS:
        advice = "Give the text that it was made from."
        return replace(file, reason="holds pickled Python objects, which are not opened", advice=advice)
    if start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") < file.size:
        return replace(file, reason="is a safetensors model", advice=MODEL)
    return None


# Characters


def charset_of(start: bytes, *, whole: bool) -> str:
    """Return the encoding of the characters of a text, by its mark or by its bytes; "" if it is none that is known.

    start   first bytes
    whole   whether they are all
    """
    for mark, name in _MARKS:
        if start.startswith(mark):
            return name if _decoded(start, name, whole) is not None else ""
    zeros = np.flatnonzero(np.frombuffer(start, np.uint8) == 0)
    if zeros.size:
        ends = ("be", "le")[int(np.count_nonzero(zeros % 2) > zeros.size / 2)]
        for name in ("utf-32-le", "utf-32-be", f"utf-16-{ends}"):
            text = _decoded(start, name, whole)
            if text and all(_is_written(character) for character in text):
                return name
    few = zeros.size <= len(start) / 100
    return "utf-8" if few and _decoded(start, "utf-8", whole) is not None else ""


def _first_wrong(start: bytes) -> int:
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start
    return start.find(0)


def _decoded(start: bytes, charset: str, whole: bool) -> str | None:
    try:
        return codecs.getincrementaldecoder(charset)().decode(start, final=whole)
    except UnicodeDecodeError:
        return None


def _is_written(character: str) -> bool:
    """Return whether a character occurs in texts: assigned, and no control character but tab and line ends."""
    return character in "\t\n\r\f" or unicodedata.category(character) not in ("Cc", "Cn", "Co", "Cs")
