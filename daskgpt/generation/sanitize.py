"""Text of a model's tokens for a terminal, without control sequences and long runs of invalid bytes."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from itertools import chain

from daskgpt.formats.encoding import Encoding

MOST_IN_A_RUN = 4  # escapes that are shown of a run of unprintable characters

# Control characters except newline, tab and the return before a newline; characters that reverse the direction of a
# line; and bytes that are not UTF-8, which the error handler `surrogateescape` decodes as U+DC80 to U+DCFF.
_ESCAPED = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udcff]")


def readable(encoding: Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they arrive; ids beyond the encoding have no text."""
    return sanitized(encoding.tokens[token] if token < encoding.n_vocab else b"" for token in tokens)


def sanitized(pieces: Iterable[bytes]) -> Iterator[str]:
    r"""Yield bytes as printable text, a part of it after each piece and one at the end.

    Text stays unchanged, including newline and tab. A run of control characters or invalid bytes shows the first four
    as \xNN (beyond ASCII \uNNNN), and … for the rest.
    """
    # A piece may end in the middle of a character, whose bytes wait for the next piece.
    decoder = getincrementaldecoder("utf-8")(errors="surrogateescape")
    waiting = ""  # a return, whose meaning depends on the next character
    run = 0  # length of the current run of escapes
    for piece in chain(pieces, [None]):
        text = waiting + decoder.decode(piece or b"", piece is None)
        waiting = "\r" if text.endswith("\r") and piece is not None else ""
        text = text.removesuffix(waiting)
        parts, end = [], 0
        for match in _ESCAPED.finditer(text):
            run = 1 if match.start() > end else run + 1
            escape = _escape(match[0]) if run <= MOST_IN_A_RUN else "…" * (run == MOST_IN_A_RUN + 1)
            parts += [text[end : match.start()], escape]
            end = match.end()
        if end < len(text):
            run = 0
        yield "".join([*parts, text[end:]])


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"


def shown(encoding: Encoding, tokens: Iterable[int | None], end: int | None = None, until: str = "") -> Iterator[int]:
    """Yield the tokens to show: up to and without `end`, or up to the one that completes the text `until`."""
    wanted, tail = until.encode(), b""
    for token in tokens:
        if token is None or token == end:
            return
        yield token
        if wanted and token < encoding.n_vocab:
            tail += encoding.tokens[token]
            if wanted in tail:
                return
            tail = tail[-len(wanted) :]
