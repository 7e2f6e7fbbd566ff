"""Which part of a text or of a row of tokens is held out for validation.

Every n-th span is held out, not the end, unless somebody asks for it: the end of a book, or the last files of a
library, are unlike the rest, and a loss measured there says little about the whole. Spans are long beside a sequence,
so that few windows cross a joint, and short beside the whole, so that many places are sampled. Text is cut before it is
encoded: the same text is then held out whatever the encoding, and losses a byte can be compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise

import numpy as np

from daskgpt.data.text import Document

SPANS, END = "spans", "end"  # what is held out

SPAN_CHARACTERS = 16384
SPAN_TOKENS = 4096

# A cut in a text moves on to the end of its line, if that is near.
LINE_CHARACTERS = 1024


@dataclass(frozen=True)
class Run:
    """Neighbouring spans that go into the same part: [start, stop), held out or not."""

    start: int
    stop: int
    held_out: bool


def runs(total: int, span: int, fraction: float, held_out: str = SPANS) -> list[Run]:
    """Cut `total` items into runs, so that a fraction of the spans is held out, evenly spread; or the end, to the item.

    Span i is held out where floor(i * fraction + 1/2) grows: 4, 14, 24, ... for a tenth. What is too short for that is
    cut into shorter spans.
    """
    # As a fraction: the float 0.1 is not quite a tenth, and its multiples would fall to either side of a whole number.
    share = Fraction(fraction).limit_denominator(1_000_000)
    if share == 0:
        return [Run(0, total, False)]
    if held_out == END:
        cut = math.floor(total * (1 - share))
        return [Run(0, cut, False), Run(cut, total, True)]
    half = Fraction(1, 2)
    span = min(span, max(1, math.ceil(total * min(share, 1 - share))))

    def is_held_out(index: int) -> bool:
        return math.floor((index + 1) * share + half) > math.floor(index * share + half)

    groups = [(key, list(group)) for key, group in groupby(range(math.ceil(total / span)), is_held_out)]
    return [Run(group[0] * span, min(total, (group[-1] + 1) * span), key) for key, group in groups]


def split_text(documents: list[Document], fraction: float, held_out: str = SPANS) -> tuple[list[str], list[str]]:
    """Pieces of text for training and for validation. Spans end with lines, where these are not too long.

    Errors   none: a text too short to be split leaves one part empty
    """
    cuts = runs(sum(len(document.text) for document in documents), SPAN_CHARACTERS, fraction, held_out)
    stops = [run.stop for run in cuts]
    parts: tuple[list[str], list[str]] = ([], [])
    position = 0
    for text in (document.text for document in documents):
        inside = cuts[bisect_right(stops, position) : bisect_left(stops, position + len(text)) + 1]
        cut_at = [
            a.stop - position if held_out == END else _line_end(text, a.stop - position, b) for a, b in pairwise(inside)
        ]
        ends = [0, *cut_at, len(text)]
        for run, (start, stop) in zip(inside, pairwise(ends)):
            if start < stop:
                parts[run.held_out].append(text[start:stop])
        position += len(text)
    return parts


def _line_end(text: str, position: int, following: Run) -> int:
    """Where the line ends that reaches to or over the position, if it ends soon."""
    # Half of the run that follows at most, so that some of it is left.
    limit = min(LINE_CHARACTERS, (following.stop - following.start) // 2)
    found = text.find("\n", position - 1, position + limit)
    return position if found == -1 else found + 1


def split_tokens(
    tokens: np.ndarray, fraction: float, held_out: str = SPANS
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pieces of a row of tokens for training and for validation, as views."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for run in runs(tokens.size, SPAN_TOKENS, fraction, held_out):
        parts[run.held_out].append(tokens[run.start : run.stop])
    return parts
