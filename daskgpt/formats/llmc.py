"""Token files: llm.c's, a header of 256 int32 and then ids, little-endian; and nanoGPT's, ids without a header."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.formats.stored_model import mapped, require_file

HEADER_BYTES = 256 * 4
TOKENS, WIDE_TOKENS = 20240520, 20240801
KINDS = {  # kinds of llm.c's files, by the first number
    20240326: "model",
    20240327: "debug state",
    20240328: "tokenizer",
    TOKENS: "token file",
    WIDE_TOKENS: "token file of 4-byte ids",
    20240522: "evaluation set",
    20240527: "train state; give the model file beside it",
}
# Dtypes of the ids in a token file, and its version; the wider ones are Llama 3's.
TOKEN_DTYPES, TOKEN_VERSIONS = {TOKENS: "<u2", WIDE_TOKENS: "<u4"}, {TOKENS: 1, WIDE_TOKENS: 7}
LARGEST_COUNT = 2**31 - 1  # tokens of a file
META = "meta.pkl"  # nanoGPT's file of the characters behind the ids


def id_dtype(ids: int) -> np.dtype:
    """Return the dtype of tokens, uint16 or uint32, for a number of ids."""
    return np.dtype(np.uint16 if ids <= 2**16 else np.uint32)


def token_header(dtype: np.dtype, count: int) -> bytes:
    """Return the header of a file of `count` tokens."""
    kind = TOKENS if dtype.itemsize == 2 else WIDE_TOKENS
    return np.array([kind, TOKEN_VERSIONS[kind], count, *[0] * 253], "<i4").tobytes()


def read_tokens(path: str | Path) -> np.ndarray:
    """Return the tokens of a file: llm.c's, or ids of two bytes without a header, as nanoGPT writes them.

    Shapes   (N,)
    Dtype    that of the file, read-only
    Cost     the file is mapped, not read
    Errors   FileNotFoundError if there is no file; ValueError for a file that is not a complete token file: another
             kind or version of llm.c's files, truncated, or with bytes after the last token
    """
    path, where = Path(path), "read_tokens"
    require_file(path, where)
    size = path.stat().st_size
    got = {"path": path, "bytes": size}
    header = np.fromfile(path, "<i4", count=256)
    kind, version, count = [*header[:3].tolist(), 0, 0, 0][:3]
    # A header, good or damaged, is recognized by its first number, or by zeros after the eighth: ids alone would need
    # some 480 ids of 0 at the beginning.
    zeros = header.size == 256 and np.count_nonzero(header[8:]) <= 8
    if not zeros and kind not in KINDS:
        rule, advice = "ids without a header must be 2 bytes each", "It is truncated, or holds no token ids."
        require(size > 0 and size % 2 == 0, where, rule, got, advice)
        return mapped(path, "<u2")
    rule, advice = f"the file must begin with a header of {HEADER_BYTES} bytes", "It is truncated."
    require(header.size == 256, where, rule, got, advice)
    advice = f"It is an llm.c {KINDS[kind]}." if kind in KINDS else "It is not an llm.c file, or is damaged."
    require(kind in TOKEN_DTYPES, where, "the file must be an llm.c token file", {"path": path, "magic": kind}, advice)
    rule, advice = f"the version must be {TOKEN_VERSIONS[kind]}", "Write the file again with a newer llm.c."
    require(version == TOKEN_VERSIONS[kind], where, rule, {"path": path, "version": version}, advice)
    require(count > 0, where, "the file must hold tokens", got | {"count": count}, "Write it again.")
    expected = HEADER_BYTES + np.dtype(TOKEN_DTYPES[kind]).itemsize * count
    problem = "The file is truncated" if size < expected else f"{size - expected} bytes follow the last value"
    rule, advice = f"the file must have {expected} bytes, by its header", f"{problem}: copy or write it again."
    require(size == expected, where, rule, got, advice)
    return mapped(path, TOKEN_DTYPES[kind], HEADER_BYTES)
