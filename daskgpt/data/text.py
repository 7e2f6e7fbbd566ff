"""Text as documents, and the part of it that is held out.

Every n-th span is held out for validation unless the settings name the end: the end of a book, or the last files of a
library, differ from the rest, so a loss measured there tells little about the whole. Spans are long compared with a
sequence, so few windows cross a joint, and short compared with the whole, so many places are sampled. Text is cut
before it is encoded: the held-out text does not depend on the encoding, and losses per byte can be compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise

import numpy as np

from daskgpt.config.errors import require
from daskgpt.data.reading import DOCUMENT, WHERE, texts
from daskgpt.data.source import Source


def read_text(source: Source) -> list[str]:
    """Return the documents of a source of text in the order of its files, without empty ones.

    Cost     reads every file once; the text stays in memory
    Errors   ValueError if there is no text, or it is not UTF-8; OSError if a file cannot be read
    """
    documents = list[str]()
    for file in source.files:
        parts = [text for _, text in texts(file)]
        documents += ["".join(parts)] if file.form == DOCUMENT else parts
    documents = [document for document in documents if document.strip()]
    rule, advice = "the text must not be empty", "Give a source that holds text."
    require(bool(documents), WHERE, rule, {"source": source.name}, advice)
    return documents


# What is held out

SPANS, END = "spans", "end"
SPAN_CHARACTERS = 16384
SPAN_TOKENS = 4096

# A cut in a text moves to the end of its line, if that is near.
LINE_CHARACTERS = 1024


@dataclass(frozen=True)
class Run:
    """Neighboring spans of the same part: [start, stop), held out or not."""

    start: int
    stop: int
    held_out: bool


def runs(total: int, span: int, fraction: float, held_out: str = SPANS) -> list[Run]:
    """Cut `total` items into runs, so that a fraction of the spans is held out, evenly spread; or the end, to the item.

    Span i is held out where floor(i * fraction + 1/2) grows: 4, 14, 24, ... for a tenth. A short text is cut into
    shorter spans.
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


def split_text(documents: list[str], fraction: float, held_out: str = SPANS) -> tuple[list[str], list[str]]:
    """Return pieces of text for training and for validation. Spans end with lines, unless these are too long.

    Errors   none: a text too short to be split leaves one part empty
    """
    cuts = runs(sum(map(len, documents)), SPAN_CHARACTERS, fraction, held_out)
    stops = [run.stop for run in cuts]
    parts: tuple[list[str], list[str]] = ([], [])
    position = 0
    for text in documents:
        inside = cuts[bisect_right(stops, position) : bisect_left(stops, position + len(text)) + 1]
        cuts_inside = (_line_end(text, a.stop - position, b, held_out) for a, b in pairwise(inside))
        ends = [0, *cuts_inside, len(text)]
        for run, (start, stop) in zip(inside, pairwise(ends)):
            if start < stop:
                parts[run.held_out].append(text[start:stop])
        position += len(text)
    return parts


def _line_end(text: str, position: int, following: Run, held_out: str) -> int:
    """Return the end of the line at a position, if it is near; with `held_out="end"` the position itself."""
    if held_out == END:
        return position
    # At most half of the next run, so that some of it is left.
    limit = min(LINE_CHARACTERS, (following.stop - following.start) // 2)
    line_end = text.find("\n", position - 1, position + limit)
    return position if line_end == -1 else line_end + 1


def split_tokens(
    tokens: np.ndarray, fraction: float, held_out: str = SPANS
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return pieces of a row of tokens for training and for validation, as views."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for run in runs(tokens.size, SPAN_TOKENS, fraction, held_out):
        parts[run.held_out].append(tokens[run.start : run.stop])
    return parts
