"""The golden llm.c files and small made-up ones, and what the tests of formats compare and measure."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from daskgpt.config.model import ModelConfig
from daskgpt.formats.llmc import DEBUG_STATE as DEBUG_STATE_MAGIC
from daskgpt.formats.llmc import HEADER_BYTES, TOKENS, header_of, open_model, read_header
from daskgpt.formats.safetensors import TensorFiles
from daskgpt.model.parameters import parameter_shapes

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "gpt2_small.bin"
DEBUG_STATE = GOLDEN / "gpt2_small_debug_state.bin"
CONFIG = ModelConfig(blocks=3, heads=4, channels=64, vocabulary=509, padded_vocabulary=512, positions=64)
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


def read_debug_state(path: str | Path, config: ModelConfig) -> DebugState:
    """Read a debug state of llm.c's; `config` is that of its model. Source   llm.c, train_gpt2.py: write_state"""
    batch = tuple(read_header(Path(path), "read_debug_state", DEBUG_STATE_MAGIC, (2,))[2:4])
    shapes: dict[str, tuple[int, ...]] = {"tokens": batch, "targets": batch, "logits": (*batch, config.vocabulary)}
    shapes |= {"loss": ()} | parameter_shapes(config)
    assert Path(path).stat().st_size == HEADER_BYTES + 4 * sum(map(math.prod, shapes.values()))
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        dtypes = {"tokens": "<i4", "targets": "<i4"}
        values = {
            n: np.fromfile(file, dtypes.get(n, "<f4"), math.prod(shape)).reshape(shape) for n, shape in shapes.items()
        }
    tokens, targets, logits, loss = (values.pop(name) for name in ("tokens", "targets", "logits", "loss"))
    return DebugState(tokens, targets, logits, float(loss), values)


def read_model(path: str | Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read the configuration and the parameters of a model file of llm.c's."""
    model = open_model(path).loaded()
    return model.config, dict(model.parameters)


def write_debug_state(path: str | Path, config: ModelConfig, state: DebugState) -> None:
    """Write a debug state of llm.c's, version 2."""
    gradients = (state.gradients[name] for name in parameter_shapes(config))
    with open(path, "wb") as file:
        file.write(header_of(DEBUG_STATE_MAGIC, 2, *state.tokens.shape))
        for values in (state.tokens, state.targets, state.logits, np.float32(state.loss), *gradients):
            file.write(np.ascontiguousarray(values).tobytes())


def write_tokens(path: str | Path, tokens: np.ndarray) -> None:
    """Write a token file of llm.c's."""
    Path(path).write_bytes(header_of(TOKENS, 1, tokens.size) + tokens.astype("<u2").tobytes())


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
