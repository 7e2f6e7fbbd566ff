"""Compare attention and the head with PyTorch's: `python benchmarks/layers.py`.

attention  GPT-2's 12 heads of 64, 1,024 tokens in sequences of several lengths: forward and backward beside
           `torch.nn.functional.scaled_dot_product_attention`, from q, k and v in one array to its gradient
head       GPT-2's vocabulary, some rows: loss, and the gradients of input and table, beside linear and cross_entropy

Each runs on one thread, in turns in this process. Peak memory is that of a process of its own, without the arguments.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from records import Figure, add_record_flag, check_record, record

from daskgpt.config.model import preset
from daskgpt.config.rich import text_table
from daskgpt.kernels import attention, crossentropy
from daskgpt.profiling.measure import Spread
from daskgpt.schedulers import machine

GPT2 = preset("gpt2")
LENGTHS, TOKENS = (64, 256, 512, 1024), 1024
ROWS = (128, 512)  # tokens of a chunk of the head
Work = Callable[[], Any]


class Pair(NamedTuple):
    """The same work in daskgpt and in PyTorch."""

    ours: Work
    theirs: Work


def attention_pairs(length: int) -> dict[str, Pair]:
    """Return forward and backward of attention; both give the same numbers."""
    channels, heads, random = GPT2.channels, GPT2.heads, np.random.default_rng(length)
    qkv = random.standard_normal((TOKENS // length, length, 3 * channels), np.float32)
    dy = random.standard_normal((TOKENS // length, length, channels), np.float32)
    y, logsumexp = attention.forward(qkv, heads=heads)
    given, grown = torch.from_numpy(qkv).requires_grad_(), torch.from_numpy(dy)

    def theirs() -> torch.Tensor:
        parts = given.split(channels, dim=2)
        q, k, v = (part.view(-1, length, heads, channels // heads).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).contiguous().view(-1, length, channels)

    result = theirs()
    ours = partial(attention.backward, dy, qkv, y, logsumexp, heads=heads)
    grad = partial(torch.autograd.grad, result, given, grown, retain_graph=True)
    np.testing.assert_allclose(y, result.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(ours(), grad()[0].numpy(), atol=1e-3)
    return {"forward": Pair(partial(attention.forward, qkv, heads=heads), theirs), "backward": Pair(ours, grad)}


def head_pair(rows: int) -> Pair:
    """Return loss and gradients of the head."""
    random, table = np.random.default_rng(rows), (GPT2.vocabulary, GPT2.channels)
    x, wte = random.standard_normal((1, rows, GPT2.channels), np.float32), np.empty(table, np.float32)
    wte[...] = 0.02 * random.standard_normal(table, np.float32)
    targets, dy = random.integers(0, GPT2.vocabulary, (1, rows), np.int32), np.full((1, rows), 1 / rows, np.float32)
    total = np.empty_like(wte)
    given = [torch.from_numpy(x).requires_grad_(), torch.from_numpy(wte).requires_grad_()]
    wanted = torch.from_numpy(targets.astype(np.int64))[0]

    def ours() -> Any:
        losses, dlogits = crossentropy.forward(x, wte, targets, GPT2.vocabulary)
        dx = crossentropy.backward_x(dy, dlogits, wte)
        return losses, dx, crossentropy.backward_wte(dy, dlogits, x, total=total, accumulate=False)

    def theirs() -> Any:
        return torch.autograd.grad(F.cross_entropy(F.linear(given[0][0], given[1]), wanted), given)

    return Pair(ours, theirs)


def peak(rows: int, own: bool) -> int:
    """Return the bytes that the head holds at most, besides its arguments, in a process that is new."""
    torch.set_num_threads(1)
    pair = head_pair(8), head_pair(rows)
    for few, _ in ((pair[0].ours, 0) if own else (pair[0].theirs, 0),):
        few()  # loads kernels and libraries
    before = machine.resident_memory()
    machine.reset_peak_memory()
    (pair[1].ours if own else pair[1].theirs)()
    return machine.peak_memory() - before


def in_new_process(rows: int, own: bool) -> int:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, (rows, own))


def timed(pair: Pair, turns: int) -> tuple[Spread, Spread, Spread]:
    """Return seconds of both, and the ratio of each turn."""
    seconds: list[list[float]] = [[], []]
    for turn in range(turns + 1):  # the first one is not counted
        for side in (0, 1) if turn % 2 else (1, 0):
            start = perf_counter()
            pair[side]()
            seconds[side].append(perf_counter() - start)
    ours, theirs = (own[1:] for own in seconds)
    return Spread.of(ours), Spread.of(theirs), Spread.of([a / b for a, b in zip(ours, theirs)])


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=15)
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    torch.set_num_threads(1)
    pairs = {
        f"attention {name}, T={length}": pair for length in LENGTHS for name, pair in attention_pairs(length).items()
    }
    pairs |= {f"head, {rows} tokens": head_pair(rows) for rows in ROWS}
    memory = {f"head, {rows} tokens": [in_new_process(rows, own) / 1e6 for own in (True, False)] for rows in ROWS}
    table = [["", "daskgpt (ms)", "PyTorch (ms)", "ratio", "peak (MB)", "PyTorch (MB)"]]
    for name, pair in pairs.items():
        ours, theirs, ratio = timed(pair, values.turns)
        figures = {"ours": Figure.of(ours, "ms", 1e3), "theirs": Figure.of(theirs, "ms", 1e3)}
        figures["ratio"] = Figure.of(ratio, "")
        held = memory.get(name, [])
        figures |= {who: Figure.single(own, "MB") for who, own in zip(("peak", "peak_theirs"), held)}
        shown = [f"{own:,.0f}" for own in held] or ["", ""]
        table.append([name, ours.text("", 2, 1e3), theirs.text("", 2, 1e3), f"{median(ratio.values):.2f}", *shown])
        record(values.record, "benchmarks/layers.py", arguments, figures, name, f"torch {torch.__version__}")
    print(text_table(table))


if __name__ == "__main__":
    main(sys.argv[1:])
