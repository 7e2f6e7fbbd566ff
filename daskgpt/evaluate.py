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
from itertools import groupby, islice
from typing import Any

import numpy as np
from tqdm import tqdm

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import setting
from daskgpt.data.dataset import Batch, Tokens, check_tokens, load_validation
from daskgpt.data.pairs import Examples
from daskgpt.data.source import PREPARED, recognize
from daskgpt.formats.encoding import Encoding
from daskgpt.formats.stored_model import StoredModel
from daskgpt.generation.sampler import PRECISIONS, DecodingConfig
from daskgpt.graph.compiled import CompiledGraph
from daskgpt.model.parameters import check_finite
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.engine import State
from daskgpt.training.inference import TOGETHER, compile_loss, losses_of
from daskgpt.training.job import compile_kernels

Row = tuple[np.ndarray, np.ndarray]  # tokens, and whether the loss of each counts, but of the first one
MOST_NATS = math.log(sys.float_info.max)  # a larger loss has no perplexity, which JSON can only say as null
BATCH_TOKENS = 1024  # read together: as large as products need it, as small as the scores of a batch allow
Figures = dict[str, Any]  # numbers by name, in the order of `--json`


class EvaluateConfig(DecodingConfig):
    """Settings of an evaluation."""

    precision: str = setting("float32", "operands of matrix products", choices=PRECISIONS)
    threads: int = setting(0, "threads; 0 = one per core", most=2**12)
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
    model, encoding, length = options.opened(values.model)
    length = options.sequence_length or length
    rule, got = "a sequence must not be longer than the model's positions", {"sequence_length": length}
    got |= {"positions": model.config.positions}
    require(length <= model.config.positions, "evaluate", rule, got, "Shorten the sequence.")
    dataset = load_validation(source, encoding.name, length)
    data = f"{dataset.origin}{' (what is held out)' * (source.kind == PREPARED)}"
    figures = measure(model, options, encoding, dataset.validation, length)
    facts = {"model": str(values.model), "data": options.data, "precision": options.precision}
    print(json.dumps(facts | figures) if values.json else describe(facts | {"data": data}, figures))
    return 0


def measure(model: StoredModel, options: EvaluateConfig, encoding: Encoding, tokens: Tokens, length: int) -> Figures:
    """Return loss, perplexity and bits per byte of a text, or of responses and the end-of-text after each."""
    rows, pairs = rows_of(tokens, options.limit, length), {}
    if isinstance(tokens, Examples):
        pairs = {"pairs": len(rows)}
    counted = np.concatenate([row[1:][counts[1:]] for row, counts in rows]) if rows else np.empty(0, np.int64)
    rule, got = "there must be at least two tokens", {"data": options.data, "tokens": tokens.size}
    require(counted.size > 0, "evaluate", rule, got, "Give more text.")
    for row, _ in rows:
        check_tokens(row, min(model.config.vocabulary, encoding.n_vocab))
    check_finite("evaluate", model.parameters)  # kernels may turn a damaged NaN into a number
    compile_kernels(precision_of(options.precision), model.config.uses)
    nats, count = 0.0, 0
    with tqdm(total=counted.size, unit="token", unit_scale=True, disable=None, leave=False) as line:
        for loss, of_batch in losses(model, options, batches_of(rows, length)):
            nats, count = nats + loss * of_batch, count + of_batch
            line.update(of_batch)
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


def batches_of(rows: Sequence[Row], length: int) -> Iterator[Batch]:
    """Yield the rows as batches of tokens, targets and loss weights, with few shapes: rows of about the same length are
    together, and each is filled up with targets that do not count.

    length   the greatest one; that of a batch is a power of two if this is less
    """

    def width(row: Row) -> int:
        return min(length, 1 << (len(row[0]) - 2).bit_length())

    for columns, same in groupby(sorted(rows, key=width), width):
        alike = list(same)
        size = min(len(alike), -(-BATCH_TOKENS // columns))
        for first in range(0, len(alike), size):
            tokens, counts = np.zeros((size, columns + 1), np.int32), np.zeros((size, columns + 1), bool)
            for number, (row, counted) in enumerate(alike[first : first + size]):
                tokens[number, : len(row)], counts[number, : len(row)] = row, counted
            counts = counts[:, 1:]
            yield np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), counts / counts.mean()


def losses(model: StoredModel, options: EvaluateConfig, batches: Iterable[Batch]) -> Iterator[tuple[float, int]]:
    """Yield the mean loss of each batch, and the number of its targets that count [nats a token]."""
    precision, compiled = precision_of(options.precision), dict[tuple[int, int], CompiledGraph]()
    state = State.of_weights(model.config, model.parameters, precision)
    with open_scheduler("threads", options.threads) as scheduler:
        for shape, same in groupby(batches, lambda batch: batch[0].shape):
            if shape not in compiled:
                chunk = ChunkChoice(model.config, shape, DataflowConfig(), scheduler.threads).first
                compiled[shape] = compile_loss(model.config, shape, chunk, state.layout, precision)
            while together := list(islice(same, TOGETHER)):
                means = losses_of(scheduler, compiled[shape], state, together)
                yield from zip(means, (int(np.count_nonzero(weights)) for *_, weights in together))


def describe(facts: dict[str, str], figures: Figures) -> str:
    """Return the results as lines to print."""
    data = f"{number_of(figures['tokens'], 'token')}, {number_of(figures['bytes'], 'byte')}"
    data += f", sequences of {figures['sequence_length']}"
    data = f"responses of {number_of(figures['pairs'], 'example')}: {data}" if "pairs" in figures else data
    bits, perplexity = figures["bits_a_byte"], figures["perplexity"]
    lines = {"loss": f"{figures['loss']:.4f} nats a token"}
    lines["perplexity"] = "inf" if perplexity is None else f"{perplexity:,.2f}"
    lines["bits a byte"] = "no text" if bits is None else f"{bits:.4f}"
    lines = {"model": facts["model"], "data": f"{facts['data']}: {data}"} | lines
    return "\n".join(f"{name:12} {text}" for name, text in lines.items())


if __name__ == "__main__":
    run_command(main)
