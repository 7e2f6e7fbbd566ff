"""The wording of messages, tables as text, and functions that raise errors."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Integral
from typing import Any, TypeVar

# Whether this is a command: `python -m daskgpt...`, whose module has not begun yet, or the program `daskgpt`.
IS_COMMAND = os.path.splitext(os.path.basename((sys.argv or [""])[0]))[0] in ("-m", "daskgpt")
UNSET = "Check the variable that it comes from, or leave it out."
E = TypeVar("E", bound=Exception)


def refusal(kind: type[E], where: str, rule: str, got: Mapping[str, object] | str, advice: str) -> E:
    """Return an error in the common form, `{where}: {rule}; got {name}={value}. {advice}`, to be raised.

    kind   ValueError for input, TypeError for its type, RuntimeError for state, or an OSError for files
    got    values by name, or a description of the value
    """
    description = got if isinstance(got, str) else ", ".join(f"{name}={value}" for name, value in got.items())
    error = kind(f"{where}: {rule}; got {description}. {advice}")
    error.is_refusal = True  # type: ignore[attr-defined]
    return error


def tells_of_content(error: BaseException) -> bool:
    """Return whether an error of a library that reads foreign content is one of that content, and not of memory, of
    the system, an interruption or a `refusal`. A panic of Rust's is no Exception and has no public name.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, (MemoryError, OSError))
    return (ordinary and not hasattr(error, "is_refusal")) or type(error).__name__ == "PanicException"


@contextmanager
def refusing(
    errors: type[Exception] | tuple[type[Exception], ...] | None,
    where: str,
    rule: str,
    got: Mapping[str, object],
    advice: str,
) -> Iterator[None]:
    """Raise errors of a library or of foreign content as a `refusal`, a ValueError, whose values end with the error.

    errors   None = all that `tells_of_content` names
    """
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, errors) if errors else tells_of_content(error)):
            raise
        said = short(" ".join(f"{type(error).__name__}: {error}".split()), 200).rstrip(".")
        raise refusal(ValueError, where, rule, {**got, "error": said}, advice) from error


def require(
    holds: bool, where: str, rule: str, got: Mapping[str, object] | str, advice: str, kind: type[Exception] = ValueError
) -> None:
    """Raise a `refusal` with these arguments unless `holds`."""
    if not holds:
        raise refusal(kind, where, rule, got, advice)


def require_in_imports(holds: bool, rule: str, got: Mapping[str, object], advice: str) -> None:
    """Raise RuntimeError unless `holds`, while modules are imported.

    A command has not begun then, and nothing could catch the error: its line is printed, and the process exits with 2.
    """
    if not holds:
        error = refusal(RuntimeError, "daskgpt", rule, got, advice)
        if not IS_COMMAND:
            raise error
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)


def require_known(name: str, names: Collection[str], where: str, what: str) -> None:
    """Raise ValueError unless `name` is one of `names`; `what` says in the message what they name."""
    if name not in names:
        raise refusal(ValueError, where, f"{what} must be known", {what: name}, nearest(str(name), list(names)))


def require_named(name: object, where: str, what: str) -> None:
    """Raise ValueError for an empty name, as an unset shell variable gives; `what` it names is for the message."""
    require(bool(str(name).strip()), where, f"{what} must not be empty", {what: repr(name)}, UNSET)


def whole_number(value: Any, where: str, name: str, least: int = 0) -> int:
    """Return a whole number, also NumPy's, as an int. Errors   TypeError for anything else, ValueError below `least`"""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole, where, f"{name} must be a whole number", {name: repr(value)}, "Give an int.", TypeError)
    require(value >= least, where, f"{name} must be at least {least}", {name: value}, f"Give {least} or more.")
    return int(value)


def require_package(name: str, extra: str, where: str) -> None:
    """Raise RuntimeError unless a package is installed; `extra` is the extra of daskgpt that installs it."""
    rule, advice = f"{name} must be installed", f"Run pip install 'daskgpt[{extra}]'."
    require(find_spec(name) is not None, where, rule, "no such package", advice, RuntimeError)


def short(value: object, most: int = 40) -> str:
    """Return a value of a foreign file as one printable line of at most `most` characters."""
    text = "".join(character if character.isprintable() else "?" for character in str(value)[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def number_of(number: int, noun: str, plural: str = "") -> str:
    """Return how many things there are, such as `1 block` or `2,000 steps`; plural: of the noun, if it is no -s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells: the first column at the left, the others at the right."""
    first, *others = (max(map(len, cells)) for cells in zip(*rows))
    lines = (
        name.ljust(first) + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, others)) for name, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def nearest(name: str, names: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return `Did you mean x?` for a misspelt name, or the list of all names and of others, described."""
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join([*names, *others])}."


def require_divisor(where: str, name: str, part: int, whole_name: str, whole: int) -> None:
    """Raise ValueError unless a part divides a whole; the message has both names, and the nearest divisor as advice."""
    rule, advice = f"{name} must divide {whole_name}", f"Try {name}={nearest_divisor(whole, part)}."
    require(part > 0 and whole % part == 0, where, rule, {name: part, whole_name: whole}, advice)


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor nearest to `wanted`, the larger of two; 1 if none is near."""
    # Both may come from a broken file and be huge: the search goes outward and is bounded.
    for distance in range(min(wanted, 100_000)):
        for n in (wanted + distance, wanted - distance):
            if n <= number and number % n == 0:
                return n
    return 1
