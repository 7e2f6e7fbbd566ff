"""The size of a task at which half of the threads' time is work (METG of 50 %): `overheads.py --metg`.

The same arithmetic is divided into smaller and smaller tasks, until what a runtime needs for each task takes as long as
the task. Our engines run steps of smaller and smaller models, a task a kernel, with as many threads or workers as there
are cores. Dask's own schedulers run a stencil of matrix products: a row of tasks, each of which needs its neighbors in
the row before.

Source   Slaughter et al. 2020, Task Bench, 10.1109/SC41405.2020.00066
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from time import perf_counter
from typing import Any

import dask.local
import dask.threaded
import numpy as np

from daskgpt.config.model import preset
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.nodes import task
from daskgpt.kernels.float32.blas import gemm_address, multiply
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler

CHANNELS = (1024, 512, 256, 128, 64, 32, 16)  # of models of two blocks, the largest tasks first
SIDES = (2048, 1024, 512, 256, 128, 64, 32)  # of the matrices of a stencil
DEPTH, STEPS = 10, 4  # rows of a stencil, and steps
TOKENS = 128  # of a sequence, which is a chunk
ENGINES = {
    "threads": {"scheduler": "threads"},
    "sync": {"scheduler": "sync"},
    "ranks": {"scheduler": "local"},
    "--engine tasks": {"scheduler": "local", "engine": "tasks"},
}
Sizes = list[tuple[float, float]]  # mean seconds of a task, and the share of the threads' time that is work


def of_engine(dials: dict[str, Any], threads: int) -> Iterator[tuple[float, float]]:
    """Yield size and share of steps of smaller and smaller models."""
    for channels in CHANNELS:
        config = preset("tiny", blocks=2, heads=4, channels=channels, positions=TOKENS)
        options = BenchConfig(batch_size=2 * threads, sequence_length=TOKENS)
        dataflow = DataflowConfig(**dials, threads=threads, grain="kernel", batch_chunk=1, sequence_chunk=TOKENS)
        with open_scheduler(dataflow.scheduler, threads) as scheduler:
            steps = TimedEngine(job_of(config, options, dataflow), scheduler, 0)
            steps.run(STEPS)
            timeline = steps.timeline(STEPS)
            summary = timeline.summary
            wall = sum(window.end - window.start for window in timeline.windows) * len(timeline.lanes)
            yield summary.kernel_share * wall / len({event.task for event in timeline.events}), summary.kernel_share


def of_dask(kind: str, threads: int) -> Iterator[tuple[float, float]]:
    """Yield size and share of stencils of smaller and smaller products."""
    with open_scheduler("local", threads) if kind == "distributed" else nullcontext() as scheduler:
        for side in SIDES:

            def product(*neighbors: Any, side: int = side) -> float:
                work = np.ones((side, side), np.float32)  # here, since a graph that holds it takes long to send
                result = np.empty_like(work)
                multiply(gemm_address(work.dtype), 0, work, work, 0, result)
                return float(result[0, 0])

            product()
            start = perf_counter()
            for _ in range(DEPTH):
                product()
            alone = (perf_counter() - start) / DEPTH
            rows = [[(f"stencil-{side}", depth, place) for place in range(2 * threads)] for depth in range(DEPTH)]
            graph: dict[Any, Any] = {key: task(key, product, []) for key in rows[0]}
            for before, row in pairwise(rows):
                for place, key in enumerate(row):
                    graph[key] = task(key, product, before[max(place - 1, 0) : place + 2])
            start = perf_counter()
            if scheduler is None:
                get = dask.threaded.get if kind == "dask.threaded" else dask.local.get_sync
                get(graph, rows[-1], num_workers=threads)
            else:
                scheduler.client.get(graph, rows[-1])
            yield alone, alone * len(graph) / (threads * (perf_counter() - start))


def half(sizes: Sizes) -> float:
    """Return the seconds of a task at which half of the time is work, between the two sizes around it; infinity if it
    is less of all.
    """
    for (large, more), (small, less) in pairwise(sizes):
        if more >= 0.5 > less:
            way = (more - 0.5) / (more - less)
            return float(large ** (1 - way) * small**way)
    return float("inf")


def table(kinds: Sequence[str] = ()) -> dict[str, Sizes]:
    """Measure and print every runtime, or those that are named; return sizes and shares."""
    cores, measured = usable_cores(), dict[str, Sizes]()
    print(f"{'runtime':19} {'threads':>7} {'METG(50 %)':>11}   share of work at seconds a task")
    for kind in kinds or (*ENGINES, "dask.threaded", "dask.local.get_sync", "distributed"):
        threads = 1 if "sync" in kind else cores
        sizes = list(of_engine(ENGINES[kind], threads) if kind in ENGINES else of_dask(kind, threads))
        measured[kind] = sizes
        shares = ", ".join(f"{share:.0%} at {seconds * 1e6:,.0f} us" for seconds, share in sizes)
        metg = half(sizes)
        text = f"{metg * 1e6:,.0f} us" if metg < float("inf") else f"> {sizes[0][0] * 1e6:,.0f} us"
        print(f"{kind:19} {threads:7} {text:>11}   {shares}", flush=True)
    return measured
