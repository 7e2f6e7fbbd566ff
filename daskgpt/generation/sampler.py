"""Generation of text, a token at a time: the choice of the next token, texts that grow together, and what of them a
terminal is shown, without control sequences and invalid bytes.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from itertools import chain
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from daskgpt.config.errors import require, whole_number
from daskgpt.config.model import ModelConfig
from daskgpt.config.settings import Checked, setting
from daskgpt.formats.encoding import Encoding, encoding_of_model, get_encoding, is_to_be_learned
from daskgpt.formats.huggingface import encoding_named
from daskgpt.formats.stored_model import StoredModel
from daskgpt.generation.decoder import Weights, decoder_of
from daskgpt.model.parameters import check_config, check_parameters
from daskgpt.training.checkpoint import open_model_of

PRECISIONS = ("float32", "bfloat16")


class DecodingConfig(Checked):
    """Settings of reading tokens with a model."""

    encoding: str = setting(
        "", "bytes, gpt2, a vocabulary's file, or a tokenizer's folder, in place of the model's own"
    )
    precision: str = setting("float32", "precision of weights, keys and values", choices=PRECISIONS)
    threads: int = setting(
        0, "threads that share the rows of each matrix; 0 = all cores, or fewer for a small model", most=2**12
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, got = "a model that is read must not get a new vocabulary", {"encoding": self.encoding}
        require(not is_to_be_learned(self.encoding), "encoding", rule, got, "Leave it out.")

    def opened(self, path: str | Path) -> tuple[StoredModel, Encoding, int]:
        """Open a model; return it, its encoding, and the length of the sequences that it was trained on.

        Errors   as of `daskgpt.load`; ValueError if neither the file nor the vocabulary determines the encoding
        """
        model = open_model_of(path)
        name = encoding_named(self.encoding) if self.encoding else model.encoding
        encoding = get_encoding(name or encoding_of_model(model.config.vocabulary))
        return model.loaded(), encoding, model.sequence_length or model.config.positions


class Choice(Checked):
    """Settings of the choice of a token.

    Source       Fan et al. 2018, arXiv:1805.04833, for top_k; Holtzman et al. 2020, arXiv:1904.09751, for top_p, which
                 counts probabilities after the temperature and among those that top_k leaves
    """

    temperature: float = setting(1.0, "0 = always the likeliest token, 1 = the model's own probabilities", most=1e30)
    top_k: int = setting(0, "choose among this many likeliest tokens; 0 = all")
    top_p: float = setting(
        1.0, "choose among the fewest likeliest tokens with at least this much probability; 1 = all", least=1e-9, most=1
    )

    def __call__(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """Return one token, chosen by the scores.

        Shapes   logits (vocabulary,) float32
        Errors   ValueError for scores that are not finite
        """
        top, temperature = logits.max(), np.float32(self.temperature)
        rule, advice = "a model's scores must be finite", "Its weights are damaged, or its training has diverged."
        require(bool(np.isfinite(top)), "sample", rule, {"largest": top}, advice)
        if temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):
            weights = np.exp((logits - top) / temperature)
        weights[weights < self._least(weights)] = 0
        sums = np.cumsum(weights, dtype=np.float64)
        # A product with a number just below 1 may round up to the sum itself, beyond the last token.
        drawn = min(random.random() * sums[-1], np.nextafter(sums[-1], 0))
        return int(np.searchsorted(sums, drawn, side="right"))

    def _least(self, weights: np.ndarray) -> np.float32:
        """Return the weight of the least likely token that may be chosen."""
        least = np.float32(0)
        if 0 < self.top_k < weights.size:
            least = np.partition(weights, -self.top_k)[-self.top_k]
        if self.top_p < 1:
            ordered = np.sort(weights[weights >= least])[::-1]
            sums = np.cumsum(ordered, dtype=np.float64)
            least = ordered[np.searchsorted(sums, self.top_p * sums[-1])]
        return np.float32(least)


def sample(
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray],
    prompt: Sequence[int],
    count: int,
    *,
    context: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    precision: str = "float32",
    threads: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Return an iterator of the next `count` token ids after the prompt, each computed when it is taken.

    prompt       token ids, at least one
    context      greatest number of earlier tokens that the model reads, 0 = its positions
    temperature  0 = always the likeliest token, 1 = the model's own probabilities
    top_k        choose among this many likeliest tokens, 0 = all
    top_p        choose among the fewest likeliest tokens with at least this much probability, 1 = all
    seed         seed of the random choices
    precision    float32, or bfloat16, which rounds matrices, keys and values; everything else stays float32
    threads      threads that share the rows of each matrix, 0 = all cores, or fewer for a small model; they change no
                 bit
    end          a token that ends the text, such as end-of-text; None = none

    Dtype        parameters float32
    Errors       at once: ValueError for an empty prompt, a token outside the vocabulary, a number out of its bounds, an
                 unknown precision, parameters that are not of this configuration; TypeError for values of other kinds
    Cost         a token reads every weight once, and the cached keys and values of the context. When a text outgrows
                 the context, the model rereads its newer half (`Texts`).

    >>> import daskgpt
    >>> config = daskgpt.preset("tiny", blocks=1)
    >>> parameters = daskgpt.initial_parameters(config, seed=0)
    >>> text = list(daskgpt.sample(config, parameters, list(b"def "), 10, temperature=0.8, seed=1))
    >>> len(text), text == list(daskgpt.sample(config, parameters, list(b"def "), 10, temperature=0.8, seed=1))
    (10, True)
    """
    ids = prompt_ids(check_config("sample", config), prompt)
    for name, value in {"count": count, "context": context, "seed": seed}.items():
        whole_number(value, "sample", name)
    choice, decoding = Choice(temperature, top_k, top_p), DecodingConfig(precision=precision, threads=threads)
    check_parameters(config, parameters)
    weights = Weights(config, parameters, decoding.precision)
    texts = Texts(weights, [ids], context, longest=len(ids) + count, threads=decoding.threads)
    return (token for (token,) in texts.write(count, choice, seed, end) if token is not None)


def prompt_ids(config: ModelConfig, prompt: Any) -> list[int]:
    """Return a prompt as a list of token ids.

    Errors   TypeError for anything but whole numbers, such as text, numbers with a fraction, or several rows;
             ValueError for an empty prompt, and for a token outside the vocabulary
    """
    listed = isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes)
    tokens: list[Any] = list(prompt) if listed else [None]
    rule, advice = "the prompt must be whole numbers, the ids of tokens", "Encode it: list(b'text') for bytes."
    whole, shown = all(isinstance(token, Integral) for token in tokens), " ".join(repr(prompt).split())[:40]
    require(whole, "sample", rule, {"prompt": shown}, advice, TypeError)
    require(bool(tokens), "sample", "the prompt must have at least one token", {"prompt": prompt}, "Give some text.")
    ids = [int(token) for token in tokens]
    got = {"least": min(ids), "largest": max(ids), "vocabulary": config.vocabulary}
    rule, advice = "tokens must lie in the vocabulary", "Use the encoding that the model was trained with."
    require(min(ids) >= 0 and max(ids) < config.vocabulary, "sample", rule, got, advice)
    return ids


def window(length: int, context: int) -> int:
    """Return the first token of a text of this length that the model reads: 0 if the text fits the context.

    The window of a longer text moves by half a context at a time; in between, cached tokens keep their positions.
    """
    if length <= context:
        return 0
    stride = max(context // 2, 1)
    return -(-(length - context) // stride) * stride


class Texts:
    """Texts that grow together, with their cache.

    A text's tokens depend only on its own tokens, its number and the seed, not on other texts or the number of calls
    of `write`.

    prompts   token ids of each text, at least one
    context   greatest number of earlier tokens that the model reads, 0 = its positions
    longest   final length of the longest text, 0 = unknown; it may reduce the memory for keys and values
    threads   0 = all cores, or fewer for a small model
    """

    def __init__(
        self, weights: Weights, prompts: Sequence[Sequence[int]], context: int = 0, longest: int = 0, threads: int = 0
    ) -> None:
        positions = weights.config.positions
        self.weights = weights
        self.context = min(context or positions, positions)
        capacity = min(self.context, longest or self.context)
        self.decoder = decoder_of(weights, len(prompts), capacity, threads)
        self.tokens = [list(prompt) for prompt in prompts]
        self.read = [0] * len(prompts)  # number of tokens of each text that were read
        self.first = [0] * len(prompts)  # first token of each text's window
        self.random: list[np.random.Generator] = []
        self.rate = Rate()

    def scores(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the scores of the next token of some of the texts.

        Shapes   -> logits (len(numbers), vocabulary) float32
        """
        rows: list[tuple[int, int, int]] = []
        last = []
        for number in numbers:
            tokens, first = self.tokens[number], window(len(self.tokens[number]), self.context)
            begin = self.read[number] if first == self.first[number] else first
            # A text that has not grown is scored again after its last token.
            begin = min(begin, len(tokens) - 1)
            rows += [(number, position - first, tokens[position]) for position in range(begin, len(tokens))]
            # What is not read yet is not counted: Ctrl-C may come while a long text is being read.
            self.first[number], self.read[number] = first, begin
            last.append(len(rows) - 1)
        start = perf_counter()
        scores = self.decoder.read(rows, last)
        for number in numbers:
            self.read[number] = len(self.tokens[number])
        if len(rows) == len(last):
            self.rate.seconds += perf_counter() - start
            self.rate.tokens += len(last)
        return scores

    def write(self, count: int, choice: Choice, seed: int = 0, end: int | None = None) -> Iterator[list[int | None]]:
        """Yield lists of the next token of every text, up to `count` times; None for a text that has ended.

        The random choices of a text follow from the seed and its number, and continue with the next call.
        """
        if not self.random:
            self.random = [np.random.default_rng([seed, number]) for number in range(len(self.tokens))]
        going = list(range(len(self.tokens)))
        for _ in range(count):
            if not going:
                return
            tokens: list[int | None] = [None] * len(self.tokens)
            for number, logits in zip(going, self.scores(going), strict=True):
                token = choice(logits, self.random[number])
                self.tokens[number].append(token)
                tokens[number] = token
            going = [number for number in going if tokens[number] != end or end is None]
            yield tokens


@dataclass
class Rate:
    """The rate of steps that read one token of each text: number of tokens, and seconds."""

    tokens: int = 0
    seconds: float = 0.0


# Text for a terminal

# Control characters except newline and tab; characters that reverse the direction of a line.
_ESCAPED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def readable(encoding: Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they arrive."""
    return sanitized(map(encoding.bytes_of, tokens))


def sanitized(pieces: Iterable[bytes]) -> Iterator[str]:
    r"""Yield bytes as printable text, a part of it after each piece and one at the end.

    Newline and tab stay, and a return becomes a newline; other control characters and invalid bytes become escapes, as
    of Python.
    """
    # A piece may end in the middle of a character, or between return and newline: the rest waits for the next piece.
    decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("backslashreplace"), translate=True)
    for piece in chain(pieces, [None]):
        text = decoder.decode(piece or b"", final=piece is None)
        yield _ESCAPED.sub(lambda match: ascii(match[0])[1:-1], text)


def shown(encoding: Encoding, tokens: Iterable[int | None], end: int | None = None, until: str = "") -> Iterator[int]:
    """Yield the tokens to show: up to and without `end`, or up to the one that completes the text `until`."""
    wanted, tail = until.encode(), b""
    for token in tokens:
        if token is None or token == end:
            return
        yield token
        if wanted:
            tail += encoding.bytes_of(token)
            if wanted in tail:
                return
            tail = tail[-len(wanted) :]
