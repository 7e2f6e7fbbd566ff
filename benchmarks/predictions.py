"""Compare predicted with measured times of steps: `python benchmarks/predictions.py --out predictions --turns 9`.

All predictions are written to a file first, from the stored calibration (`python -m daskgpt.bench --calibrate`; with
--calibrate a new one). Then the configurations of each group are measured in turns, as by `daskgpt.measure`. A table
shows both and the error of each, |predicted / measured - 1|, and how far the predicted ratio to the automatic dials of
the same model and batch is from the ratio in the same turns, which the speed of the machine in these minutes does not
change. Below are median and 95th percentile of both, and Kendall's tau: whether the predictions put configurations of
one model and batch in the right order.

--only picks configurations by a part of their names.
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
from records import Figure, add_record_flag, check_record, record

import daskgpt
from daskgpt.config.errors import require, text_table
from daskgpt.config.model import ModelConfig
from daskgpt.profiling import calibrate
from daskgpt.profiling.calibrate import Calibration
from daskgpt.profiling.measure import Spread, job_from
from daskgpt.profiling.simulate import engines_of, forecast
from daskgpt.schedulers.machine import usable_cores

MODELS = {
    "tiny": daskgpt.preset("tiny"),
    "6x384": daskgpt.preset("tiny", blocks=6, heads=6, channels=384, positions=256),
    "gpt2": daskgpt.preset("gpt2"),
}
AT_ONCE = {"tiny": 30, "6x384": 10, "gpt2": 4}  # configurations that take turns: each holds its model and moments
STEPS = {"tiny": 5, "6x384": 2, "gpt2": 1}  # of a turn
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
        flow = self.dataflow
        chunk = f"{flow['batch_chunk']}x{flow['sequence_chunk']}" if "batch_chunk" in flow else "auto"
        size = f"{self.workers} workers" if self.workers else f"{flow['threads']} threads"
        dials = f"{flow.get('grain', 'auto')} {flow.get('barrier', 'step')} {flow.get('precision', 'float32')}"
        return f"{self.model} {self.batch[0]}x{self.batch[1]} chunk {chunk} {dials} {size}"

    @property
    def data(self) -> dict[str, int]:
        return {"batch_size": self.batch[0], "sequence_length": self.batch[1]}


def cases() -> Iterator[Case]:
    """Yield all configurations."""
    for model, batches in BATCHES.items():
        for batch, chunks in batches.items():
            for threads in (1, 2, 4) if model == "tiny" else (1, 2):
                yield Case(model, batch, {"scheduler": "threads", "threads": threads})
                for chunk, (grain, barrier) in product(chunks, DIALS):
                    if grain == "chunk" and chunk[1] < batch[1]:
                        continue  # such chunks are several tasks
                    if chunk != chunks[0] and (grain, barrier) != ("block", "step"):
                        continue  # one dial at a time
                    cut = {"batch_chunk": chunk[0], "sequence_chunk": chunk[1], "grain": grain, "barrier": barrier}
                    yield Case(model, batch, {"scheduler": "threads", "threads": threads, **cut})
            for workers in (2, 4) if model == "tiny" else (2,):
                yield Case(model, batch, {"scheduler": "local", "threads": workers}, workers)
        if model != "tiny":
            dials = {"scheduler": "threads", "threads": 2, "precision": "bfloat16"}
            yield Case(model, next(iter(batches)), dials)


def stored_calibration(tool: str) -> Calibration:
    """Return this machine's calibration. Errors   ValueError without one"""
    calibration = calibrate.load()
    rule, advice = "the machine must be calibrated", "Run python -m daskgpt.bench --calibrate."
    require(calibration is not None, tool, rule, "no calibration", advice)
    assert calibration is not None
    return calibration


def predicted(case: Case, costs: Calibration) -> float:
    """Return the predicted seconds of a step on this machine."""
    dataflow = dict(case.dataflow) | ({"threads": 1} if case.workers else {})
    job = job_from(MODELS[case.model], data=case.data, optimizer={"schedule": "constant"}, dataflow=dataflow)
    return forecast(job, engines_of(job, case.workers), cores=usable_cores(), costs=costs).seconds


def measured(config: ModelConfig, group: Sequence[Case], turns: int) -> dict[str, Spread]:
    """Return the seconds of a step of configurations of one model and batch, a value for each turn."""
    flows = {case.name: case.dataflow for case in group}
    executions = daskgpt.measure(config, group[0].data, flows, turns=turns, steps=STEPS[group[0].model])
    if executions.note:
        print(executions.note, flush=True)
    return {name: execution.seconds for name, execution in executions.items()}


class Comparison:
    """Predictions beside measurements of configurations.

    errors   predicted / measured - 1, by name
    ratios   the same of the ratio to the first configuration of the same model and batch, measured in the same turns
    crowded  those with more threads or workers than this machine has cores
    """

    def __init__(self, guesses: Mapping[str, float]) -> None:
        self.guesses, self.times = guesses, dict[str, Spread]()
        self.errors, self.ratios, self.crowded = dict[str, float](), dict[str, float](), set[str]()
        self.right = self.pairs = 0

    def add(self, group: Sequence[Case], turns: int) -> None:
        """Measure configurations of one model and batch."""
        base, *others = group
        alone = [case for case in others if not case.workers]
        size = AT_ONCE[base.model]
        parts = [alone[first : first + size] for first in range(0, len(alone), size)]
        # Workers that wait for their turn take time from others, if little.
        for part in [*parts, *([case] for case in others if case.workers)]:
            self.take(base, part, measured(MODELS[base.model], [base, *part], turns))
        self.order(group)

    def take(self, base: Case, part: Sequence[Case], times: Mapping[str, Spread]) -> None:
        """Compare what was measured in the same turns."""
        self.times = {**times, **self.times}
        for case in (base, *part):
            spread, guess = times[case.name], self.guesses[case.name]
            self.errors.setdefault(case.name, guess / spread.median - 1)
            if case.dataflow["threads"] > usable_cores():
                self.crowded.add(case.name)
            if case != base:
                self.ratios[case.name] = guess / self.guesses[base.name] * times[base.name].median / spread.median - 1
            print(f"{case.name}: {1e3 * guess:.1f} predicted, {spread.text('ms', 1, 1e3)}", flush=True)

    def order(self, group: Sequence[Case]) -> None:
        """Count the pairs of configurations that were predicted in the right order, less those in the wrong one."""
        pairs = [(self.guesses[case.name], self.times[case.name].median) for case in group if case.name in self.times]
        signs = [int(np.sign((a - c) * (b - d))) for (a, b), (c, d) in combinations(pairs, 2)]
        self.right, self.pairs = self.right + sum(signs), self.pairs + len(signs)

    def rows(self) -> list[list[str]]:
        """Return a table of text."""
        rows = [["", "predicted (ms)", "measured (ms)", "error", "of the ratio"]]
        for name, spread in self.times.items():
            ratio = f"{self.ratios[name]:+.1%}" if name in self.ratios else ""
            guess = f"{1e3 * self.guesses[name]:,.1f}"
            rows.append([name, guess, spread.text("", 1, 1e3), f"{self.errors[name]:+.1%}", ratio])
        return rows

    def summary(self) -> dict[str, Figure]:
        """Return medians and 95th percentiles of the errors, and Kendall's tau."""
        figures = dict[str, Figure]()
        for which, left_out in (("", set[str]()), (" where no core has two threads", self.crowded)):
            for what, errors in (("error", self.errors), ("error of the ratio", self.ratios)):
                sizes = [100 * abs(error) for name, error in errors.items() if name not in left_out]
                if sizes:
                    figures[f"{what}{which}, median"] = Figure.single(float(np.median(sizes)), "%")
                    figures[f"{what}{which}, 95th percentile"] = Figure.single(float(np.percentile(sizes, 95)), "%")
        figures["Kendall's tau"] = Figure.single(self.right / max(self.pairs, 1), "")
        return figures

    def figures(self, name: str) -> dict[str, Figure]:
        """Return what is known of a configuration."""
        figures = {"predicted": Figure.single(1e3 * self.guesses[name], "ms")}
        figures |= {"measured": Figure.of(self.times[name], "ms", 1e3)}
        for what, errors in (("error", self.errors), ("error of the ratio", self.ratios)):
            if name in errors:
                figures[what] = Figure.single(100 * errors[name], "%")
        return figures


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("predictions"), help="folder of predictions and results")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the names of configurations, such as 'tiny 12x64'")
    parser.add_argument("--calibrate", action="store_true", help="calibrate first")
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    values.out.mkdir(parents=True, exist_ok=True)
    if values.calibrate:
        print(f"calibration written to {calibrate.calibrate().save()}", flush=True)
    costs = stored_calibration("predictions")
    chosen = [case for case in cases() if values.only in case.name]
    guesses = {case.name: predicted(case, costs) for case in chosen}
    (values.out / "predicted.json").write_text(json.dumps(guesses, indent=1))
    print(f"{len(guesses)} predictions are in {values.out / 'predicted.json'}", flush=True)
    compared = Comparison(guesses)
    for model, batch in dict.fromkeys((case.model, case.batch) for case in chosen):
        compared.add([case for case in chosen if (case.model, case.batch) == (model, batch)], values.turns)
        times = {name: spread.values for name, spread in compared.times.items()}
        (values.out / "measured.json").write_text(json.dumps(times, indent=1))
    summary = compared.summary()
    told = ", ".join(f"{name} {figure.text()}" for name, figure in summary.items())
    print(f"\n{text_table(compared.rows())}\n\n{len(compared.times)} configurations: {told} ({compared.pairs} pairs)")
    tool, what = "benchmarks/predictions.py", f"predicted times of a step, {len(compared.times)} configurations"
    record(values.record, tool, arguments, summary, what, "measured ones")
    for name in compared.times:
        record(values.record, tool, arguments, compared.figures(name), name, "measured ones")


if __name__ == "__main__":
    main(sys.argv[1:])
