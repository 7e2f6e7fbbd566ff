"""Where a text ends: at end of text, or at words that somebody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tiktoken import Encoding

from daskgpt.formats.vocabulary import END_OF_TEXT


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
