"""llm.c's model and debug-state files: a header of 256 int32, then tensors stacked over the blocks, little-endian."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing
from daskgpt.config.model import GPT2Config
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.published import READABLE, held, pieces, to_bfloat16
from daskgpt.model.parameters import Tensor, check_dtypes, check_parameters, parameter_shapes, tensors, value_count

HEADER_BYTES = 256 * 4
MODEL_MAGIC = 20240326
DEBUG_STATE_MAGIC = 20240327
DEBUG_STATE_VERSION = 2
FLOAT32_VERSION = 3
BFLOAT16_VERSION = 5
SIZES = ("positions", "vocabulary", "blocks", "heads", "channels", "padded_vocabulary")  # header numbers 2 to 7
BYTES_PER_VALUE = {FLOAT32_VERSION: 4, BFLOAT16_VERSION: 2}
DTYPES = {FLOAT32_VERSION: "F32", BFLOAT16_VERSION: "BF16"}
_STORED = {"F32": "<f4", "BF16": "<u2"}

FilePath = str | os.PathLike[str]

# llm.c's kinds of files by their first number, and what to say where another one is looked for.
KINDS = {
    MODEL_MAGIC: "It is an llm.c model: read it with read_model.",
    DEBUG_STATE_MAGIC: "It is an llm.c debug state: read it with read_debug_state.",
    20240328: "It is an llm.c tokenizer.",
    20240520: "It is an llm.c token file.",
    20240801: "It is an llm.c token file of Llama 3.",
    20240522: "It is an llm.c evaluation set.",
    20240527: "It is an llm.c train state: give the model file beside it.",
}


@dataclass(frozen=True, eq=False)
class DebugState:
    """One batch and what a forward and a backward pass must make of it.

    Shapes   tokens (B, T), targets (B, T), logits (B, T, V), gradients as the parameters
    Dtype    tokens and targets int32, logits and gradients float32
    """

    tokens: np.ndarray
    targets: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


def read_model(path: FilePath) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """Configuration and parameters of an llm.c model file.

    Shapes   those of parameter_shapes; wte.weight keeps the rows of the padded vocabulary
    Dtype    float32; version 5 (bfloat16) is widened, which is exact
    Cost     the parameters; the file is mapped
    Errors   as of open_model
    """
    model = open_model(path)
    return model.config, model.parameters()


def open_model(path: FilePath) -> OpenedModel:
    """An llm.c model file, none of whose tensors is read yet.

    Errors   FileNotFoundError; ValueError for another kind of file, another version, a header that describes no GPT-2,
             a truncated file and bytes after the last tensor
    Source   llm.c, train_gpt2.py: write_model
    """
    where = "read_model"
    with _open(path, where) as file:
        header = _read_header(file, path, where, MODEL_MAGIC)
        version = header[1]
        require(
            version in BYTES_PER_VALUE,
            where,
            "the version must be 3 (float32) or 5 (bfloat16)",
            {"path": path, "version": version},
            "Write the file again with a newer llm.c (train_gpt2.py): the layout differs.",
        )
        config = _config_of(header, path, where)
        _check_size(file, path, where, HEADER_BYTES + BYTES_PER_VALUE[version] * value_count(config), "")
    dtype = DTYPES[version]
    known = _places(config)
    mapped = np.memmap(path, _STORED[dtype], "r", offset=HEADER_BYTES)

    def read(tensor: Tensor) -> np.ndarray:
        begin, shape = known[tensor.name]
        return held(tensor, np.asarray(mapped[begin : begin + math.prod(shape)]).reshape(shape), dtype)

    return OpenedModel(config, [Path(path)], "llm.c", READABLE[dtype], read)


def _places(config: GPT2Config) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where each tensor begins, in values, and its shape. The table's order, blocks in turn, is the file's."""
    shapes = parameter_shapes(config)
    begins = accumulate(map(math.prod, shapes.values()), initial=0)
    return {name: (begin, shape) for (name, shape), begin in zip(shapes.items(), begins)}


def write_model(
    path: FilePath, config: GPT2Config, parameters: Mapping[str, np.ndarray], version: int = FLOAT32_VERSION
) -> None:
    """Write an llm.c model file; it appears under its name only when it is whole.

    Dtype    float32 in; version 3 keeps it, version 5 rounds to bfloat16, nearest, ties to even
    Cost     16 MiB, for version 5 some times that
    Errors   ValueError for an unknown version, a configuration that the header cannot hold, missing or unknown names,
             wrong shapes; TypeError unless float32; FileNotFoundError where the folder is missing
    """
    check_parameters(config, parameters)
    check_dtypes("write_model", parameters, np.float32)
    stream_model(path, config, lambda tensor: parameters[tensor.name], version)


def stream_model(
    path: FilePath, config: GPT2Config, read: Callable[[Tensor], np.ndarray], version: int = FLOAT32_VERSION
) -> None:
    """The same for tensors that are asked for one after the other.

    read   gives a tensor of the table in its shape, float32
    """
    where = "write_model"
    require(
        version in BYTES_PER_VALUE,
        where,
        "the version must be 3 (float32) or 5 (bfloat16)",
        {"version": version},
        "Use 3 where llm.c's C program is to read the file.",
    )
    sizes = _sizes_of(config, where)
    with replacing(path, where) as file:
        _write_header(file, [MODEL_MAGIC, version, *sizes])
        _write_tensors(file, config, read, version)


def read_debug_state(path: FilePath, config: GPT2Config) -> DebugState:
    """The batch, logits, loss and gradients of an llm.c debug state; config is that of its model.

    Shapes   tokens (B, T), targets (B, T), logits (B, T, V), gradients as the parameters
    Dtype    tokens and targets int32, the rest float32
    Errors   FileNotFoundError; ValueError for another kind of file, another version, a batch that the model cannot
             take, a truncated file and bytes after the last tensor
    Source   llm.c, train_gpt2.py: write_state
    """
    where = "read_debug_state"
    with _open(path, where) as file:
        header = _read_header(file, path, where, DEBUG_STATE_MAGIC)
        version, batch, length = header[1:4]
        require(
            version == DEBUG_STATE_VERSION,
            where,
            f"the version must be {DEBUG_STATE_VERSION}",
            {"path": path, "version": version},
            "Write the file again with a newer llm.c (train_gpt2.py): the layout differs.",
        )
        _check_batch(path, where, config, batch, length)
        logits = (batch, length, config.vocabulary)
        values = 2 * batch * length + math.prod(logits) + 1
        values += value_count(config)
        _check_size(file, path, where, HEADER_BYTES + 4 * values, " Or give the config of the debug state's own model.")
        return DebugState(
            tokens=_read(file, "<i4", (batch, length)),
            targets=_read(file, "<i4", (batch, length)),
            logits=_read(file, "<f4", logits),
            loss=float(_read(file, "<f4", ())),
            gradients={name: _read(file, "<f4", shape) for name, shape in parameter_shapes(config).items()},
        )


def write_debug_state(path: FilePath, config: GPT2Config, state: DebugState) -> None:
    """Write an llm.c debug state, version 2; it appears under its name only when it is whole.

    Dtype    tokens and targets int32, logits and gradients float32; the loss is rounded to float32
    Errors   ValueError for wrong names or shapes; TypeError for other dtypes; FileNotFoundError where the folder is
             missing
    """
    where = "write_debug_state"
    shape = state.tokens.shape
    for name, expected in (("tokens", shape[:2]), ("targets", shape), ("logits", (*shape, config.vocabulary))):
        got = getattr(state, name).shape
        require(
            len(shape) == 2 and got == expected,
            where,
            "tokens must be (B, T), targets (B, T) and logits (B, T, V)",
            {f"{name}.shape": got},
            f"The model has V={config.vocabulary}.",
        )
    _check_batch(path, where, config, *shape)
    check_parameters(config, state.gradients)
    check_dtypes(where, {"tokens": state.tokens, "targets": state.targets}, np.int32)
    check_dtypes(where, {"logits": state.logits, **state.gradients}, np.float32)
    with replacing(path, where) as file:
        _write_header(file, [DEBUG_STATE_MAGIC, DEBUG_STATE_VERSION, *shape])
        for values in (state.tokens, state.targets, state.logits, np.array([state.loss], np.float32)):
            _write(file, values)
        _write_tensors(file, config, lambda tensor: state.gradients[tensor.name], FLOAT32_VERSION)


def _open(path: FilePath, where: str) -> BinaryIO:
    if not Path(path).is_file():
        raise refusal(
            FileNotFoundError, where, "the file must exist", {"path": path}, "Check the spelling and the folder."
        )
    return open(path, "rb")


def _read_header(file: BinaryIO, path: FilePath, where: str, magic: int) -> list[int]:
    """The 256 numbers of the header, once the first says that this is the kind of file looked for."""
    data = file.read(HEADER_BYTES)
    require(
        len(data) == HEADER_BYTES,
        where,
        f"the file must begin with a header of {HEADER_BYTES} bytes",
        {"path": path, "bytes": len(data)},
        "It is no llm.c file, or was cut short.",
    )
    header: list[int] = np.frombuffer(data, "<i4").tolist()
    kind = "model" if magic == MODEL_MAGIC else "debug state"
    require(
        header[0] == magic,
        where,
        f"the file must be an llm.c {kind} (magic {magic})",
        {"path": path, "magic": header[0]},
        KINDS.get(header[0], "It is no llm.c file."),
    )
    return header


def _sizes_of(config: GPT2Config, where: str) -> list[int]:
    """Header numbers 2 to 7.

    Errors   ValueError for a configuration of which these are not all: a reader would take it for another model
    """
    for f in fields(config):
        value = getattr(config, f.name)
        require(
            f.name in SIZES or value == f.default,
            where,
            f"llm.c's header has no {f.name}, which must be {f.default}",
            {f.name: value},
            "Write a .safetensors file, which holds every configuration.",
        )
    return [getattr(config, name) for name in SIZES]


def _config_of(header: list[int], path: FilePath, where: str) -> GPT2Config:
    sizes: dict[str, Any] = dict(zip(SIZES, header[2:8]))
    # GPT2Config reads 0 as "no padding"; in a file it is a layout without the padded size.
    require(
        sizes["padded_vocabulary"] >= 1,
        where,
        "the header must describe a GPT-2",
        {"path": path, "padded_vocabulary": sizes["padded_vocabulary"]},
        "Write the file again.",
    )
    try:
        return GPT2Config(**sizes)
    except ValueError as error:
        raise refusal(ValueError, where, "the header must describe a GPT-2", {"path": path}, str(error)) from error


def _check_batch(path: FilePath, where: str, config: GPT2Config, batch: int, length: int) -> None:
    require(
        batch >= 1 and 1 <= length <= config.positions,
        where,
        f"B must be at least 1 and T from 1 to the model's positions ({config.positions})",
        {"path": path, "B": batch, "T": length},
        "Give the config of the debug state's own model.",
    )


def _check_size(file: BinaryIO, path: FilePath, where: str, expected: int, advice: str) -> None:
    size = os.fstat(file.fileno()).st_size
    problem = "The file is truncated" if size < expected else f"{size - expected} bytes follow the last tensor"
    require(
        size == expected,
        where,
        f"the file must have {expected} bytes, by its header",
        {"path": path, "bytes": size},
        f"{problem}: copy or write it again.{advice}",
    )


def _read(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.fromfile(file, dtype, math.prod(shape)).reshape(shape)


def _write_header(file: BinaryIO, numbers: list[int]) -> None:
    header = np.zeros(256, "<i4")
    header[: len(numbers)] = numbers
    _write(file, header)


def _write(file: BinaryIO, values: np.ndarray) -> None:
    # Not tofile: write says why the system refused (disk full, file too large).
    file.write(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)


def _write_tensors(file: BinaryIO, config: GPT2Config, read: Callable[[Tensor], np.ndarray], version: int) -> None:
    for tensor in tensors(config).values():
        for piece in pieces(read(tensor)):
            _write(file, to_bfloat16(piece) if version == BFLOAT16_VERSION else piece)
