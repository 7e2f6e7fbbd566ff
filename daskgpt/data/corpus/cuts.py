"""Where a text may be cut, so that its pieces have the tokens of the whole.

A file is cut at positions that follow from its bytes alone: every reader of a part finds the same ones, whoever it is
and whatever else was read. Text is cut in front of the last line break before a word: GPT-2's pattern, which every
vocabulary here shares, ends a piece there anyhow, so that no token crosses the cut. Lines and documents that a
separator divides are cut behind them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

SEARCHED = 2**16  # bytes in which a text is searched for a place; without one it is cut between two characters
PIECE = 2**16  # bytes, of a search for a separator

# Unicode's white space beyond ASCII, in UTF-8.
_SPACES = rb"\s|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEFORE_A_WORD = re.compile(rb"\n(?!" + _SPACES + rb")(?=.)", re.DOTALL)
_A_CHARACTER = re.compile(rb"[^\x80-\xbf]")

Read = Callable[[int, int], bytes]


def in_text(window: bytes) -> int:
    """Where the text that begins with these bytes is cut: behind so many of them."""
    found = _BEFORE_A_WORD.search(window) or _A_CHARACTER.search(window)
    return found.start() if found else 0


def text_cut(read: Read, position: int) -> int:
    """The first place from `position` on where a text is cut; 0 and the end are such places.

    read   gives so many bytes from a position on, fewer at the end
    """
    return position + in_text(read(position, SEARCHED)) if position else 0


def record_cut(read: Read, position: int, separator: bytes) -> int:
    """The end of the first separator that begins at `position` or later, else the end of the file."""
    if not position:
        return 0
    kept = b""
    while piece := read(position, PIECE):
        window = kept + piece
        found = window.find(separator)
        if found >= 0:
            return position - len(kept) + found + len(separator)
        kept = window[len(window) - len(separator) + 1 :] if len(separator) > 1 else b""
        position += len(piece)
    return position


def passages(content: bytes, size: int) -> list[tuple[int, int]]:
    """Beginnings and ends of passages of about `size` bytes, one after the other."""
    ends = [0]
    while ends[-1] + size < len(content):
        start = ends[-1] + size
        ends.append(start + in_text(content[start : start + size]))
    return list(zip(ends, [*ends[1:], len(content)]))
