"""How errors are worded, and where they are raised."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any


def require(holds: bool, where: str, rule: str, got: dict[str, Any], advice: str) -> None:
    """Raise ValueError in the one form that all errors share, unless `holds`."""
    if not holds:
        values = ", ".join(f"{name}={value}" for name, value in got.items())
        raise ValueError(f"{where}: {rule}; got {values}. {advice}")


def nearest(name: str, known: list[str]) -> str:
    """`Did you mean x?` for a misspelt name, or the list of all names."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(known)}."


def nearest_divisor(number: int, wanted: int) -> int:
    # Looked for near what is wanted only: the number may come from a broken file and be huge.
    divisors = [n for n in range(1, min(number, 2 * wanted) + 1) if number % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))
