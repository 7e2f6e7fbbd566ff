"""llm.c's files of models and tokens: a header of 256 int32, then numbers, little-endian.

This module also reads nanoGPT's token files, which are ids without a header.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import replacing
from daskgpt.config.model import ModelConfig
from daskgpt.formats import stored_model
from daskgpt.formats.stored_model import READABLE, FilePath, StoredModel, held, pieces, require_file
from daskgpt.kernels.bfloat16.rounding import to_bfloat16
from daskgpt.model.parameters import ReadLater, tensors, value_count

HEADER_BYTES = 256 * 4
MODEL, DEBUG_STATE, TOKENS, WIDE_TOKENS = 20240326, 20240327, 20240520, 20240801
KINDS = {  # kinds of files, by the first number
    MODEL: "model",
    DEBUG_STATE: "debug state",
    20240328: "tokenizer",
    TOKENS: "token file",
    WIDE_TOKENS: "token file of 4-byte ids",
    20240522: "evaluation set",
    20240527: "train state; give the model file beside it",
}
# Dtypes of the ids in a token file, and its version; the wider ones are Llama 3's.
TOKEN_DTYPES, TOKEN_VERSIONS = {TOKENS: "<u2", WIDE_TOKENS: "<u4"}, {TOKENS: 1, WIDE_TOKENS: 7}
FLOAT32_VERSION, BFLOAT16_VERSION = 3, 5
DTYPES = {FLOAT32_VERSION: "F32", BFLOAT16_VERSION: "BF16"}  # dtypes by the version of a model file
SIZES = ("positions", "vocabulary", "blocks", "heads", "channels", "padded_vocabulary")  # header numbers 2 to 7
LARGEST_COUNT = 2**31 - 1  # tokens of a file
META = "meta.pkl"  # nanoGPT's file of the characters behind the ids


def read_header(path: Path, where: str, magic: int, versions: Collection[int]) -> list[int]:
    """Return the 256 numbers of a header; the first two are kind and version of the file.

    Errors   FileNotFoundError; ValueError for another kind of file or version, or one that is too short
    """
    require_file(path, where)
    header: list[int] = np.fromfile(path, "<i4", 256).tolist()
    rule, got = f"the file must begin with a header of {HEADER_BYTES} bytes", {"path": path, "numbers": len(header)}
    require(len(header) == 256, where, rule, got, "It is not an llm.c file, or is truncated.")
    advice = f"It is an llm.c {KINDS[header[0]]}." if header[0] in KINDS else "It is not an llm.c file, or is damaged."
    rule = f"the file must be an llm.c {KINDS[magic]} (magic {magic})"
    require(header[0] == magic, where, rule, {"path": path, "magic": header[0]}, advice)
    rule, got = f"the version must be {' or '.join(map(str, versions))}", {"path": path, "version": header[1]}
    require(header[1] in versions, where, rule, got, "Write the file again with a newer llm.c: the layout differs.")
    return header


def _check_size(path: Path, where: str, data_bytes: int) -> None:
    size, expected = path.stat().st_size, HEADER_BYTES + data_bytes
    problem = "The file is truncated" if size < expected else f"{size - expected} bytes follow the last value"
    rule, advice = f"the file must have {expected} bytes, by its header", f"{problem}: copy or write it again."
    require(size == expected, where, rule, {"path": path, "bytes": size}, advice)


def header_of(*numbers: int) -> bytes:
    """Return a header that begins with these numbers."""
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


# Models


def open_model(path: FilePath) -> StoredModel:
    """Open an llm.c model file without reading tensors.

    Shapes   those of parameter_shapes; wte.weight keeps the rows of the padded vocabulary
    Dtype    float32; version 5 (bfloat16) is widened, which is exact
    Errors   FileNotFoundError; ValueError for another kind of file, another version, a header that describes no GPT-2,
             a truncated file and bytes after the last tensor
    Source   llm.c, train_gpt2.py: write_model
    """
    path, where = Path(path), "read_model"
    header = read_header(path, where, MODEL, DTYPES)
    sizes: dict[str, Any] = dict(zip(SIZES, header[2:8]))
    rule, rows = "the header must describe a GPT-2", sizes["padded_vocabulary"]
    # ModelConfig reads 0 as "no padding"; in a file, 0 means a layout without the padded size.
    require(rows >= 1, where, rule, {"path": path, "padded_vocabulary": rows}, "Write the file again.")
    config = stored_model.config_from(sizes, path, where, rule)
    dtype = DTYPES[header[1]]
    mapped_dtype = np.dtype(stored_model.DTYPES[dtype])
    _check_size(path, where, mapped_dtype.itemsize * value_count(config))
    # The order of the file is that of the table, blocks in turn.
    table, values = tensors(config), stored_model.mapped(path, mapped_dtype, HEADER_BYTES)
    begins = dict(zip(table, accumulate((math.prod(tensor.shape) for tensor in table.values()), initial=0)))

    def read(name: str) -> np.ndarray:
        shape, begin = table[name].shape, begins[name]
        return held(shape, values[begin : begin + math.prod(shape)].reshape(shape))

    return StoredModel(config, ReadLater(table, read), kind="llm.c", dtype=READABLE[dtype], files=(path,))


def write_model(
    path: FilePath, config: ModelConfig, parameters: Mapping[str, np.ndarray], version: int = FLOAT32_VERSION
) -> None:
    """Write an llm.c model file; it appears under its name only when it is complete.

    version      3, which llm.c's C program reads, or 5
    parameters   may have more or fewer rows of padding, if they are a ReadLater of another program's model

    Dtype    float32; version 3 keeps it, version 5 rounds to the nearest bfloat16, ties to even
    Cost     16 MiB of memory, a few times that for version 5
    Errors   ValueError for an unknown version, and a configuration that the header cannot hold; FileNotFoundError if
             the folder is missing
    """
    where = "write_model"
    rule, advice = "the version must be 3 (float32) or 5 (bfloat16)", "Use 3 for llm.c's C program."
    require(version in DTYPES, where, rule, {"version": version}, advice)
    stored_model.require_defaults(config, SIZES, where, "llm.c's header")
    with replacing(path, where) as file:
        file.write(header_of(MODEL, version, *(getattr(config, name) for name in SIZES)))
        for name, tensor in tensors(config).items():
            for piece in pieces(held(tensor.shape, parameters[name])):
                # In place of ndarray.tofile: errors of file.write name the reason (disk full, file too large).
                values = to_bfloat16(piece) if version == BFLOAT16_VERSION else piece
                file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)


# Tokens


def id_dtype(ids: int) -> np.dtype:
    """Return the dtype of tokens, uint16 or uint32, for a number of ids."""
    return np.dtype(np.uint16 if ids <= 2**16 else np.uint32)


def token_header(dtype: np.dtype, count: int) -> bytes:
    """Return the header of a file of `count` tokens."""
    kind = TOKENS if dtype.itemsize == 2 else WIDE_TOKENS
    return header_of(kind, TOKEN_VERSIONS[kind], count)


def read_tokens(path: FilePath) -> np.ndarray:
    """Return the tokens of a file: llm.c's, or ids of two bytes without a header, as nanoGPT writes them.

    Shapes   (N,)
    Dtype    that of the file, read-only
    Cost     the file is mapped, not read
    Errors   FileNotFoundError if there is no file; ValueError for a file that is not a complete token file
    """
    path, where = Path(path), "read_tokens"
    require_file(path, where)
    size = path.stat().st_size
    got = {"path": path, "bytes": size}
    start = np.fromfile(path, "<i4", count=256)
    # A header, good or damaged, is recognized by its first number, or by zeros after the eighth: ids alone would need
    # some 480 ids of 0 at the beginning.
    zeros = start.size == 256 and np.count_nonzero(start[8:]) <= 8
    if zeros or (start.size > 0 and int(start[0]) in KINDS):
        kind = WIDE_TOKENS if start[0] == WIDE_TOKENS else TOKENS
        count, dtype = read_header(path, where, kind, (TOKEN_VERSIONS[kind],))[2], TOKEN_DTYPES[kind]
        require(count > 0, where, "the file must hold tokens", got | {"count": count}, "Write it again.")
        _check_size(path, where, np.dtype(dtype).itemsize * count)
        return stored_model.mapped(path, dtype, HEADER_BYTES)
    rule, advice = "ids without a header must be 2 bytes each", "It is truncated, or holds no token ids."
    require(size > 0 and size % 2 == 0, where, rule, got, advice)
    return stored_model.mapped(path, "<u2")
