"""Compare kernels with what the machine allows: `python benchmarks/limits.py --preset gpt2 --batch-size 4`.

Steps in float32 run on threads while each kernel call is recorded. The table has a row for each kind of call that takes
at least 1 % of the kernels' time: its milliseconds a step, divided by the number of threads, and those that the machine
allows on as many threads at once, the larger ones of

    operations / the rate of the tile that float32 products are made of, its operands in the first cache
    bytes read and written / the rate of copies: of as many bytes as all weights and moments for weights, gradients and
    moments, of as many as a call has for activations

Both add up where a gradient is summed and used by one call: a band of rows is summed, then its weight and moments are
read and written. The quotient of both times is what could be gained; below 1, a call works on what a cache still has.

An exponential counts as 16 operations and a division or a root as 4: what a polynomial and Newton's method take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from statistics import median

import numba
import numpy as np
from copies import ROUNDS, copy_rate, seconds_of_all
from records import Figure, add_record_flag, check_record, record

from daskgpt.config.errors import require, text_table
from daskgpt.config.flags import Parser, run_command
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.kernels.bfloat16.rounding import aligned
from daskgpt.kernels.float32 import tiles
from daskgpt.kernels.simd.lanes import address_of
from daskgpt.model.parameters import value_count
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.cost import Sizes, arrays_of, features, work_of
from daskgpt.training.job import Job, compile_kernels

LEAST = 0.01  # of the kernels' time, for a row
STEPS, TILES = 128, 1 << 16  # of the axis that a tile sums, and the number of tiles that are timed
SIZES = [1 << power for power in range(14, 29, 2)]  # bytes that a copy reads and writes, from first caches to memory
COPIED = 1 << 28  # bytes of all copies of a size

OPERATIONS = {  # of each number that is read or summed; products and attention have their own rules
    "gelu.forward": 30,
    "gelu.backward": 45,
    "layernorm.forward": 8,
    "layernorm.backward": 14,
    "rmsnorm.forward": 6,
    "rmsnorm.backward": 12,
    "swiglu.forward": 15,
    "swiglu.backward": 25,
    "rotary.forward": 2,
    "rotary.backward": 2,
}
EXPONENTIAL = 16  # operations; what a polynomial takes


def operations_of(kind: str, sizes: Sizes) -> float:
    """Return the operations of a call: two for each pair of numbers of a product, half of the pairs of attention."""
    name, (inputs, outputs) = kind.partition(" ")[0], arrays_of(kind)
    _, read, written, pairs = features(kind, sizes)
    letters = set("".join([*inputs, *outputs]))
    if name in ("attention.forward", "attention.backward"):
        products, results = (2, outputs[0]) if name.endswith("forward") else (5, inputs[0])
        half = sizes["b"] * sizes["T"] ** 2 / 2
        return half * (2 * products * sizes[results[-1]] + EXPONENTIAL * sizes["H"])
    if "b" in letters and len(letters - set("bt")) == 2 and not name.startswith(("embedding", "swiglu")):
        exponentials = EXPONENTIAL * sizes["b"] * sizes["t"] * sizes["V"] if outputs[-1] == "btV" else 0
        return 2 * pairs + exponentials
    return OPERATIONS.get(name, 1) * max(read, written) / (len(inputs) if "update" in kind else 1)


def bytes_of(kind: str, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of activations that a call reads and writes, and those of weights, gradients and moments."""
    inputs, outputs = arrays_of(kind)
    of_tokens, others = 0, 0
    for axes in (*inputs, *outputs):
        size = 4 * prod(sizes[axis] for axis in axes)
        if axes[:1] in ("b", "t"):
            of_tokens += size
        else:
            others += size * (6 if "update" in kind and axes is outputs[0] else 1)  # weight and moments, in and out
    return of_tokens, others


@numba.njit(nogil=True)
def multiply_tiles(left: np.ndarray, right: np.ndarray, sums: np.ndarray, count: int) -> None:
    """Compute the sums of one tile of float32 products `count` times: leftᵀ right over STEPS steps."""
    code, kind, rows, width = tiles.code(), tiles.BY_COLUMNS, tiles.ROWS, tiles.WIDTH
    a, b, c, step = address_of(left), address_of(right), address_of(sums), width * tiles.VECTOR
    for _ in range(count):
        tiles.multiply(code, kind, rows, width, STEPS, (a, rows * 4, b, step, 0, c, step), a, 0, 1, 0, np.float32(0))


@dataclass
class Row:
    """The calls of a kind in a step: seconds of all threads together, and those that operations and bytes allow."""

    seconds: float = 0.0
    operations: float = 0.0
    memory: float = 0.0
    both: bool = False  # whether they add up

    @property
    def allowed(self) -> float:
        return self.operations + self.memory if self.both else max(self.operations, self.memory)

    @property
    def bound(self) -> str:
        return "both" if self.both else "operations" if self.operations > self.memory else "memory"


class Limits:
    """The rates of a thread of this machine while as many run as steps have: operations, and bytes by their number."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.operations = self._products() / threads
        self.copies = [copy_rate(threads, size, max(COPIED // size // threads, 1)) for size in SIZES]

    def _products(self) -> float:
        """Return the operations a second of tiles on all threads."""
        random, columns = np.random.default_rng(0), tiles.WIDTH * tiles.LANES
        sizes = STEPS * tiles.ROWS, STEPS * columns, tiles.ROWS * columns
        arrays = [[aligned(2 * size).view(np.float32) for size in sizes] for _ in range(self.threads)]
        for left, right, _sums in arrays:
            random.standard_normal(out=left, dtype=np.float32)
            random.standard_normal(out=right, dtype=np.float32)

        def work(number: int, count: int) -> None:
            multiply_tiles(*arrays[number], count)

        seconds_of_all(work, self.threads, 1)  # compiles
        seconds = min(seconds_of_all(work, self.threads, TILES) for _ in range(ROUNDS))
        return self.threads * TILES * 2 * tiles.ROWS * columns * STEPS / seconds

    def bytes(self, size: int) -> float:
        """Return the bytes a second of copies of a size."""
        return float(np.interp(log(max(size, 1)), [log(copied) for copied in SIZES], self.copies))


def table_of(job: Job, threads: int, seed: int, warmup: int, count: int) -> tuple[dict[str, Row], float]:
    """Return the rows of all kinds of calls in some steps, the slowest first, and the median seconds of a step."""
    limits, state, rows = Limits(threads), 12 * value_count(job.config), defaultdict[str, Row](Row)
    with open_scheduler(job.dataflow.scheduler, threads) as scheduler:
        steps = TimedEngine(job, scheduler, seed)
        steps.run(warmup)
        seconds, spans = steps.recorded(count)
    graph = steps.engine.step.kernels.graph
    for span in spans:
        if (work := work_of(graph, span.key)) is None:
            continue
        kind, sizes = work
        row, (of_tokens, others) = rows[kind], bytes_of(kind, sizes)
        row.seconds += (span.end - span.start) / count
        row.operations += operations_of(kind, sizes) / limits.operations / count
        row.memory += others / limits.bytes(state) / count
        row.both = " update " in kind and len(arrays_of(kind)[1][0]) > 1
        if not row.both:
            row.memory += of_tokens / limits.bytes(of_tokens) / count
    print(
        f"{threads} threads at {threads * limits.operations / 1e9:,.0f} GFLOP/s and "
        f"{threads * limits.bytes(state) / 1e9:,.1f} GB/s for {state / 1e6:,.0f} MB"
    )
    return dict(sorted(rows.items(), key=lambda item: -item[1].seconds)), median(seconds)


def lines_of(rows: Mapping[str, Row], threads: int) -> dict[str, dict[str, Figure]]:
    """Return the figures of each kind that takes long enough, and of all kinds together."""
    whole = sum(row.seconds for row in rows.values())
    total = Row(whole, sum(row.allowed for row in rows.values()))
    shown = {kind: row for kind, row in rows.items() if row.seconds >= LEAST * whole} | {"all kernels": total}
    return {
        kind: {
            "time": Figure.single(1e3 * row.seconds / threads, "ms"),
            "share": Figure.single(row.seconds / whole, ""),
            "allowed": Figure.single(1e3 * row.allowed / threads, "ms"),
            "quotient": Figure.single(row.seconds / row.allowed, ""),
        }
        for kind, row in shown.items()
    }


def main(arguments: Sequence[str]) -> int:
    flags = Parser(prog="limits", description=__doc__)
    add_record_flag(flags)
    values, config, options, dataflow = flags.read(arguments, ModelConfig, BenchConfig, DataflowConfig)
    check_record(values.record)
    job = job_of(config, options, dataflow)
    rule, got = "operations are counted for float32 on threads", {"precision": job.precision.name}
    fits = job.precision.name == "float32" and job.scheduler == "threads"
    require(fits, "limits", rule, got | {"scheduler": job.scheduler}, "Leave both out.")
    compile_kernels(job.precision)
    with open_scheduler("threads", job.dataflow.threads) as scheduler:
        threads = scheduler.threads
    rows, seconds = table_of(job, threads, options.seed, options.warmup, options.recorded)
    table = [["", "ms a step", "share", "allowed", "by", "quotient"]]
    for kind, figures in lines_of(rows, threads).items():
        time, share, allowed, quotient = (figures[name].median or 0.0 for name in figures)
        bound = rows[kind].bound if kind in rows else ""
        table.append([kind, f"{time:.2f}", f"{share:.1%}", f"{allowed:.2f}", bound, f"{quotient:.2f}"])
        size = {"preset": values.preset, "batch_size": options.batch_size, "sequence_length": options.sequence_length}
        record(values.record, "benchmarks/limits.py", list(arguments), figures, kind, **size, by=bound)
    print(f"{text_table(table)}\na step takes {1e3 * seconds:,.1f} ms")
    return 0


if __name__ == "__main__":
    run_command(main)
