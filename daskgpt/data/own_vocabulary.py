"""A text's own vocabulary, learned when it is trained on: the encoding `learn:1024` means so many ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from daskgpt.config.errors import require
from daskgpt.data.corpus.learning import check_learnable, learn_vocabulary
from daskgpt.formats.vocabulary_file import know_vocabulary, written_vocabulary

PREFIX = "learn:"
_WHERE = "load_dataset"
_PIECE = 2**20  # characters that the learner is given at once


def is_to_be_learned(encoding: str) -> bool:
    """Whether an encoding is one that the text has yet to tell."""
    return encoding.startswith(PREFIX)


def check_wanted(encoding: str) -> int:
    """How many ids an encoding to be learned has.

    Errors   ValueError for a number that is none, or where the library that learns is not installed
    """
    size = encoding.removeprefix(PREFIX)
    rule = f"an encoding to be learned must be {PREFIX} and a number of ids"
    require(size.isascii() and size.isdigit(), _WHERE, rule, {"encoding": encoding}, f"Try {PREFIX}1024.")
    check_learnable(int(size), _WHERE, PREFIX.rstrip(":"))
    return int(size)


def learned_encoding(encoding: str, texts: Iterable[str]) -> str:
    """The name of the vocabulary that some texts tell, which is known from here on: it is that of its content.

    encoding   such as learn:1024
    texts      what is trained on, and nothing that is held out

    Errors     ValueError as of check_wanted
    """
    ranks = learn_vocabulary(_pieces(texts), check_wanted(encoding))
    return know_vocabulary(written_vocabulary(ranks), encoding)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    return (text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE))
