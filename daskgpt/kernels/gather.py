"""Gather the token chunks of whole sequences, and cut whole sequences into token chunks again."""

from __future__ import annotations

import numpy as np


def gather(parts: list[np.ndarray], positions: object) -> np.ndarray:
    """Whole sequences from their chunks.

    Shapes   parts: list of (b, t, C) -> (b, T, C); positions is not used
    """
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def split(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The tokens at consecutive positions of whole sequences.

    Shapes   x (b, T, C), positions (t,) -> (b, t, C), contiguous
    """
    return np.ascontiguousarray(x[:, positions[0] : positions[-1] + 1])
