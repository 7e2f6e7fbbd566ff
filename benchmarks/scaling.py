"""Predict steps on many threads and nodes: `python benchmarks/scaling.py --figure scaling.png --record scaling.jsonl`.

Nothing is measured: these are simulations from the stored calibration of this machine (`python -m daskgpt.bench
--calibrate`), of machines whose cores are like these. Steps of fork-join (all threads wait after each layer), tasks
(after the step), and barrier-free (two steps overlap) are predicted

    on 1 to 128 threads of one machine, with one sequence for each of 128 threads, and
    on 1 to 16 nodes of 16 threads, whose batch grows with them, each with a link of 100 Gb/s.

Chunks have up to eight whole sequences, and as many chunks as threads share a batch; a chunk is a task, except with
fork-join and on nodes. Each prediction is an interval. Its fast end is --error below the prediction for cores that
share memory as these do; its slow end as much above the one for cores with 5 GB/s each, as on sockets with many cores,
by which all executions are slowed as tasks are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from predictions import stored_calibration
from records import Figure, add_record_flag, check_record, read_records, record

import daskgpt
from daskgpt.config.errors import require
from daskgpt.profiling.calibrate import Calibration
from daskgpt.profiling.measure import job_from
from daskgpt.profiling.simulate import forecast
from daskgpt.profiling.work import Sizes, features

MODELS = ("gpt2", "gpt2-medium", "gpt2-xl")
BARRIERS = {"layer": "fork-join", "step": "tasks", "none": "barrier-free"}
COLORS = {"layer": "#d1495b", "step": "#00798c", "none": "#5e3c99"}
THREADS, NODES = (1, 16, 64, 128), (1, 4, 16)
LENGTH, OF_NODE, LINK, LATENCY = 256, 16, 100e9 / 8, 50e-6
MOST_SEQUENCES = 8
MEMORY = 5e9  # bytes a second of a core


class SlowMemory(Calibration):
    """A calibration of a machine whose cores, when all of them work, have 5 GB/s each."""

    def seconds(self, kind: str, sizes: Sizes) -> tuple[float, float]:
        alone, beside = super().seconds(kind, sizes)
        _, read, written, _ = features(kind, sizes)
        return alone, max(beside, 4 * (read + written) / MEMORY)


class Place(NamedTuple):
    """Threads and nodes, and the execution of a model's steps there."""

    model: str
    barrier: str
    threads: int
    nodes: int = 0

    @property
    def name(self) -> str:
        where = f"{self.nodes} nodes of {self.threads} threads" if self.nodes else f"{self.threads} threads"
        return f"{self.model}, {BARRIERS[self.barrier]}, {where}"


class Seconds(NamedTuple):
    """Predicted seconds of a step: of cores like these, and the ends of the interval."""

    middle: float
    least: float
    most: float


def places() -> Iterator[Place]:
    """Yield what is predicted."""
    for model in MODELS:
        for barrier in ("step", "none", "layer"):
            yield from (Place(model, barrier, threads) for threads in THREADS)
        yield from (Place(model, "step", OF_NODE, nodes) for nodes in NODES)


def predicted(place: Place, costs: Calibration) -> float:
    """Return the predicted seconds of a step."""
    sequences = OF_NODE * place.nodes if place.nodes else max(THREADS)
    data = {"batch_size": sequences, "sequence_length": LENGTH, "groups": max(NODES) if place.nodes else 0}
    dials: dict[str, Any] = {"scheduler": "threads", "threads": place.threads, "barrier": place.barrier, "window": 2}
    own = sequences // max(place.nodes, 1) // place.threads
    dials |= {"batch_chunk": min(own, MOST_SEQUENCES), "sequence_chunk": LENGTH}
    dials["grain"] = "kernel" if place.barrier == "layer" else "block" if place.nodes else "chunk"
    job = job_from(daskgpt.preset(place.model), data=data, dataflow=dials)
    links = (place.nodes, LINK, LATENCY) if place.nodes > 1 else ()
    return forecast(job, *links, cores=place.threads, costs=costs)[0].seconds


def draw(found: Mapping[Place, Seconds], path: Path) -> None:
    """Draw speedups on threads above efficiencies on nodes, a column for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = [model for model in MODELS if Place(model, "step", 1) in found]
    size = 1.5 + 3.2 * len(models), 6.4
    figure, rows = pyplot.subplots(2, len(models), figsize=size, sharey="row", squeeze=False, constrained_layout=True)
    for column, model in enumerate(models):
        base = found[Place(model, "step", 1)]
        for barrier, name in BARRIERS.items():
            own = [(place, seconds) for place, seconds in found.items() if place[:2] == (model, barrier)]
            threads = {place.threads: seconds for place, seconds in own if not place.nodes}
            nodes = {place.nodes: seconds for place, seconds in own if place.nodes}
            _band(rows[0][column], threads, base, COLORS[barrier], name)
            if 1 in nodes:
                _band(rows[1][column], nodes, nodes[1], COLORS[barrier], name, efficiency=True)
        rows[0][column].plot(THREADS, THREADS, ":", color="#888888")
        rows[1][column].set_visible(bool(rows[1][column].lines))
        rows[0][column].set(title=model, xlabel="threads", xscale="log", yscale="log")
        rows[1][column].set(xlabel=f"nodes of {OF_NODE} threads", xscale="log", ylim=(0, 105))
        for axes, numbers in zip((rows[0][column], rows[1][column]), (THREADS, NODES)):
            axes.set_xticks(numbers, [*map(str, numbers)])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
        rows[0][column].set_yticks(THREADS, [*map(str, THREADS)])
    rows[0][0].set_ylabel("predicted speedup (dotted: ideal)")
    rows[1][0].set_ylabel("predicted efficiency (%)")
    rows[0][0].legend(frameon=False)
    figure.suptitle("Predicted, not measured: 128 x 256 tokens on threads, 16 x 256 tokens a node", fontsize=11)
    figure.savefig(path, dpi=110)


def _band(
    axes: Any, found: Mapping[int, Seconds], base: Seconds, color: str, name: str, *, efficiency: bool = False
) -> None:
    """Draw how many times as fast as the base, whose own interval is left aside, or efficiencies."""
    factor = 100 * base.middle if efficiency else base.middle
    values = {field: [factor / getattr(own, field) for own in found.values()] for field in Seconds._fields}
    axes.plot([*found], values["middle"], "o-", color=color, label=name, ms=4)
    axes.fill_between([*found], values["most"], values["least"], color=color, alpha=0.15, lw=0)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--error", type=float, default=0.1, help="of predictions, as measured by predictions.py")
    parser.add_argument("--only", default="", help="part of the names of predictions, such as 'gpt2, tasks'")
    parser.add_argument("--figure", type=Path, help="draw all predictions of the file of --record")
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    rule, advice = "--figure must come with --record, whose file it draws", "Add --record."
    require(not values.figure or values.record, "scaling", rule, {"figure": values.figure}, advice)
    costs = stored_calibration("scaling")
    slow = SlowMemory(**{own.name: getattr(costs, own.name) for own in fields(costs)})
    found, slower = dict[Place, Seconds](), dict[Place, float]()
    for place in places():
        if values.only not in place.name:
            continue
        middle, tasks = predicted(place, costs), place._replace(barrier="step")
        if tasks not in slower:
            slower[tasks] = max(predicted(tasks, slow) / (middle if place == tasks else predicted(tasks, costs)), 1.0)
        found[place] = own = Seconds(middle, middle * (1 - values.error), middle * slower[tasks] * (1 + values.error))
        told = f"{middle:.3f} s ({own.least:.3f} .. {own.most:.3f})"
        if base := found.get(compared(place)):
            # Nodes have as much work each, however many there are.
            efficiency = base.middle / middle / (1 if place.nodes else place.threads)
            told += f", efficiency {efficiency:.0%}"
        print(f"{place.name}: {told}", flush=True)
        step = Figure("s", middle, own.least, own.most)
        record(values.record, "benchmarks/scaling.py", arguments, {"step": step}, place.name)
    if values.figure:
        draw(stored(values.record), values.figure)


def stored(path: Path) -> dict[Place, Seconds]:
    """Return the predictions in a file of records."""
    steps = {one.settings["what"]: one.figures["step"] for one in read_records(path)}
    known = {place: steps[place.name] for place in places() if place.name in steps}
    return {place: Seconds(own.median or 0.0, own.least or 0.0, own.largest or 0.0) for place, own in known.items()}


def compared(place: Place) -> Place:
    """Return what a place is compared with: one thread with tasks, or one node."""
    return place._replace(nodes=1) if place.nodes else place._replace(threads=1, barrier="step")


if __name__ == "__main__":
    main(sys.argv[1:])
