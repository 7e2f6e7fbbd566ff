"""The golden llm.c files and small made-up ones, and what the tests of formats compare and measure."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from daskgpt.config.model import ModelConfig
from daskgpt.formats.safetensors import TensorFiles
from daskgpt.formats.token_files import HEADER_BYTES, token_header
from daskgpt.model.parameters import parameter_shapes

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "gpt2_small.bin"
DEBUG_STATE = GOLDEN / "gpt2_small_debug_state.bin"
MODEL_MAGIC, DEBUG_STATE_MAGIC = 20240326, 20240327
SIZES = ("positions", "vocabulary", "blocks", "heads", "channels", "padded_vocabulary")  # in the header of a model
SMALL = ModelConfig(blocks=2, heads=2, channels=4, vocabulary=5, padded_vocabulary=8, positions=6)


def small_parameters(seed: int = 0) -> dict[str, np.ndarray]:
    """Every value another one, so that no exchange of tensors or blocks goes unseen."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in parameter_shapes(SMALL).items()}


@dataclass(frozen=True, eq=False)
class DebugState:
    """A batch, tokens and targets (B, T), with the loss, logits (B, T, V) and gradients of its model."""

    tokens: np.ndarray
    targets: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


def _read(path: Path, kind: int, version: int) -> tuple[list[int], np.ndarray]:
    """Return the numbers of a header after kind and version, and the file's values as float32."""
    header = np.fromfile(path, "<i4", 256).tolist()
    assert header[:2] == [kind, version]
    return header[2:], np.fromfile(path, "<f4", offset=HEADER_BYTES)


def _cut(values: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the arrays that values hold one after another."""
    ends = list(accumulate(map(math.prod, shapes.values())))
    assert values.size == ends[-1]
    parts = np.split(values, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def read_model(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read a model file of llm.c's, version 3. Source   llm.c, train_gpt2.py: write_model"""
    sizes, values = _read(path, MODEL_MAGIC, 3)
    config = ModelConfig(**dict(zip(SIZES, sizes)))
    return config, _cut(values, parameter_shapes(config))


def read_debug_state(path: Path, config: ModelConfig) -> DebugState:
    """Read a debug state of llm.c's; `config` is that of its model. Source   llm.c, train_gpt2.py: write_state"""
    header, values = _read(path, DEBUG_STATE_MAGIC, 2)
    shape = tuple(header[:2])
    shapes: dict[str, tuple[int, ...]] = {"tokens": shape, "targets": shape, "logits": (*shape, config.vocabulary)}
    arrays = _cut(values, shapes | {"loss": ()} | parameter_shapes(config))
    tokens, targets, logits, loss = (arrays.pop(name) for name in ("tokens", "targets", "logits", "loss"))
    return DebugState(tokens.view("<i4"), targets.view("<i4"), logits, float(loss), arrays)


def write_tokens(path: str | Path, tokens: np.ndarray) -> None:
    """Write a token file of llm.c's."""
    Path(path).write_bytes(token_header(np.dtype(np.uint16), tokens.size) + tokens.astype("<u2").tobytes())


def in_shards(path: Path, most: int) -> Path:
    """Cut a safetensors file into shards of at most so many bytes, as huggingface_hub does; return their index."""
    files, shards = TensorFiles(path, "in_shards"), list[dict[str, np.ndarray]]([{}])
    for name, stored in files.items():
        values = stored.read()
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + values.nbytes > most:
            shards.append({})
        shards[-1][name] = values
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{path.stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path.with_name(file), files.metadata)
        weight_map |= dict.fromkeys(shard, file)
    path.unlink()
    index = path.with_name(f"{path.name}.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def assert_same_bits(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    """Names in order, shapes and bits of parameters; the second ones are arrays that can be used at once."""
    assert list(first) == list(second)
    for name, values in first.items():
        other = second[name]
        assert (other.dtype, other.shape) == (np.float32, values.shape)
        assert other.flags.c_contiguous, name
        assert other.flags.writeable, name
        assert other.tobytes() == values.tobytes(), name


def peak_bytes(work: Callable[..., Any], *arguments: Any) -> int:
    """The most memory that Python and numpy hold during a call."""
    tracemalloc.start()
    try:
        work(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
