"""Which token follows: one is drawn by the scores of all, or of the likeliest ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskgpt.config.errors import require


@dataclass(frozen=True)
class Choice:
    """How a token is chosen.

    temperature  0 takes the likeliest token, 1 the model's own probabilities
    top_k        choose among so many likeliest tokens only, 0 = all
    top_p        choose among the fewest likeliest tokens whose probabilities, with the temperature and of those that
                 top_k leaves, sum up to this much, 1 = all

    Errors       ValueError for a negative number, or a top_p that is no share
    Source       Fan et al. 2018, arXiv:1805.04833, for top_k; Holtzman et al. 2020, arXiv:1904.09751, for top_p
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_k", self.top_k)):
            require(value >= 0, "sample", f"{name} must not be negative", {name: value}, "Give 0 or more.")
            require(math.isfinite(value), "sample", f"{name} must be finite", {name: value}, "Give 0 or more.")
        rule = "top_p must lie above 0 and be at most 1"
        require(0 < self.top_p <= 1, "sample", rule, {"top_p": self.top_p}, "Give 1 for all.")

    def __call__(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """One token by its scores.

        Shapes   logits (vocabulary,) float32
        Errors   ValueError for scores that are not finite
        """
        top, temperature = logits.max(), np.float32(self.temperature)
        rule, advice = "a model's scores must be finite", "Its weights are damaged, or its training has diverged."
        require(bool(np.isfinite(top)), "sample", rule, {"largest": top}, advice)
        if temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):
            weights = np.exp((logits - top) / temperature)
        weights[weights < self._least(weights)] = 0
        sums = np.cumsum(weights, dtype=np.float64)
        # A product with what is nearly 1 may be rounded up to the sum itself, behind the last token.
        drawn = min(random.random() * sums[-1], np.nextafter(sums[-1], 0))
        return int(np.searchsorted(sums, drawn, side="right"))

    def _least(self, weights: np.ndarray) -> np.float32:
        """The weight of the least likely token that may be chosen."""
        least = np.float32(0)
        if 0 < self.top_k < weights.size:
            least = np.partition(weights, -self.top_k)[-self.top_k]
        if self.top_p < 1:
            ordered = np.sort(weights[weights >= least])[::-1]
            sums = np.cumsum(ordered, dtype=np.float64)
            least = ordered[np.searchsorted(sums, self.top_p * sums[-1])]
        return np.float32(least)
