"""Token files: llm.c's, a header of 256 int32 (magic, version, count) and uint16 ids; nanoGPT's, the ids alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import matching_files, replacing
from daskgpt.formats.llmc import KINDS
from daskgpt.formats.pickles import refuse_pickle

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
LARGEST_ID = 2**16 - 1
LARGEST_COUNT = 2**31 - 1
META = "meta.pkl"  # nanoGPT's, beside ids of characters: which id is which
PICKLED = "Give the text that the ids were made from."


def write_tokens(path: str | os.PathLike[str], tokens: np.ndarray) -> None:
    """Write token ids as one file, which appears under its name when it is complete.

    Shapes   tokens (N,)
    Dtype    any integer; written as uint16
    Errors   TypeError for numbers that are not integers; ValueError for other shapes, no tokens, or ids that do not
             fit; FileNotFoundError where the folder is missing
    """
    tokens = np.asarray(tokens)
    _check_writable(tokens)
    with replacing(path, "write_tokens") as file:
        file.write(token_header(tokens.size))
        file.write(np.ascontiguousarray(tokens, "<u2").data)


def token_header(count: int) -> bytes:
    """What stands before so many tokens in a file."""
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, count
    return header.tobytes()


def _check_writable(tokens: np.ndarray) -> None:
    where, count = "write_tokens", tokens.size
    require(tokens.ndim == 1, where, "tokens must be one row", {"shape": tokens.shape}, "Use tokens.reshape(-1).")
    require(count > 0, where, "there must be at least one token", {"count": count}, "Give a text that is not empty.")
    require(count <= LARGEST_COUNT, where, "the count must fit int32", {"count": count}, "Write several files.")
    if tokens.dtype.kind not in "iu":
        raise refusal(
            TypeError, "write_tokens", "tokens must be integers", {"dtype": tokens.dtype}, "Convert them first."
        )
    advice = "A file holds 2 bytes a token."
    require(tokens.min() >= 0, where, "ids must not be negative", {"id": tokens.min()}, advice)
    require(tokens.max() <= LARGEST_ID, where, "ids must fit uint16", {"id": tokens.max()}, advice)


def read_tokens(source: str | os.PathLike[str]) -> np.ndarray:
    """The tokens of one file, or of all files that a glob matches, one after the other in sorted order.

    A file without llm.c's header is taken for one of nanoGPT's: uint16 ids and nothing else.

    Shapes   (N,)
    Dtype    uint16, read-only
    Cost     one file is mapped, not read; several are copied into memory
    Errors   FileNotFoundError where nothing is there; ValueError for a file that is not a whole token file
    """
    paths = matching_files(os.fspath(source), "read_tokens")
    if len(paths) == 1:
        return _map(paths[0])
    tokens = np.concatenate([_map(path) for path in paths])
    tokens.setflags(write=False)
    return tokens


def _map(path: Path) -> np.ndarray:
    refuse_pickle(path, "read_tokens", PICKLED)
    header = np.fromfile(path, "<i4", count=256)
    return _ids_behind_header(path, header) if _begins_with_header(path, header) else _ids_alone(path)


def _begins_with_header(path: Path, header: np.ndarray) -> bool:
    """Whether a file is one of llm.c's, good or damaged: by its first number, or by all the zeros behind the eighth.

    Ids alone would begin so only with some 480 times the id 0.
    """
    known = header.size > 0 and int(header[0]) in KINDS
    return known or (header.size == 256 and int(np.count_nonzero(header[8:])) <= 8)


def _ids_behind_header(path: Path, header: np.ndarray) -> np.ndarray:
    size = path.stat().st_size
    magic, version, count = (int(number) for number in header[:3]) if header.size == 256 else (int(header[0]), 0, 0)
    rule = f"an llm.c token file must begin with {MAGIC}"
    _require(magic == MAGIC, path, rule, {"magic": magic}, KINDS.get(magic, "It is damaged: write it again."))
    rule = f"the file must begin with a header of {HEADER_BYTES} bytes"
    _require(header.size == 256, path, rule, {"bytes": size}, "The file is truncated: write it again.")
    rule = f"the version must be {VERSION} (uint16 ids)"
    _require(version == VERSION, path, rule, {"version": version}, "Write it again.")
    _require(count > 0, path, "the file must hold tokens", {"count": count}, "Write it again.")
    expected = HEADER_BYTES + 2 * count
    rule = f"{count} tokens must make {expected} bytes"
    _require(size >= expected, path, rule, {"bytes": size}, "The file is truncated: write it again.")
    _require(size == expected, path, rule, {"bytes": size}, "Something follows the last token: write it again.")
    # A plain array over the mapping: arithmetic on it then gives plain arrays.
    return np.asarray(np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(count,)))


def _ids_alone(path: Path) -> np.ndarray:
    """nanoGPT's `train.bin`: nothing in it says what it is, so that what else it could be is asked first."""
    size, meta = path.stat().st_size, path.with_name(META)
    with open(path, "rb") as file:
        start = file.read(9)
    tensors = start[8:] == b"{" and int.from_bytes(start[:8], "little") < size
    rule = "the file must hold token ids"
    _require(not tensors, path, rule, {"kind": "safetensors"}, "It is a model: give token files, or a text.")
    _require(size > 0, path, rule, {"bytes": size}, "Write it again.")
    rule = "ids without a header must be 2 bytes each, as nanoGPT writes them"
    _require(size % 2 == 0, path, rule, {"bytes": size}, "The file is truncated, or none of token ids.")
    rule = f"ids must be of an encoding that is known here, not of a {META}"
    advice = "It holds pickled Python objects, which are not opened: give the text that the ids were made from."
    _require(not meta.exists(), path, rule, {"beside": meta.name}, advice)
    return np.asarray(np.memmap(path, "<u2", mode="r"))


def _require(holds: bool, path: Path, rule: str, got: dict[str, object], advice: str) -> None:
    require(holds, "read_tokens", rule, {"path": path, **got}, advice)
