"""A model's tokens as text to show: up to where it ends; it steers no terminal, and bytes that are no text are few."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator

from tiktoken import Encoding

from daskgpt.data.encodings import END_OF_TEXT

MOST_IN_A_RUN = 4  # characters that are shown of what cannot be shown as it is

# Control characters but newline, tab and the return before a newline; what turns the direction of a line around; and
# bytes that are not UTF-8, which the error handler `surrogateescape` leaves as U+DC80 to U+DCFF.
_ESCAPED = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udcff]")


class Readable:
    r"""Bytes, as they come, to text that can be shown.

    Text stays as it is, newline and tab included. Of control characters and of bytes that are no text, each run shows
    the first four as \xNN (beyond ASCII \uNNNN), and one … for what follows.
    """

    def __init__(self) -> None:
        # A token may end in the middle of a character: what is not text yet waits for the next one.
        self.decoder = getincrementaldecoder("utf-8")(errors="surrogateescape")
        self.waiting = ""  # a return, of which the next character decides what it is
        self.run = 0

    def feed(self, data: bytes, final: bool = False) -> str:
        """What can be shown by now; `final` says that nothing follows."""
        text = self.waiting + self.decoder.decode(data, final)
        self.waiting = "\r" if text.endswith("\r") and not final else ""
        text = text.removesuffix(self.waiting)
        parts, end = [], 0
        for match in _ESCAPED.finditer(text):
            parts.append(self._kept(text[end : match.start()]))
            self.run += 1
            parts.append(_escape(match[0]) if self.run <= MOST_IN_A_RUN else "…" * (self.run == MOST_IN_A_RUN + 1))
            end = match.end()
        return "".join([*parts, self._kept(text[end:])])

    def _kept(self, text: str) -> str:
        if text:
            self.run = 0
        return text


def readable(encoding: Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens, to be shown as they come; an id that only the model knows is none."""
    text = Readable()
    for token in tokens:
        yield text.feed(encoding.decode_single_token_bytes(token) if token < encoding.n_vocab else b"")
    yield text.feed(b"", final=True)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
        return f"\\x{code:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"


def end_of_text(encoding: Encoding) -> int:
    """The id that ends a document."""
    return int(encoding.encode_single_token(END_OF_TEXT))


def shown(encoding: Encoding, tokens: Iterable[int | None], end: int | None = None, until: str = "") -> Iterator[int]:
    """The tokens that are shown: up to `end`, which is not, or up to the one that completes the words `until`."""
    wanted, tail = until.encode(), b""
    for token in tokens:
        if token is None or token == end:
            return
        yield token
        if wanted and token < encoding.n_vocab:
            tail += encoding.decode_single_token_bytes(token)
            if wanted in tail:
                return
            tail = tail[-len(wanted) :]
