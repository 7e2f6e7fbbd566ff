"""Check answers to the puzzles of the notebooks, which import this module from their folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

COLORS = {"Your turn.": "#6b7280", "Right.": "#15803d", "Not yet.": "#b45309"}


@dataclass(frozen=True, repr=False)
class Verdict:
    """A reply to an answer; true where it is right.

    head   `Your turn.`, `Right.` or `Not yet.`
    text   what follows
    """

    head: str
    text: str

    def __bool__(self) -> bool:
        return self.head == "Right."

    def __repr__(self) -> str:
        return f"{self.head} {self.text}".strip()

    def _repr_html_(self) -> str:
        style = f"border-left: 4px solid {COLORS[self.head]}; padding: 4px 10px"
        return f'<div style="{style}"><b>{self.head}</b> {escape(self.text)}</div>'


def puzzle(answer: object, right: Callable[..., bool], hint: str, why: str = "") -> Verdict:
    """Return whether an answer to a puzzle is right.

    answer   None as long as there is none
    right    whether an answer is right; an answer that it raises an exception for is not
    hint     the reply to a wrong answer
    why      the reply to the right answer

    >>> puzzle(3, lambda edges: edges == 4, "Count the edge of the residual connection, too.")
    Not yet. Count the edge of the residual connection, too.
    """
    if answer is None:
        return Verdict("Your turn.", "Write your answer into the cell above, run it, and then this one.")
    try:
        if right(answer):
            return Verdict("Right.", why)
    except Exception as error:  # whatever a reader writes
        return Verdict("Not yet.", f"{hint} (The check said {type(error).__name__}: {error})")
    return Verdict("Not yet.", hint)
