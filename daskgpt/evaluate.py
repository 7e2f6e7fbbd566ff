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
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, run_command
from daskgpt.config.settings import setting
from daskgpt.data.dataset import MappedTokens, check_tokens, load_validation
from daskgpt.data.pairs import Examples
from daskgpt.data.source import PREPARED, recognize
from daskgpt.data.tokenizer import get_encoding
from daskgpt.formats.encoding import Encoding
from daskgpt.generation.decoder import Weights
from daskgpt.generation.likelihood import response_losses, sequence_losses
from daskgpt.generation.sampler import DecodingConfig
from daskgpt.training.checkpoint import encoding_and_length, open_model_of
from daskgpt.training.job import compile_kernels

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
    model = open_model_of(values.model)
    encoding_name, length = encoding_and_length(model, options.encoding)
    encoding = get_encoding(encoding_name)
    weights = Weights(model.config, model.loaded().parameters, options.precision)
    length = options.sequence_length or length
    rule, got = "a sequence must not be longer than the model's positions", {"sequence_length": length}
    got |= {"positions": model.config.positions}
    require(length <= model.config.positions, "evaluate", rule, got, "Shorten the sequence.")
    dataset = load_validation(source, encoding_name, length)
    data = f"{dataset.origin}{' (what is held out)' * (source.kind == PREPARED)}"
    tokens = dataset.validation
    if isinstance(tokens, Examples):
        figures = loss_of_pairs(weights, options, encoding, tokens, length)
    else:
        figures = loss_of_text(weights, options, encoding, tokens, length)
    facts = {"model": str(values.model), "data": options.data, "precision": options.precision}
    print(json.dumps(facts | figures) if values.json else describe(facts | {"data": data}, figures))
    return 0


def loss_of_text(
    weights: Weights, options: EvaluateConfig, encoding: Encoding, tokens: np.ndarray | MappedTokens, length: int
) -> Figures:
    """Return loss, perplexity and bits per byte of a text."""
    row = np.asarray(tokens[: options.limit + 1] if options.limit else tokens[:])
    check_tokens(row, min(weights.config.vocabulary, encoding.n_vocab))
    rule, got = "there must be at least two tokens", {"data": options.data, "tokens": len(row)}
    require(len(row) > 1, "evaluate", rule, got, "Give more text.")
    losses = sequence_losses(weights, row, length, options.threads)
    return _summed(weights, losses, encoding, row[1:]) | {"sequence_length": length}


def loss_of_pairs(
    weights: Weights, options: EvaluateConfig, encoding: Encoding, examples: Examples, length: int
) -> Figures:
    """Return loss, perplexity and bits per byte of responses and the end-of-text after each."""
    count = min(options.limit or examples.count, examples.count)
    rows = [examples.row(number) for number in range(count)]
    check_tokens(np.concatenate([tokens for tokens, _ in rows]), min(weights.config.vocabulary, encoding.n_vocab))
    counted = np.concatenate([tokens[counts] for tokens, counts in rows])
    losses = response_losses(weights, rows, length, options.threads)
    return {"pairs": count} | _summed(weights, losses, encoding, counted) | {"sequence_length": length}


def _summed(weights: Weights, coming: Iterator[np.ndarray], encoding: Encoding, counted: np.ndarray) -> Figures:
    """Return the figures of some losses as they come; counted: the tokens that are predicted."""
    compile_kernels(uses=weights.config.uses | {"decoding"})
    nats, count = 0.0, 0
    with tqdm(total=len(counted), unit="token", unit_scale=True, disable=None, leave=False) as line:
        for losses in coming:
            nats, count = nats + float(losses.sum()), count + len(losses)
            line.update(len(losses))
            line.set_postfix_str(f"loss {nats / count:.4f}", refresh=False)
    size = int(encoding.sizes[counted].sum())
    loss = nats / count
    rule, advice = "a model's loss must be finite", "Its weights are damaged, or its training has diverged."
    require(math.isfinite(loss), "evaluate", rule, {"loss": loss}, advice)
    return {
        "tokens": count,
        "bytes": size,
        "loss": round(loss, 6),
        "perplexity": round(math.exp(loss), 4) if loss < MOST_NATS else None,
        "bits_a_byte": round(nats / math.log(2) / size, 6) if size else None,
    }


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
