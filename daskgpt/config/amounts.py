"""Amounts as people write them: 10M tokens, 5% of the steps."""

from __future__ import annotations

import math
import re

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_SHARE = re.compile(r"(\d+(\.\d*)?|\.\d+) ?%")
_COUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d{1,2}))? ?([kmgb]?)", re.IGNORECASE)


def count(text: str) -> int:
    """A whole number, also as 10M, 1.5G or 1e6.

    Errors   ValueError for another text
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    number, exponent, suffix = found.groups()
    return round(float(f"{number}e{exponent or 0}") * SUFFIXES[suffix.lower()])


def count_or_share(text: str) -> int | str:
    """A whole number, or a share such as 5%, which stays a text.

    Errors   ValueError for another text, or a share above 100%
    """
    if not text.strip().endswith("%"):
        return int(text)
    if not _SHARE.fullmatch(text.strip()) or percent(text) > 100:
        raise ValueError(text)
    return f"{percent(text):g}%"


def percent(share: str) -> float:
    """The number of a share: 5 of 5%."""
    return float(share.strip().rstrip("%"))


def part_of(amount: int | str, whole: int) -> int:
    """How many an amount is: itself, or its share of a whole, rounded up."""
    return math.ceil(percent(amount) * whole / 100) if isinstance(amount, str) else amount


count.__name__ = "number such as 10M"  # argparse says this of a text that is none
count_or_share.__name__ = "number or share such as 5%"
