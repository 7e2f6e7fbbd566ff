"""What a step will take, without running it: `--plan`.

The step's own tasks are handed to Dask one by one, but in place of each kernel stands a function that returns arrays
without data. These are counted while they live, and Dask and the tasks drop them when they drop the real ones.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import dask.local
import numpy as np

from daskgpt.graph.calls import ChunkSum, Pick
from daskgpt.graph.inplace import RowSum, RowUpdate
from daskgpt.graph.nodes import Graph, Key, combined, is_leaf, only, with_leaves
from daskgpt.graph.program import Call, Program, Values
from daskgpt.instruments import machine
from daskgpt.kernels.bfloat16.packed_weight import empty_weight
from daskgpt.model.layers import LAYERS
from daskgpt.model.parameters import parameter_shapes
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.schedulers.local import LocalScheduler, usable_cores
from daskgpt.training.grouping import layer_of, where_of
from daskgpt.training.job import Job, facts
from daskgpt.training.loop import training_step

CLASSES = ("parameters", "gradients", "optimizer", "activations")
# The function of the table that knows the sizes of axes that no argument has.
NEW_AXES = {f"{layer.name}.forward": layer.new_axes for layer in LAYERS}


@dataclass(frozen=True)
class Prediction:
    """A step before it runs.

    made       bytes of all arrays of a class that the step holds or makes
    at_peak    bytes of each class when most bytes are held
    """

    grain: str
    tasks: int
    made: Mapping[str, int]
    at_peak: Mapping[str, int]
    largest_task: str
    largest_bytes: int

    @property
    def peak(self) -> int:
        """Bytes of all arrays when there are most of them."""
        return sum(self.at_peak.values())


def predict(job: Job) -> Prediction:
    """Tasks and memory of one step, in the order in which Dask runs its tasks one by one; no kernel is called.

    Counted are the arrays between kernels, the parameters and the optimizer's moments; not the batch, a kernel's
    scratch, the interpreter and its libraries. The grain auto stands for what `known_grain` says.
    """
    dataflow = job.dataflow
    in_place = LocalScheduler.in_place if dataflow.scheduler in ("sync", "threads") else ClusterScheduler.in_place
    job = replace(job, dataflow=replace(dataflow, grain=known_grain(job)[0]))
    trial = tried(job, in_place, 1)
    together = tried(job, in_place, dataflow.window) if dataflow.barrier == "none" and in_place else trial
    largest = max(trial.results, key=lambda key: trial.results[key])
    return Prediction(
        grain=job.dataflow.grain,
        tasks=len(trial.results),
        made=trial.account.made,
        at_peak=together.account.at_peak,
        largest_task="-".join(str(largest[0]).split("-")[:2]).rstrip("_"),
        largest_bytes=trial.results[largest],
    )


def tried(job: Job, in_place: bool, window: int) -> Trial:
    """What is known after one step, or several that overlap, without data."""
    trial = Trial(job, in_place)
    recording = training_step(job, trial).recording
    trial.learn(recording.unmerged)
    values = {name: np.broadcast_to(np.zeros((), a.dtype), a.shape) for name, a in recording.inputs.items()}
    dtype = recording.outputs["loss"].dtype
    state: dict[str, Any] = {}
    for name, shape in parameter_shapes(job.config).items():
        state[f"weight.{name}"] = trial.weight(name, shape, dtype)
        for moment in ("m", "v"):
            state[f"{moment}.{name}"] = StandIn(trial.account, "optimizer", shape, dtype)
    packs = recording.layout.pack(state)
    if window > 1:
        recording.run_window(trial, [values] * window, packs)
    else:
        recording.run(trial, values, packs)
    return trial


def describe_prediction(job: Job, found: Prediction) -> str:
    """What `--plan` prints: what would be run, a table of its tasks and memory, and whether that fits here."""
    known = facts(job)
    name, ids = job.dataset.encoding_name, job.dataset.vocabulary
    return "\n".join(
        (
            _line("model", known["model"]),
            _line("batch", known["batch"]),
            *([] if name == "none" else [_line("encoding", f"{name}, {ids:,} ids")]),
            _line("precision", known["precision"]),
            _line("grain", known_grain(job)[1]),
            _line("tasks", f"{found.tasks:,} a step"),
            f"{'':12} {'held or made':>14} {'at the peak':>14}",
            *(f"{kind:12} {_mb(found.made[kind]):>14} {_mb(found.at_peak[kind]):>14}" for kind in CLASSES),
            f"{'peak':12} {'':14} {_mb(found.peak):>14}   without scratch of kernels",
            _line("largest task", f"{_mb(found.largest_bytes)} of results, {found.largest_task}"),
            _line("memory", fits(job, found.peak)),
            "nothing was run",
        )
    )


def known_grain(job: Job) -> tuple[str, str]:
    """The grain that a plan counts with, and what is to be said of it: only a measured step can settle auto."""
    grain, barrier, scheduler = job.dataflow.grain, job.dataflow.barrier, job.dataflow.scheduler
    if grain != "auto":
        return grain, grain
    if barrier == "layer":
        return "kernel", "kernel (auto: with barrier layer a task is one kernel)"
    if scheduler not in ("sync", "threads"):
        return "block", "block (auto: on a cluster tasks are large from the start)"
    return "block", "block is assumed (auto: a run settles it in its first step, from measured kernel times)"


def fits(job: Job, peak: int) -> str:
    """One sentence: whether the peak and the processes that hold it fit the memory that there is here."""
    limit, whose = machine.memory_limit()
    if not limit:
        return f"{_rounded(peak)} are needed; this system does not say how much there is."
    scheduler, threads = job.dataflow.scheduler, job.dataflow.threads or usable_cores()
    if scheduler not in ("sync", "threads", "local"):
        return f"{_rounded(peak)} are needed by the cluster's workers together; {whose} has {_rounded(limit)}."
    processes = 1 + threads if scheduler == "local" else 1
    libraries = processes * machine.resident_memory()  # of this process, which has loaded them and holds no step
    needed = f"{_rounded(peak)} and {_rounded(libraries)} for interpreter and libraries"
    if processes > 1:
        needed += f" of {processes} processes"
    if peak + libraries <= limit:
        return f"fits: {needed}, of the {_rounded(limit)} that {whose} has."
    return (
        f"DOES NOT FIT: {needed} are more than the {_rounded(limit)} that {whose} has. "
        "Try a smaller --batch-size or --sequence-length."
    )


def _line(name: str, text: str) -> str:
    """A name and what there is to say, in lines of 80 columns."""
    together = re.sub(r"(\d) ([GM]B)", "\\1\u00a0\\2", f"{name:13} {text}")  # a number stays with its unit
    return textwrap.fill(together, 80, subsequent_indent=" " * 14, break_on_hyphens=False).replace("\u00a0", " ")


def _rounded(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


class Account:
    """Bytes of the arrays that stand-ins stand for, by class."""

    def __init__(self) -> None:
        self.alive, self.made, self.at_peak = Counter[str](), Counter[str](), Counter[str]()

    def add(self, name: str, size: int) -> None:
        self.made[name] += size
        self.alive[name] += size
        if self.alive.total() > self.at_peak.total():
            self.at_peak = self.alive.copy()

    def remove(self, name: str, size: int) -> None:
        self.alive[name] -= size


class StandIn:
    """An array without data; the account has its bytes as long as somebody holds it."""

    def __init__(
        self, account: Account, name: str, shape: Sequence[int], dtype: np.typing.DTypeLike, packed: int = 0
    ) -> None:
        """packed   bytes of the same values in another form"""
        self.account, self.name, self.shape, self.dtype = account, name, tuple(shape), np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize + packed
        account.add(name, self.nbytes)

    def __del__(self) -> None:
        self.account.remove(self.name, self.nbytes)


class Trial:
    """Runs a recorded step with stand-ins; what schedulers offer a recording (`graph.replay.Runs`).

    account   of all arrays
    results   bytes of what each task returned
    """

    description = "nothing is run"
    threads = 1

    def __init__(self, job: Job, in_place: bool) -> None:
        self.job, self.account, self.in_place = job, Account(), in_place
        self.results: dict[Key, int] = {}
        self.picks: dict[Key, list[str]] = {}

    def learn(self, unmerged: Graph) -> None:
        """Which results of several each kernel has, by their axes: a graph says so where they are picked."""
        picks: dict[Key, dict[int, str]] = defaultdict(dict)
        for node in unmerged.values():
            if not is_leaf(node) and isinstance(node.func, Pick):
                picks[only(node.args[0])][node.func.number] = node.func.axes
        self.picks = {key: [axes for _, axes in sorted(found.items())] for key, found in picks.items()}

    def run(self, graph: Graph, leaves: Mapping[Key, Any], keys: list[Key]) -> list[Any]:
        without_data = {
            key: node if is_leaf(node) else combined(key, self._without_data(key, node.func), node.args)
            for key, node in graph.items()
        }
        return list(dask.local.get_sync(with_leaves(without_data, leaves), keys))

    def fetch(self, results: list[Any]) -> list[Any]:
        return results

    def _without_data(self, key: Key, program: Any) -> Callable[..., Any]:
        if not isinstance(program, Program):  # a barrier
            return program
        without_data = copy(program)
        without_data.calls = tuple(replace(call, function=self._stand_in(call)) for call in program.calls)

        def run(*arguments: Any) -> Any:
            result = without_data(*arguments)
            self.results[key] = sum(value.nbytes for value in _stand_ins(result))
            return result

        return run

    def _stand_in(self, call: Call) -> Callable[..., Any]:
        """What returns stand-ins where the call would return arrays."""
        function = getattr(call.function, "__self__", call.function)
        if isinstance(function, Pick):
            return function
        layer = layer_of(call.key)
        if isinstance(function, ChunkSum):
            name = "gradients" if ".backward" in layer else "activations"
            return lambda *arguments: StandIn(self.account, name, function.shape, function.dtype)
        if isinstance(function, RowSum):
            rows = function.blocks[-1][1] - function.blocks[0][0]
            # A sum that goes on from another one is made in its rows.
            return lambda parts, start=None: self._gradient_rows(function.call, rows) if start is None else start
        if isinstance(function, RowUpdate):
            return lambda *arguments: self._update(function)
        return lambda *arguments: self._results(call.key, function, arguments)

    def _gradient_rows(self, call: Any, rows: int) -> StandIn:
        return StandIn(self.account, "gradients", (rows, *call.shape[1:]), call.dtype)

    def _update(self, function: RowUpdate) -> None:
        """In place: a block of the gradient's rows at a time is all that is made, where the gradient is not given."""
        for first, last in function.blocks if function.sums else ():
            self._gradient_rows(function.sums[0], last - first)

    def weight(self, name: str, shape: Sequence[int], dtype: np.typing.DTypeLike) -> StandIn:
        """A parameter: at bfloat16, a matrix that is multiplied is held packed as well."""
        packed = 0
        if self.job.precision == "bfloat16" and len(shape) == 2 and name != "wpe.weight":
            packed = empty_weight(*shape).nbytes
        return StandIn(self.account, "parameters", shape, dtype, packed)

    def _results(self, key: Key, function: Any, arguments: Sequence[Any]) -> Any:
        """The results of a kernel call, from the letters of its signature."""
        sizes = _sizes(key, function, arguments)
        dtype = next(array.dtype for array in _stand_ins(arguments) if array.dtype.kind == "f")
        if key not in self.picks:
            return StandIn(self.account, "activations", [sizes[axis] for axis in function.axes], dtype)
        shapes = [[sizes[axis] for axis in axes] for axes in self.picks[key]]
        if layer_of(key) != "adamw":
            return tuple(StandIn(self.account, "activations", shape, dtype) for shape in shapes)
        moments = [StandIn(self.account, "optimizer", shape, dtype) for shape in shapes[1:]]
        return self.weight(where_of(key), shapes[0], dtype), *moments


def _sizes(key: Key, function: Any, arguments: Sequence[Any]) -> dict[str, int]:
    """The size of each axis of a call; what is gathered along t has its length as T."""
    sizes: dict[str, int] = {}
    for argument, axes in zip(arguments, function.inputs):
        if isinstance(argument, list):
            sizes |= dict(zip(axes, argument[0].shape))
            sizes["T"] = sum(part.shape[axes.index("t")] for part in argument)
        else:
            sizes |= dict(zip(axes, argument.shape))
    if layer_of(key) in NEW_AXES:
        sizes |= NEW_AXES[layer_of(key)](sizes, function.options)
    return sizes


def _stand_ins(values: Any) -> list[Any]:
    """All arrays in nested sequences, each once."""
    if isinstance(values, Values):
        return _stand_ins(values.values)
    if isinstance(values, list | tuple):
        return list({id(array): array for value in values for array in _stand_ins(value)}.values())
    return [] if values is None else [values]
