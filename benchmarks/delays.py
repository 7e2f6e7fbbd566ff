"""Check what plans say would be gained: `python benchmarks/delays.py --turns 15`.

A plan with --explain says what a step would gain if a layer, or Dask and Python, were twice as fast. Here they are
twice as slow: each call of a layer waits, with a busy core, as long as the calibration says that it takes, or each task
waits as long as Dask takes for it, part of it with the interpreter's lock. Steps with and without these delays take
turns. What the delayed steps would gain without their delays was predicted before, from the stored calibration
(`python -m daskgpt.bench --calibrate`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
from predictions import MODELS, stored_calibration
from records import Figure, add_record_flag, check_record, record

from daskgpt.config.rich import text_table
from daskgpt.graph.nodes import task
from daskgpt.graph.program import calls_of
from daskgpt.profiling.calibrate import Calibration
from daskgpt.profiling.measure import Spread, Steps, job_from
from daskgpt.profiling.simulate import Demand, call_demands, forecast
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.job import Job, compile_kernels

DASK = "Dask and Python"
WARMUP, SAMPLES = 3, 1 << 22


def _spin(turns: int) -> float:
    """Keep a core busy, without the interpreter's lock."""
    value = 1.0
    for _ in range(turns):
        value = value * 1.0000001 + 1e-9
    return value


spin: Callable[[int], float] = numba.njit(nogil=True)(_spin)


def spin_rate() -> float:
    """Return the turns of `spin` a second: the median of several."""
    spin(1)
    found = []
    for _ in range(9):
        start = perf_counter()
        spin(SAMPLES)
        found.append(SAMPLES / (perf_counter() - start))
    return float(np.median(found))


def hold(seconds: float) -> None:
    """Keep a core busy, with the lock."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def slowed(costs: Calibration, what: str) -> Calibration:
    """Return a calibration in which a layer takes twice as long, or the work on tasks that is not kernels."""
    if what == DASK:
        tasks = [(kernels, 2 * sync, 2 * threaded) for kernels, sync, threaded in costs.tasks]
        return replace(costs, tasks=tasks, lock=2 * costs.lock)

    def twice(kind: str) -> int:
        return 2 if kind.split()[1].partition(".")[0] == what else 1

    samples = {
        name: {kind: [(sizes, twice(kind) * own) for sizes, own in some] for kind, some in kinds.items()}
        for name, kinds in costs.samples.items()
    }
    return replace(costs, samples=samples)


def delayed(steps: Steps, what: str, costs: Calibration, rate: float) -> None:
    """Put delays into recorded steps."""
    step, threads = steps.steps.step, steps.scheduler.threads
    demands, graph = call_demands(step, costs), {}
    for key, node in step.runnable.graph.items():
        graph[key] = node
        if not (calls := calls_of(node)):
            continue
        program = copy(node.func)
        own = Demand.of([demands[call.key] for call in calls])
        if what == DASK:
            lock, besides = costs.of_task(own.seconds[0], threads > 1)
            first = waiting(calls[0].function, besides, rate, lock)
            program.calls = (replace(calls[0], function=first), *calls[1:])
        else:
            program.calls = tuple(
                replace(call, function=waiting(call.function, seconds, rate))
                if (seconds := layer_seconds(demands[call.key], what, threads))
                else call
                for call in calls
            )
        graph[key] = task(key, program, node.args)
    step.runnable = replace(step.runnable, graph=graph, _windows={})


def layer_seconds(demand: Demand, layer: str, threads: int) -> float:
    seconds = demand.beside if threads > 1 else demand.alone
    return sum(own for kind, own in seconds.items() if kind[0] == layer)


def waiting(function: Callable[..., Any], seconds: float, rate: float, locked: float = 0.0) -> Callable[..., Any]:
    """Return a function that waits before it does the same."""

    def call(*arguments: Any) -> Any:
        hold(locked)
        spin(int(rate * seconds))
        return function(*arguments)

    return call


def gains(job: Job, costs: Calibration, names: list[str]) -> dict[str, float]:
    """Return the share of a delayed step that the predicted step without delays is shorter."""
    fast = forecast(job, costs=costs)[0].seconds
    return {name: 1 - fast / forecast(job, costs=slowed(costs, name))[0].seconds for name in names}


def measured_gains(job: Job, costs: Calibration, names: list[str], turns: int, count: int) -> dict[str, Spread]:
    """Return the same as measured, one value for each turn."""
    compile_kernels(job.precision)
    rate, found = spin_rate(), dict[str, list[float]]()
    with ExitStack() as stack:
        scheduler = stack.enter_context(open_scheduler(job.scheduler, job.dataflow.threads))
        plain = Steps(job, scheduler, 0)
        plain.run(WARMUP)
        slow = {name: Steps(job, scheduler, 0, plain.state) for name in names}
        for name, steps in slow.items():
            delayed(steps, name, costs, rate)
            steps.run(WARMUP)
        for _ in range(turns):
            for name, steps in slow.items():
                fast, own = (float(np.median(each.run(count))) for each in (plain, steps))
                found.setdefault(name, []).append(1 - fast / own)
    return {name: Spread.of(own) for name, own in found.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("delays"), help="folder of predictions")
    parser.add_argument("--model", choices=MODELS, default="6x384")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--what", default=f"attention,linear,gelu,{DASK}", help="layers, with commas between them")
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    costs = stored_calibration("delays")
    data: Mapping[str, int] = {"batch_size": values.batch_size, "sequence_length": 64}
    dials = {"scheduler": "threads", "threads": values.threads, "grain": "block", "batch_chunk": values.batch_size // 4}
    job = job_from(MODELS[values.model], data=data, optimizer={"schedule": "constant"}, dataflow=dials)
    names = values.what.split(",")
    guesses = gains(job, costs, names)
    values.out.mkdir(parents=True, exist_ok=True)
    (values.out / "predicted.json").write_text(json.dumps(guesses, indent=1))
    found = measured_gains(job, costs, names, values.turns, values.steps)
    table = [["twice as fast", "predicted gain", "measured", "error, of a step"]]
    for name, own in found.items():
        error = guesses[name] - own.median
        table.append([name, f"{guesses[name]:.1%}", own.text("%", 1, 100), f"{100 * error:+.1f} %"])
        figures = {"predicted": Figure.single(100 * guesses[name], "%"), "measured": Figure.of(own, "%", 100)}
        what = f"{name}: {values.model}, {values.batch_size} x 64 tokens, {values.threads} threads"
        record(values.record, "benchmarks/delays.py", arguments, figures, what, "steps with delays")
    print(text_table(table))


if __name__ == "__main__":
    main(sys.argv[1:])
