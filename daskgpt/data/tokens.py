"""Rows of tokens in several files, which stay mapped: any total size, as one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daskgpt.config.errors import refusal


class MappedTokens:
    """Several rows of tokens as one: indexed by a slice or by places, it gives arrays.

    Shapes   (N,), N the sum of its parts
    Dtype    uint16
    Cost     what is taken out of it is copied, nothing else is read
    """

    dtype = np.dtype(np.uint16)
    itemsize = 2

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([part.size for part in self.parts], dtype=np.int64)
        self.size = int(self.ends[-1]) if self.parts else 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Errors   IndexError for a place outside, as an array's"""
        if isinstance(places, slice):
            start, stop, step = places.indices(self.size)
            if step == 1:
                return self._between(start, max(start, stop))
            places = np.arange(start, stop, step)
        places = np.asarray(places)
        if places.size and (places.min() < 0 or places.max() >= self.size):
            got = {"places": f"{places.min()} to {places.max()}", "tokens": self.size}
            raise refusal(IndexError, "MappedTokens", "places must lie in the row", got, "Ask for others.")
        numbers = np.searchsorted(self.ends, places, side="right")
        found = np.empty(places.shape, self.dtype)
        for number in np.unique(numbers):
            mine = numbers == number
            found[mine] = self.parts[number][places[mine] - (self.ends[number] - self.parts[number].size)]
        return found

    def _between(self, start: int, stop: int) -> np.ndarray:
        found, begin = [], 0
        for part, end in zip(self.parts, self.ends):
            low, high = max(start, begin), min(stop, int(end))
            if low < high:
                found.append(part[low - begin : high - begin])
            begin = int(end)
        return np.concatenate(found) if found else np.empty(0, self.dtype)


Tokens = np.ndarray | MappedTokens
