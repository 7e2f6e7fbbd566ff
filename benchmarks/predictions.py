"""Compare predicted with measured times of steps: `python benchmarks/predictions.py --out predictions --turns 9`.

All predictions are written to a file first, from the stored calibration (`python -m daskgpt.bench --calibrate`; with
--calibrate a new one). Then the configurations of each group are measured in turns, as by `daskgpt.measure`. A table
shows both and the error of each, the median and the 95th percentile of the errors, and Kendall's tau: whether the
predictions put configurations of one model and batch in the right order.

--only picks configurations by a part of their names. An error is |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tool_records import add_record_flag, check_record, record

import daskgpt
from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import text_table
from daskgpt.profiling import calibrate
from daskgpt.profiling.measure import job_from
from daskgpt.profiling.records import Figure, Spread
from daskgpt.profiling.simulate import forecast
from daskgpt.schedulers.local import usable_cores

MODELS = {
    "tiny": daskgpt.preset("tiny"),
    "6x384": daskgpt.preset("tiny", blocks=6, heads=6, channels=384, positions=256),
    "gpt2": daskgpt.preset("gpt2"),
}
AT_ONCE = {"tiny": 12, "6x384": 8, "gpt2": 3}  # configurations that take turns: each holds its model and moments
STEPS = {"tiny": 8, "6x384": 4, "gpt2": 2}  # of a turn
# Of each model: batches, each with its chunks.
BATCHES: Mapping[str, Mapping[tuple[int, int], Sequence[tuple[int, int]]]] = {
    "tiny": {(12, 64): [(6, 64), (2, 64), (6, 32)], (32, 64): [(8, 64)]},
    "6x384": {(8, 64): [(4, 64), (2, 64)], (4, 256): [(2, 256), (1, 256)]},
    "gpt2": {(4, 64): [(2, 64), (1, 64)], (2, 256): [(1, 256)]},
}
DIALS = [("chunk", "step"), ("block", "step"), ("block", "none"), ("kernel", "layer"), ("block", "phase")]


class Case(NamedTuple):
    """A configuration to predict and to measure."""

    model: str
    batch: tuple[int, int]
    dataflow: Mapping[str, Any]
    workers: int = 0

    @property
    def name(self) -> str:
        own = self.dataflow
        chunk = f"{own['batch_chunk']}x{own['sequence_chunk']}" if "batch_chunk" in own else "auto"
        size = f"{self.workers} workers" if self.workers else f"{own['threads']} threads"
        dials = f"{own.get('grain', 'auto')} {own.get('barrier', 'step')} {own.get('precision', 'float32')}"
        return f"{self.model} {self.batch[0]}x{self.batch[1]} chunk {chunk} {dials} {size}"

    @property
    def data(self) -> dict[str, int]:
        return {"batch_size": self.batch[0], "sequence_length": self.batch[1]}


def cases(oversubscribed: bool) -> Iterator[Case]:
    """Yield all configurations."""
    for model, batches in BATCHES.items():
        for batch, chunks in batches.items():
            for threads in (1, 2, 4) if oversubscribed else (1, 2):
                yield Case(model, batch, {"scheduler": "threads", "threads": threads})
                for chunk, (grain, barrier) in product(chunks, DIALS):
                    if grain == "chunk" and chunk[1] < batch[1]:
                        continue  # such chunks are several tasks
                    if chunk != chunks[0] and (grain, barrier) != ("block", "step"):
                        continue  # one dial at a time
                    cut = {"batch_chunk": chunk[0], "sequence_chunk": chunk[1], "grain": grain, "barrier": barrier}
                    yield Case(model, batch, {"scheduler": "threads", "threads": threads, **cut})
            yield Case(model, batch, {"scheduler": "local", "threads": 2}, 2)
        if model != "tiny":
            dials = {"scheduler": "threads", "threads": 2, "precision": "bfloat16"}
            yield Case(model, next(iter(batches)), dials)


def predicted(case: Case) -> float:
    """Return the predicted seconds of a step on this machine."""
    own = dict(case.dataflow) | ({"threads": 1} if case.workers else {})
    job = job_from(MODELS[case.model], data=case.data, optimizer={"schedule": "constant"}, dataflow=own)
    return forecast(job, case.workers, cores=usable_cores())[0].seconds


def measured(config: GPT2Config, some: Sequence[Case], turns: int) -> dict[str, Spread]:
    """Return the seconds of a step of configurations of one model and batch, a value for each turn."""
    flows = {case.name: case.dataflow for case in some}
    found = daskgpt.measure(config, some[0].data, flows, turns=turns, steps=STEPS[some[0].model])
    if found.note:
        print(found.note, flush=True)
    return {name: own.seconds for name, own in found.items()}


def tau(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Return how many pairs of configurations are in the right order, less those in the wrong one; and of how many."""
    signs = [int(np.sign((a - c) * (b - d))) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum(signs), len(signs)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("predictions"), help="folder of predictions and results")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the names of configurations, such as 'tiny 12x64'")
    parser.add_argument("--oversubscribed", action="store_true", help="also four threads")
    parser.add_argument("--calibrate", action="store_true", help="calibrate first")
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    values.out.mkdir(parents=True, exist_ok=True)
    if values.calibrate:
        found = calibrate.calibrate()
        print(f"{found.describe()}\nwritten to {found.save()}", flush=True)
    chosen = [case for case in cases(values.oversubscribed) if values.only in case.name]
    guesses = {case.name: predicted(case) for case in chosen}
    (values.out / "predicted.json").write_text(json.dumps(guesses, indent=1))
    print(f"{len(guesses)} predictions are in {values.out / 'predicted.json'}", flush=True)
    times: dict[str, Spread] = {}
    right, pairs = 0, 0
    for model, batch in dict.fromkeys((case.model, case.batch) for case in chosen):
        group = [case for case in chosen if (case.model, case.batch) == (model, batch)]
        for first in range(0, len(group), AT_ONCE[model]):
            some = group[first : first + AT_ONCE[model]]
            times |= measured(MODELS[model], some, values.turns)
            for case in some:
                print(f"{case.name}: {times[case.name].text('ms', 1, 1e3)}", flush=True)
        own = tau([(guesses[case.name], times[case.name].median) for case in group])
        right, pairs = right + own[0], pairs + own[1]
    (values.out / "measured.json").write_text(json.dumps({name: own.values for name, own in times.items()}, indent=1))
    errors = {name: guesses[name] / own.median - 1 for name, own in times.items()}
    table = [["", "predicted (ms)", "measured (ms)", "error"]]
    for name, own in times.items():
        table.append([name, f"{1e3 * guesses[name]:,.1f}", own.text("", 1, 1e3), f"{errors[name]:+.1%}"])
    print(f"\n{text_table(table)}\n")
    sizes = [100 * abs(error) for error in errors.values()]
    summary = {"median error": float(np.median(sizes)), "95th percentile": float(np.percentile(sizes, 95))}
    order = right / max(pairs, 1)
    told = ", ".join(f"{name} {value:.1f} %" for name, value in summary.items())
    print(f"{len(sizes)} configurations: {told}; Kendall's tau {order:.2f} ({pairs} pairs of one model and batch)")
    figures = {name: Figure.single(value, "%") for name, value in summary.items()}
    figures["Kendall's tau"] = Figure.single(order, "")
    what = f"predicted times of a step, {len(sizes)} configurations"
    record(values.record, "benchmarks/predictions.py", arguments, figures, what, "measured ones")


if __name__ == "__main__":
    main(sys.argv[1:])
