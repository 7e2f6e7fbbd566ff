"""A dataset: token ids to train and to validate on, and the batches drawn from them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tiktoken

from daskgpt.config.errors import require
from daskgpt.data.encodings import encode, get_encoding, specials_of, vocabulary_size
from daskgpt.data.order import shuffled
from daskgpt.data.own_vocabulary import check_wanted, is_to_be_learned, learned_encoding
from daskgpt.data.split import SPANS, split_text, split_tokens
from daskgpt.data.text import STANDARD_LIBRARY, read_text
from daskgpt.data.tokens import Tokens
from daskgpt.formats.llmc_tokens import read_tokens

Batch = tuple[np.ndarray, np.ndarray]
RANDOM, EPOCHS = "random", "epochs"
HASHED_TOKENS = 2**22  # at a time


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two rows of tokens that share none.

    order    in which steps take sequences, where nobody asks for another: see `batch`
    shards   SHA-256 of the files that the tokens are in, where these are known

    Shapes   training (N,), validation (M,)
    Dtype    uint16
    """

    training: Tokens
    validation: Tokens
    vocabulary: int
    encoding_name: str
    description: str
    order: str = RANDOM
    shards: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 by which these tokens are told from others: of all of them, or of the digests of their files.

        Cost     reads all tokens once, unless the digests of their files are known
        """
        found = hashlib.sha256("".join(self.shards).encode())
        for tokens in () if self.shards else (self.training, self.validation):
            for first in range(0, tokens.size, HASHED_TOKENS):
                found.update(np.ascontiguousarray(tokens[first : first + HASHED_TOKENS], "<u2").data)
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class _Part:
    training: np.ndarray
    validation: np.ndarray
    origin: str
    encoding: str


def is_token_source(source: str) -> bool:
    """Whether a source names token files, by its ending; everything else is text."""
    return source.endswith(".bin")


def load_dataset(
    source: str,
    encoding: str | None = None,
    *,
    validation_fraction: float = 0.1,
    held_out: str = SPANS,
    validation_source: str | None = None,
    sequence_length: int = 1,
) -> Dataset:
    """Read a source, encode it, and hold a part out (`data/split.py`); or take that part from a source of its own.

    Without an encoding, token files are taken for GPT-2's and text for bytes; learn:1024 is a vocabulary of so many ids
    that is learned from the training part. Every document begins with end-of-text, and so does every piece of one that
    was cut for validation.

    Shapes   each part at least (sequence_length + 1,), one sequence and its targets
    Dtype    uint16
    Cost     one token file with a validation_source stays mapped; everything else is held in memory
    Errors   ValueError for an unknown encoding, a fraction outside 0 and 1, ids beyond the vocabulary, too little text;
             FileNotFoundError where a source or GPT-2's vocabulary is missing
    """
    name = encoding or ("gpt2" if is_token_source(source) else "bytes")
    where = "load_dataset"
    _check_encoding(where, source, name)
    got: dict[str, object] = {"validation_fraction": validation_fraction}
    require(0 < validation_fraction < 1, where, "validation_fraction must lie between 0 and 1", got, "Try 0.1.")
    if validation_source is None:
        part = _load(source, name, validation_fraction, held_out)
        training, validation, origin = part.training, part.validation, part.origin
        name = part.encoding
    else:
        part = _load(source, name)
        name = part.encoding
        other = _load(validation_source, name)
        training, validation = part.training, other.training
        origin = f"{part.origin}, validation {other.origin}"
    for kind, tokens, of in (("training", training, source), ("validation", validation, validation_source or source)):
        rule = f"the {kind} part must hold at least sequence_length + 1 = {sequence_length + 1} tokens"
        got = {"source": of, "tokens": tokens.size}
        require(tokens.size > sequence_length, where, rule, got, "Give more text or a smaller sequence_length.")
    sizes = f"{training.size:,} training and {validation.size:,} validation tokens"
    return Dataset(training, validation, vocabulary_size(name), name, f"{origin}: {sizes} ({name})")


def _check_encoding(where: str, source: str, name: str) -> None:
    """Nothing is read to find out."""
    if not is_to_be_learned(name):
        vocabulary_size(name)
        return
    check_wanted(name)
    rule, got = "a vocabulary must be learned from text", {"encoding": name, "source": source}
    require(not is_token_source(source), where, rule, got, "Name the encoding of these tokens.")


def whole_source(source: str, name: str) -> np.ndarray:
    """All tokens of a source, every document opened by end-of-text; nothing is held out.

    Errors   as of load_dataset
    """
    return _load(source, name).training


def _load(source: str, name: str, fraction: float = 0.0, held_out: str = SPANS) -> _Part:
    """Both parts of one source; a fraction of 0 leaves the validation empty."""
    if is_token_source(source):
        tokens = read_tokens(source)
        check_tokens(tokens, vocabulary_size(name))
        if fraction == 0:
            return _Part(tokens, tokens[:0], source, name)
        end_of_text = next(iter(specials_of(name).values()))
        training, validation = (_join(pieces, end_of_text) for pieces in split_tokens(tokens, fraction, held_out))
        return _Part(training, validation, source, name)
    documents = read_text(source)
    files = f"{len(documents):,} file{'s' * (len(documents) > 1)}"
    library = f"standard library of Python {platform.python_version()}"
    origin = f"{library if source == STANDARD_LIBRARY else source} ({files})"
    training_text, validation_text = split_text(documents, fraction, held_out)
    if is_to_be_learned(name):
        name = learned_encoding(name, training_text)
    codec = get_encoding(name)
    return _Part(_encode_all(training_text, codec), _encode_all(validation_text, codec), origin, name)


def _encode_all(texts: list[str], codec: tiktoken.Encoding) -> np.ndarray:
    return _join([encode(codec, text) for text in texts], codec.eot_token)


def _join(pieces: list[np.ndarray], end_of_text: int) -> np.ndarray:
    """The pieces in one row, each opened by end-of-text: what follows does not go on from what stands before."""
    mark = np.array([end_of_text], np.uint16)
    marked = [array for piece in pieces for array in ((piece,) if piece[0] == end_of_text else (mark, piece))]
    return np.concatenate(marked) if marked else mark[:0]


def check_tokens(tokens: np.ndarray, vocabulary: int) -> None:
    """Every id must be one of the vocabulary's.

    Cost     reads all tokens once, and once more to say where a wrong one is
    Errors   ValueError for the first id that is not, with its place
    """
    if tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < vocabulary):
        return
    place = int(np.argmax((tokens < 0) | (tokens >= vocabulary)))
    got = {"id": int(tokens[place]), "position": place, "vocabulary": vocabulary}
    rule = "every id must be at least 0 and below the vocabulary"
    require(False, "check_tokens", rule, got, "Use the encoding that the tokens were made with.")


def batch(
    tokens: Tokens,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    step: int,
    order: str = RANDOM,
    vocabulary: int = 0,
) -> Batch:
    """Sequences and the tokens that follow each of theirs: the same for the same seed and step, always.

    targets[b, t] = tokens[start[b] + t + 1]

    order        random: start[b] = Philox(seed, step)[b] mod (N - T). epochs: the tokens are cut into (N - 1) // T
                 sequences, of which an epoch sees each once, in an order of its own (`data/order.py`)
    vocabulary   that every id must be below; 0 = not looked at

    Shapes   tokens (N,) -> tokens (B, T), targets (B, T)
    Dtype    int32
    Errors   ValueError for sizes below 1, a negative seed or step, fewer than T + 1 tokens, or an id beyond the
             vocabulary
    """
    _check_sizes("batch", tokens, batch_size, sequence_length)
    got = {"seed": seed, "step": step}
    require(seed >= 0 and step >= 0, "batch", "seed and step must not be negative", got, "Give 0 or more.")
    starts = _in_epochs if order == EPOCHS else _at_random
    found = _windows(tokens, starts(tokens.size, batch_size, sequence_length, seed, step), sequence_length)
    if vocabulary:
        largest = int(max(part.max() for part in found))
        rule, got = "every id must be below the vocabulary", {"id": largest, "vocabulary": vocabulary, "step": step}
        require(largest < vocabulary, "batch", rule, got, "The token files are damaged: prepare them again.")
    return found


def _at_random(size: int, batch_size: int, sequence_length: int, seed: int, step: int) -> np.ndarray:
    # The raw stream: NumPy keeps it as it is for good, which it does not promise of random integers.
    raw = np.random.Philox(np.random.SeedSequence([seed, step])).random_raw(batch_size)
    return (raw % np.uint64(size - sequence_length)).astype(np.int64)


def _in_epochs(size: int, batch_size: int, sequence_length: int, seed: int, step: int) -> np.ndarray:
    count = (size - 1) // sequence_length
    epochs, places = np.divmod(np.arange(batch_size, dtype=np.int64) + step * batch_size, count)
    starts = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        starts[epochs == epoch] = shuffled(places[epochs == epoch], count, seed, int(epoch))
    return starts * sequence_length


def validation_batches(tokens: Tokens, *, batch_size: int, sequence_length: int, count: int) -> Iterator[Batch]:
    """The same windows every time, spread evenly from the first token to the last; they overlap where tokens are few.

    Shapes   tokens (N,) -> count times tokens (B, T), targets (B, T)
    Dtype    int32
    Errors   ValueError for sizes below 1 or fewer than T + 1 tokens, before the first batch is asked for
    """
    where = "validation_batches"
    _check_sizes(where, tokens, batch_size, sequence_length)
    require(count >= 1, where, "count must be at least 1", {"count": count}, "Give a positive number.")
    windows = batch_size * count
    last = tokens.size - sequence_length - 1
    starts = np.arange(windows, dtype=np.int64) * last // max(1, windows - 1)
    return (_windows(tokens, row, sequence_length) for row in starts.reshape(count, batch_size))


def _windows(tokens: Tokens, starts: np.ndarray, sequence_length: int) -> Batch:
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int32)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def _check_sizes(where: str, tokens: Tokens, batch_size: int, sequence_length: int) -> None:
    for name, size in {"batch_size": batch_size, "sequence_length": sequence_length}.items():
        require(size >= 1, where, f"{name} must be at least 1", {name: size}, "Give a positive number.")
    rule = f"there must be at least sequence_length + 1 = {sequence_length + 1} tokens"
    got = {"tokens": tokens.size}
    require(tokens.size > sequence_length, where, rule, got, "Give more text or a smaller sequence_length.")
