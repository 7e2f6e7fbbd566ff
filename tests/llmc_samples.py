"""The golden llm.c files and small made-up ones, for the tests of the format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.formats.llmc import DebugState
from daskgpt.model.parameters import parameter_shapes

GOLDEN = Path(__file__).parent / "golden"
MODEL = GOLDEN / "gpt2_small.bin"
DEBUG_STATE = GOLDEN / "gpt2_small_debug_state.bin"
CONFIG = GPT2Config(blocks=3, heads=4, channels=64, vocabulary=509, padded_vocabulary=512, positions=64)
SMALL = GPT2Config(blocks=2, heads=2, channels=4, vocabulary=5, padded_vocabulary=8, positions=6)


def small_parameters(seed: int = 0) -> dict[str, np.ndarray]:
    """Every value another one, so that no exchange of tensors or blocks goes unseen."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in parameter_shapes(SMALL).items()}


def small_debug_state() -> DebugState:
    random = np.random.default_rng(1)
    tokens, targets = random.integers(0, SMALL.vocabulary, (2, 3, 4), dtype=np.int32)
    logits = random.standard_normal((3, 4, SMALL.vocabulary), np.float32)
    return DebugState(tokens, targets, logits, loss=1.5, gradients=small_parameters(2))
