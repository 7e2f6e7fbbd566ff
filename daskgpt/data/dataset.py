"""Token ids for training and validation from texts, pairs, token files or prepared folders, and batches of them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import number_of, require
from daskgpt.config.files import digest_of_file, expanded
from daskgpt.data.pairs import Examples, read_examples
from daskgpt.data.source import PAIRS, PREPARED, STANDARD_LIBRARY, TEXT, TOKENS, Source, recognize
from daskgpt.data.text import SPANS, split_text, split_tokens, texts
from daskgpt.formats import encoding as encodings
from daskgpt.formats.token_files import MANIFEST, read_manifest, read_tokens

Batch = tuple[Any, ...]  # tokens, targets, and of pairs loss weights of the targets; each (B, T)
RANDOM, EPOCHS = "random", "epochs"
WHERE = "load_dataset"


class MappedTokens:
    """Several memory-mapped rows of tokens as one; indexing by a slice or by positions returns arrays.

    Shapes   (N,), N the sum of its parts
    Dtype    that of its parts, uint16 or uint32
    Cost     selected tokens are copied, nothing else is read
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = list(parts)
        self.dtype = np.result_type(np.uint16, *self.parts)
        self.ends = np.cumsum([part.size for part in self.parts], dtype=np.int64)
        self.size = int(self.ends[-1]) if self.parts else 0

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Return selected tokens. Errors   IndexError for a position beyond the end"""
        places = np.arange(*places.indices(self.size)) if isinstance(places, slice) else np.asarray(places)
        numbers = np.searchsorted(self.ends, places, side="right")
        selected = np.empty(places.shape, self.dtype)
        for number in np.unique(numbers):
            inside = numbers == number
            selected[inside] = self.parts[number][places[inside] - (self.ends[number] - self.parts[number].size)]
        return selected


Tokens = np.ndarray | MappedTokens | Examples


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two disjoint rows of tokens.

    origin   a description of their source
    shards   SHA-256 of the token files, if known

    Shapes   training (N,), validation (M,)
    Dtype    uint16 or uint32
    """

    training: Tokens
    validation: Tokens
    vocabulary: int
    encoding_name: str
    origin: str
    shards: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """Origin and sizes as text."""
        sizes = f"{self.training.size:,} training and {self.validation.size:,} validation tokens"
        return f"{self.origin}: {sizes} ({encodings.title_of(self.encoding_name)})"

    @property
    def order(self) -> str:
        """Default order of sequences: see `batch`."""
        return RANDOM if isinstance(self.training, np.ndarray) else EPOCHS

    @property
    def prompt(self) -> list[int]:
        """Tokens of a held-out prompt; empty for text."""
        return self.validation.prompt(0) if isinstance(self.validation, Examples) else []

    def epoch(self, sequence_length: int) -> int:
        """Return the number of sequences that hold the training part once."""
        return _sequences(self.training, sequence_length, sequence_length)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all tokens, or of the digests of their files.

        Cost     reads all tokens once, unless the digests of their files are known
        """
        digest = hashlib.sha256("".join(self.shards).encode())
        dtype = encodings.id_dtype(self.vocabulary).newbyteorder("<")
        for tokens in () if self.shards else (self.training, self.validation):
            assert isinstance(tokens, np.ndarray), "the digests of others are known"
            digest.update(np.ascontiguousarray(tokens, dtype).data)
        return digest.hexdigest()


# Sources


def load_dataset(
    source: str | Source,
    encoding: str | None = None,
    *,
    validation_data: str = "",
    validation_fraction: float = 0.1,
    held_out: str = SPANS,
    sequence_length: int = 1,
) -> Dataset:
    """Read a source, encode it, and hold a part out (`data/text.py`), or take another source for validation.

    Without an encoding, that of prepared tokens is taken, GPT-2's of other token files, and bytes of text; learn:1024
    learns a vocabulary of 1,024 ids from the training part. Every document begins with end-of-text, and so does every
    piece of one that was cut for validation. Pairs become examples (`data/pairs.py`). Of prepared tokens the shards
    stay memory-mapped.

    source                see `data/source.py`
    validation_fraction   above 0 and below 1
    validation_data       another source, of which prepared tokens give their held-out part; "" holds out a part of the
                          first

    Shapes   each part at least (sequence_length + 1,), one sequence and its targets
    Dtype    that of the ids
    Cost     everything but token files is held in memory
    Errors   ValueError for an unknown encoding, ids beyond the vocabulary, too little text, changed shards;
             FileNotFoundError if a source or GPT-2's vocabulary is missing
    """
    training = recognize(source) if isinstance(source, str) else source
    validating = recognize(validation_data) if validation_data else None
    name = encoding_for(training, encoding)
    fraction = 0.0 if validating else validation_fraction
    dataset = _load(training, name, fraction, held_out, sequence_length)
    if validating:
        same, got = (training.kind == PAIRS) == (validating.kind == PAIRS), {"data": training.kind}
        rule, advice = "both sources must be pairs, or none", "Give --validation-data of the same kind."
        require(same, WHERE, rule, got | {"validation_data": validating.kind}, advice)
        other = load_validation(validating, dataset.encoding_name, sequence_length)
        origin = f"{dataset.origin}, validation on {other.origin}"
        shards = (dataset.digest, other.digest)
        dataset = replace(dataset, validation=other.validation, origin=origin, shards=shards)
    for kind, tokens in (("training", dataset.training), ("validation", dataset.validation)):
        # Each pair fills a sequence.
        fine = isinstance(tokens, Examples) or tokens.size > sequence_length
        rule = f"the {kind} part must hold a sequence of {sequence_length} tokens and one more"
        advice = "Give more text or a smaller --sequence-length."
        require(fine, WHERE, rule, {"data": dataset.origin, "tokens": tokens.size}, advice)
    return dataset


def load_validation(source: Source, encoding: str, sequence_length: int = 1) -> Dataset:
    """Return a dataset with all of a source in its validation part; of prepared tokens, what was held out.

    Errors   as of load_dataset
    """
    return _load(source, encoding_for(source, encoding), 1.0, SPANS, sequence_length)


def encoding_for(source: Source, wanted: str | None, default: str = "bytes") -> str:
    """Return the encoding of a source's tokens: the wanted one, or that of its token files.

    default   of text, if no encoding is wanted; token files of unknown encoding are GPT-2's then

    Errors    ValueError for an unknown encoding, or another one than that of the token files
    """
    written = source.encoding
    name = wanted or written or ("gpt2" if source.kind == TOKENS else default)
    encodings.vocabulary_size(name)  # known without reading anything
    rule, got = "a vocabulary must be learned from text", {"encoding": name, "source": source.name}
    fine = source.kind == TEXT or not encodings.is_to_be_learned(name)
    require(fine, WHERE, rule, got, "Name the encoding of these tokens.")
    rule, got = "the encoding must be that of the tokens", {"encoding": encodings.title_of(name)}
    got |= {"source": f"{source.name} ({encodings.title_of(written)})"}
    advice = "Leave another --encoding out, or prepare the text again with --encoding and the folder of the model."
    require(written in ("", name), WHERE, rule, got, advice)
    return name


def _load(source: Source, name: str, fraction: float, held_out: str, sequence_length: int) -> Dataset:
    """Return both parts of a source. With a fraction of 0 the validation is empty, and with 1 the training, unless the
    source has both parts itself; of pairs, the other part stands in its place.
    """
    if source.kind == PREPARED:
        return _prepared(expanded(source.name))
    if source.kind == PAIRS:
        codec = encodings.get_encoding(name)
        parts, origin, digest = read_examples(source, codec, fraction, held_out, sequence_length)
        return Dataset(parts[0], parts[-1], codec.n_vocab, name, origin, (digest,))
    if source.kind == TOKENS:
        vocabulary = encodings.vocabulary_size(name)
        rows = [read_tokens(file.path) for file in source.files]
        for file, row in zip(source.files, rows):
            check_tokens(row, vocabulary, file.path)
        tokens = rows[0] if len(rows) == 1 else np.concatenate(rows)
        training, validation = (tokens[:0], tokens) if fraction == 1 else (tokens, tokens[:0])
        if 0 < fraction < 1:
            end_of_text = encodings.end_of_text_id(name)
            training, validation = (_join(pieces, end_of_text) for pieces in split_tokens(tokens, fraction, held_out))
        return Dataset(training, validation, vocabulary, name, f"{source.name} ({source.described})")
    documents = read_text(source)
    library = f"standard library of Python {platform.python_version()}"
    origin = f"{library if source.name == STANDARD_LIBRARY else source.name} ({source.described})"
    parts_of_text = split_text(documents, fraction, held_out)
    if encodings.is_to_be_learned(name):
        name = encodings.learn_encoding(parts_of_text[0], encodings.vocabulary_size(name), name)
    codec = encodings.get_encoding(name)
    encoded = ([codec.encode(text, source.name) for text in part] for part in parts_of_text)
    training, validation = (_join(part, codec.eot_token) for part in encoded)
    return Dataset(training, validation, codec.n_vocab, name, origin)


def read_text(source: Source) -> list[str]:
    """Return the documents of a source of text in the order of its files, without empty ones.

    Cost     reads every file once; the text stays in memory
    Errors   ValueError if there is no text, or it is not UTF-8; OSError if a file cannot be read
    """
    documents = list[str]()
    for file in source.files:
        parts = [text for _, text in texts(file)]
        documents += parts if file.records else ["".join(parts)]
    documents = [document for document in documents if document.strip()]
    rule, advice = "the text must not be empty", "Give a source that holds text."
    require(bool(documents), WHERE, rule, {"source": source.name}, advice)
    return documents


def _join(pieces: list[np.ndarray], end_of_text: int) -> np.ndarray:
    """Return the pieces in one row, each after an end-of-text, since no piece continues the previous one."""
    mark = np.array([end_of_text], encodings.id_dtype(end_of_text + 1))
    filled = (piece for piece in pieces if piece.size)
    marked = [array for piece in filled for array in ((piece,) if piece[0] == end_of_text else (mark, piece))]
    return np.concatenate(marked) if marked else mark[:0]


def check_tokens(tokens: np.ndarray, vocabulary: int, path: str = "") -> None:
    """Check that every id is one of the vocabulary's.

    path     of their file, for the message

    Cost     reads all tokens once
    Errors   ValueError if one is not
    """
    least, largest = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    got = {"least": least, "largest": largest, "vocabulary": vocabulary} | ({"path": path} if path else {})
    advice = "Name the --encoding of these tokens, or make their files again if they are damaged; ids without a header "
    advice += "must be little-endian, of 2 bytes each."
    rule = "every id must be at least 0 and below the vocabulary"
    require(least >= 0 and largest < vocabulary, "check_tokens", rule, got, advice)


def _prepared(folder: Path) -> Dataset:
    """Open the tokens of a prepared folder.

    Cost     headers are read, and all of a shard that was written to after the manifest
    Errors   FileNotFoundError if it is incomplete; ValueError for changed shards
    """
    manifest, shards = read_manifest(folder), list[str]()
    written = (folder / MANIFEST).stat().st_mtime_ns
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for rows, part in zip(parts, (manifest.train, manifest.val)):
        for shard in part.shards:
            path = folder / shard.file
            rows.append(read_tokens(path))
            old = path.stat().st_mtime_ns <= written
            same = rows[-1].size == shard.tokens and (old or digest_of_file(path) == shard.sha256)
            got = {"path": path, "tokens": rows[-1].size}
            require(same, WHERE, "a shard must be unchanged", got, "Remove the folder, and prepare it again.")
            shards.append(shard.sha256)
    training, validation = map(MappedTokens, parts)
    origin = f"{folder} ({number_of(len(shards), 'shard')})"
    return Dataset(training, validation, manifest.ids, manifest.encoding, origin, tuple(shards))


# Batches


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
    """Return sequences and the token after each of theirs; seed and step determine both.

    targets[b, t] = tokens[start[b] + t + 1]

    Pairs give an example a sequence, and loss weights.

    order        random: start[b] = Philox(seed, step)[b] mod (N - T). epochs: the tokens are cut into (N - 1) // T
                 sequences, of which an epoch sees each once, in an order of its own (`shuffled`)
    vocabulary   bound of every id, but of those of pairs, which are made here; 0 = not checked

    Shapes   tokens (N,), N > T -> tokens (B, T), targets (B, T), of pairs weights (B, T)
    Dtype    int32, weights float64
    Errors   ValueError for an id beyond the vocabulary
    """
    stride = sequence_length if order == EPOCHS else 1
    count = _sequences(tokens, sequence_length, stride)
    if order == EPOCHS:
        numbers = _in_epochs(count, batch_size, seed, step)
    else:
        # The raw stream, which NumPy keeps stable; it does not promise this for random integers.
        raw = np.random.Philox(np.random.SeedSequence([seed, step])).random_raw(batch_size)
        numbers = (raw % np.uint64(count)).astype(np.int64)
    if isinstance(tokens, Examples):
        return tokens.batch(numbers, sequence_length)
    return _windows(tokens, numbers * stride, sequence_length, vocabulary)


def _sequences(tokens: Tokens, length: int, stride: int) -> int:
    """Return how many sequences there are, each so many tokens after the one before it; of pairs, one an example."""
    return tokens.count if isinstance(tokens, Examples) else (tokens.size - length - 1) // stride + 1


def _in_epochs(count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    epochs, places = np.divmod(np.arange(batch_size, dtype=np.int64) + step * batch_size, count)
    numbers = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        numbers[epochs == epoch] = shuffled(places[epochs == epoch], count, seed, int(epoch))
    return numbers


def validation_batches(
    tokens: Tokens, *, batch_size: int, sequence_length: int, count: int, vocabulary: int = 0
) -> Iterator[Batch]:
    """Return the same windows every time, spread evenly from the first token to the last.

    They overlap where tokens are few. Of pairs, each batch has other examples, and there are fewer batches if need be.

    vocabulary   bound of every id; 0 = not checked

    Shapes   tokens (N,), N > T -> count times tokens (B, T), targets (B, T), of pairs weights (B, T)
    Dtype    int32, weights float64
    Errors   ValueError for an id beyond the vocabulary
    """
    if isinstance(tokens, Examples):
        return iter(tokens.validation_batches(batch_size, sequence_length, count))
    windows = batch_size * count
    last = tokens.size - sequence_length - 1
    starts = np.arange(windows, dtype=np.int64) * last // max(1, windows - 1)
    return (_windows(tokens, row, sequence_length, vocabulary) for row in starts.reshape(count, batch_size))


def _windows(tokens: np.ndarray | MappedTokens, starts: np.ndarray, sequence_length: int, vocabulary: int) -> Batch:
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)]
    if vocabulary:
        check_tokens(windows, vocabulary)  # before int32, in which the largest ids of 4 bytes are negative
    windows = windows.astype(np.int32)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


class BatchLoader:
    """Batches of a dataset by the numbers of their steps. A thread reads those of the next steps ahead, so that no step
    waits for a disk; the batch of a step is still a function of its number.
    """

    def __init__(self, dataset: Dataset, batch_size: int, sequence_length: int, seed: int, order: str) -> None:
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "vocabulary": dataset.vocabulary}
        self.make = partial(batch, dataset.training, seed=seed, order=order, **sizes)
        self.reader = ThreadPoolExecutor(1, "batches")
        self.numbers: Sequence[int] = ()  # of the next batches
        self.coming: Future[list[Batch]] = Future()

    def _read(self, numbers: Sequence[int]) -> list[Batch]:
        return [self.make(step=number) for number in numbers]

    def take(self, numbers: Sequence[int]) -> list[Batch]:
        """Return the batches of these steps, and begin to read as many after them.

        Errors   ValueError for a token beyond the vocabulary, OSError of the disk
        """
        if list(numbers) != list(self.numbers):
            self.coming.cancel()
            self.coming = self.reader.submit(self._read, numbers)
        taken, self.numbers = self.coming, range(numbers[-1] + 1, numbers[-1] + 1 + len(numbers))
        self.coming = self.reader.submit(self._read, self.numbers)
        return taken.result()

    def close(self) -> None:
        """End its thread."""
        self.reader.shutdown(wait=False, cancel_futures=True)


# The order of an epoch

_ROUNDS = 6
# splitmix64's constants (Steele, Lea and Flood 2014): every bit of a half depends on every bit of the other.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def shuffled(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Return which of `count` sequences are at some positions of an epoch.

    A Feistel network permutes the next larger square power of two; a result beyond `count` is permuted again, which
    terminates, since each position lies on a cycle of the permutation.

    Shapes   positions (n,) -> (n,)
    Dtype    int64, from 0 to count - 1
    Cost     constant memory for any count
    Source   Black and Rogaway 2002, Ciphers with arbitrary finite domains: cycle walking
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch, count])).random_raw(_ROUNDS)
    permuted = _permuted(np.asarray(places, np.uint64), half, keys)
    while (beyond := permuted >= np.uint64(count)).any():
        permuted = np.where(beyond, _permuted(permuted, half, keys), permuted)
    return permuted.astype(np.int64)


def _permuted(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = right ^ key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return np.asarray((left << shift) | right)
