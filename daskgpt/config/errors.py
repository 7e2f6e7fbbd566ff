"""How errors are worded, and where they are raised."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)


def refusal(kind: type[E], where: str, rule: str, got: Mapping[str, Any] | str, advice: str) -> E:
    """An error in the one form that all share, `{where}: {rule}; got {name}={value}. {advice}`, to be raised.

    kind   ValueError for input, TypeError for its type, RuntimeError for state, or what OSError says of files
    got    values by name, or what was found, in words
    """
    found = got if isinstance(got, str) else ", ".join(f"{name}={value}" for name, value in got.items())
    return kind(f"{where}: {rule}; got {found}. {advice}")


def require(
    holds: bool,
    where: str,
    rule: str,
    got: Mapping[str, Any] | str,
    advice: str,
    kind: type[Exception] = ValueError,
) -> None:
    """Raise the `refusal` of these words unless `holds`."""
    if not holds:
        raise refusal(kind, where, rule, got, advice)


def nearest(name: str, known: list[str]) -> str:
    """`Did you mean x?` for a misspelt name, or the list of all names."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(known)}."


def nearest_divisor(number: int, wanted: int) -> int:
    # Looked for near what is wanted only: the number may come from a broken file and be huge.
    divisors = [n for n in range(1, min(number, 2 * wanted) + 1) if number % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))
