"""Losses of a text's tokens by a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from daskgpt.generation.decoder import Decoder, EagerDecoder, Weights, decoder_of

Row = tuple[int, int, int]  # text, position, token


def losses_of(decoder: Decoder | EagerDecoder, rows: Sequence[Row], targets: Sequence[int]) -> np.ndarray:
    """Return the loss, in nats, of the tokens that follow rows.

    rows      rows as `Decoder.read` takes them
    targets   the token after each row, -1 if its loss is not wanted

    Shapes    -> (number of wanted targets,) float64
    """
    losses = []
    most = decoder.most_rows
    for first in range(0, len(rows), most):
        wanted = np.array(targets[first : first + most])
        (scored,) = np.nonzero(wanted >= 0)
        logits = decoder.read(rows[first : first + most], scored.tolist())
        top = logits.max(axis=1, initial=-np.inf)
        likely = logits[np.arange(len(scored)), wanted[scored]].astype(np.float64)
        logits -= top[:, None]
        sums = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
        losses.append(np.log(sums) + top - likely)
    return np.concatenate(losses)


def sequence_losses(weights: Weights, tokens: np.ndarray, length: int, threads: int = 0) -> Iterator[np.ndarray]:
    """Yield an array per sequence of a text with the loss, in nats, of every token but the first of the text.

    Each sequence is read from its first token on, with positions from 0: its first predicted token has one token
    before it, its last one `length`.

    Shapes   tokens (N,), at least 2
    """
    rows = (tokens[first : first + length + 1] for first in range(0, len(tokens) - 1, length))
    return response_losses(weights, ((row, np.ones(len(row), bool)) for row in rows), length, threads)


def response_losses(
    weights: Weights, rows: Iterable[tuple[np.ndarray, np.ndarray]], length: int, threads: int = 0
) -> Iterator[np.ndarray]:
    """Yield an array per example with the loss, in nats, of each token that counts.

    rows     tokens, at most `length` and one more, and whether each counts; the first one does not

    Shapes   both of a row (n,) -> (number that count,) float64
    """
    decoder = decoder_of(weights, 1, length, threads)
    for tokens, counted in rows:
        read = [(0, position, token) for position, token in enumerate(tokens[:-1].tolist())]
        yield losses_of(decoder, read, np.where(counted, tokens.astype(np.int64), -1)[1:].tolist())
