"""Evaluate a model on a text.

A text (a file, a folder, a glob), token files (llm.c's or nanoGPT's), or the held-out part of prepared tokens:
loss          nats a token: every token but the first is predicted once, in sequences that follow one another, from
              the tokens before it in its sequence; documents begin with end-of-text
perplexity    e to the loss; above the largest float inf, in JSON null
bits a byte   all nats / ln 2 / bytes of predicted text (end-of-text has none), which compares models with different
              encodings

Pairs of prompt and response: the same figures, of the responses and the end-of-text after each.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, run_command
from daskgpt.config.settings import setting
from daskgpt.data.dataset import Tokens, check_tokens, load_validation
from daskgpt.data.pairs import Examples
from daskgpt.data.source import PREPARED, recognize
from daskgpt.formats.encoding import Encoding
from daskgpt.generation.decoder import Decoder, EagerDecoder, Weights, decoder_of
from daskgpt.generation.sampler import DecodingConfig
from daskgpt.training.job import compile_kernels

Row = tuple[np.ndarray, np.ndarray]  # tokens, and whether the loss of each counts, but of the first one
MOST_NATS = math.log(sys.float_info.max)  # a larger loss has no perplexity, which JSON can only say as null
Figures = dict[str, Any]  # numbers by name, in the order of `--json`


class EvaluateConfig(DecodingConfig):
    """Settings of an evaluation."""

    data: str = setting("", "a text, folder, glob or token file; prepared tokens; or pairs")
    limit: int = setting(0, "number of tokens or pairs to use, from the first on; 0 = all")
    sequence_length: int = setting(0, "length of a text's sequences; 0 = the model's own", unit="tokens")


def main(arguments: list[str]) -> int:
    """Print loss, perplexity and bits a byte."""
    flags = Parser(prog="daskgpt.evaluate", description=__doc__)
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    flags.add_argument("--json", action="store_true", help="print one line of JSON instead")
    values, options = flags.read(arguments, EvaluateConfig)
    require(bool(options.data), "evaluate", "--data must name a file", {"data": "nothing"}, "Give a text, for example.")
    source = recognize(options.data)
    weights, encoding, length = options.opened(values.model)
    length = options.sequence_length or length
    rule, got = "a sequence must not be longer than the model's positions", {"sequence_length": length}
    got |= {"positions": weights.config.positions}
    require(length <= weights.config.positions, "evaluate", rule, got, "Shorten the sequence.")
    dataset = load_validation(source, encoding.name, length)
    data = f"{dataset.origin}{' (what is held out)' * (source.kind == PREPARED)}"
    figures = measure(weights, options, encoding, dataset.validation, length)
    facts = {"model": str(values.model), "data": options.data, "precision": options.precision}
    print(json.dumps(facts | figures) if values.json else describe(facts | {"data": data}, figures))
    return 0


def measure(weights: Weights, options: EvaluateConfig, encoding: Encoding, tokens: Tokens, length: int) -> Figures:
    """Return loss, perplexity and bits per byte of a text, or of responses and the end-of-text after each."""
    rows, pairs = rows_of(tokens, options.limit, length), {}
    if isinstance(tokens, Examples):
        pairs = {"pairs": len(rows)}
    counted = np.concatenate([row[1:][counts[1:]] for row, counts in rows]) if rows else np.empty(0, np.int64)
    rule, got = "there must be at least two tokens", {"data": options.data, "tokens": tokens.size}
    require(counted.size > 0, "evaluate", rule, got, "Give more text.")
    for row, _ in rows:
        check_tokens(row, min(weights.config.vocabulary, encoding.n_vocab))
    compile_kernels(uses=weights.config.uses | {"decoding"})
    nats, count = 0.0, 0
    with tqdm(total=counted.size, unit="token", unit_scale=True, disable=None, leave=False) as line:
        for losses in losses_of(weights, rows, length, options.threads):
            nats, count = nats + float(losses.sum()), count + len(losses)
            line.update(len(losses))
            line.set_postfix_str(f"loss {nats / count:.4f}", refresh=False)
    size = int(encoding.sizes[counted].sum())
    loss = nats / count
    rule, advice = "a model's loss must be finite", "Its weights are damaged, or its training has diverged."
    require(math.isfinite(loss), "evaluate", rule, {"loss": loss}, advice)
    return pairs | {
        "tokens": count,
        "bytes": size,
        "loss": round(loss, 6),
        "perplexity": round(math.exp(loss), 4) if loss < MOST_NATS else None,
        "bits_a_byte": round(nats / math.log(2) / size, 6) if size else None,
        "sequence_length": length,
    }


def rows_of(tokens: Tokens, limit: int, length: int) -> list[Row]:
    """Return the sequences that are read: examples, or a text cut so that every token but the first is predicted once.

    limit   pairs, or tokens to predict; 0 = all
    """
    if isinstance(tokens, Examples):
        return [tokens.row(number) for number in range(min(limit or tokens.count, tokens.count))]
    text = np.asarray(tokens[: limit + 1] if limit else tokens[:])
    parts = (text[first : first + length + 1] for first in range(0, len(text) - 1, length))
    return [(part, np.ones(len(part), bool)) for part in parts]


def losses_of(weights: Weights, rows: Iterable[Row], length: int, threads: int = 0) -> Iterator[np.ndarray]:
    """Yield an array per row with the loss, in nats, of each token that counts.

    rows     at most `length` tokens and one more; each is read from its first token on, with positions from 0

    Shapes   -> (number that count,) float64
    """
    decoder = decoder_of(weights, 1, length, threads)
    for tokens, counted in rows:
        wanted = np.where(counted, tokens.astype(np.int64), -1)[1:]
        read = [(0, position, token) for position, token in enumerate(tokens[:-1].tolist())]
        most = decoder.most_rows
        parts = (slice(first, first + most) for first in range(0, len(read), most))
        yield np.concatenate([_losses(decoder, read[part], wanted[part]) for part in parts])


def _losses(decoder: Decoder | EagerDecoder, rows: Sequence[tuple[int, int, int]], targets: np.ndarray) -> np.ndarray:
    """Return the losses of the tokens after rows as `Decoder.read` takes them; a target is -1 if it is not wanted."""
    (scored,) = np.nonzero(targets >= 0)
    logits = decoder.read(rows, scored.tolist())
    top = logits.max(axis=1, initial=-np.inf)
    likely = logits[np.arange(len(scored)), targets[scored]].astype(np.float64)
    logits -= top[:, None]
    sums = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
    losses: np.ndarray = np.log(sums) + top - likely
    return losses


def describe(facts: dict[str, str], figures: Figures) -> str:
    """Return the results as lines to print."""
    data = f"{number_of(figures['tokens'], 'token')}, {number_of(figures['bytes'], 'byte')}"
    data += f", sequences of {figures['sequence_length']}"
    data = f"responses of {number_of(figures['pairs'], 'pair')}: {data}" if "pairs" in figures else data
    bits, perplexity = figures["bits_a_byte"], figures["perplexity"]
    lines = {"loss": f"{figures['loss']:.4f} nats a token"}
    lines["perplexity"] = "inf" if perplexity is None else f"{perplexity:,.2f}"
    lines["bits a byte"] = "no text" if bits is None else f"{bits:.4f}"
    lines = {"model": facts["model"], "data": f"{facts['data']}: {data}"} | lines
    return "\n".join(f"{name:12} {text}" for name, text in lines.items())


if __name__ == "__main__":
    run_command(main)
