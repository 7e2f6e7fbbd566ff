"""The tasks of a step and what waits for what, to look at and to ask: nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from daskgpt.config.errors import nearest, require
from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import html_table
from daskgpt.config.run import DataConfig, DataflowConfig
from daskgpt.graph.calls import Origin, is_pick
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Key, is_leaf
from daskgpt.graph.program import calls_of
from daskgpt.graph.recording import CompiledStep
from daskgpt.instruments.memory import in_place_of, known_chunks, known_grain
from daskgpt.instruments.plan import plan
from daskgpt.training.job_steps import training_step
from daskgpt.training.stand_ins import Trial

DRAWN = 300  # tasks that a picture has at most


@dataclass(frozen=True)
class DataflowTask:
    """One task of a step.

    name    layer and place as on Dask's dashboard, without the pass where it is forward, and its chunk
    chunk   (b, t), None in it for an axis that is whole; None for what belongs to no chunk: sums and updates
    calls   the kernels that it runs one after the other
    bytes   of what it returns to others
    """

    name: str
    chunk: tuple[int | None, int | None] | None
    calls: tuple[Origin, ...]
    bytes: int


@dataclass(frozen=True, repr=False)
class Dataflow:
    """A graph of tasks; a notebook draws it.

    title   what it is the graph of
    tasks   name -> task, every one after those that it needs
    needs   name -> names of the tasks that it waits for
    peak    bytes of all arrays when there are most of them, of the whole step
    levels  name -> where it is drawn, the top being 0; None = as deep as it lies
    """

    title: str
    tasks: Mapping[str, DataflowTask]
    needs: Mapping[str, frozenset[str]]
    peak: int
    levels: Mapping[str, int] | None = None

    @property
    def edges(self) -> list[tuple[str, str]]:
        """(the task that is waited for, the one that waits), in the order of the tasks."""
        return [(earlier, name) for name in self.tasks for earlier in self.tasks if earlier in self.needs[name]]

    @property
    def bytes(self) -> int:
        """Of all that tasks hand to one another."""
        return sum(task.bytes for task in self.tasks.values())

    def before(self, name: str) -> frozenset[str]:
        """The tasks that must be done before this one starts."""
        return self._reached(name, self.needs)

    def after(self, name: str) -> frozenset[str]:
        """The tasks that cannot start before this one is done."""
        readers: dict[str, set[str]] = {each: set() for each in self.tasks}
        for earlier, later in self.edges:
            readers[earlier].add(later)
        return self._reached(name, readers)

    def beside(self, name: str) -> frozenset[str]:
        """The tasks that may run at the same time as this one."""
        return frozenset(self.tasks) - self.before(name) - self.after(name) - {name}

    def chain(self) -> list[str]:
        """The longest chain of tasks of which each waits for the one before: what no number of threads shortens."""
        depth = self.depths()
        path = [max(depth, key=depth.__getitem__)] if depth else []
        while path and self.needs[path[-1]]:
            path.append(max((name for name in self.tasks if name in self.needs[path[-1]]), key=depth.__getitem__))
        return path[::-1]

    def depths(self) -> dict[str, int]:
        """How many tasks must run one after the other before each."""
        return _depths(self.needs)

    def of(self, block: int, phase: str = "forward") -> Dataflow:
        """The tasks, and of them the kernels, of one transformer block in one pass; names are told without both.

        Errors   ValueError where there are none
        """
        own = {
            name: kernels
            for name, task in self.tasks.items()
            if (kernels := tuple(call for call in task.calls if (call.block, call.phase) == (block, phase)))
        }
        got = {"block": block, "phase": phase}
        require(bool(own), "Dataflow.of", "some task must run a kernel of it", got, "Ask for a block of the model.")
        short = _distinct({name: _short(name, block, phase) for name in own})
        tasks = {
            short[name]: replace(self.tasks[name], name=short[name], calls=kernels) for name, kernels in own.items()
        }
        needs = {
            short[name]: frozenset(short[earlier] for earlier in self.needs[name] if earlier in own) for name in own
        }
        return Dataflow(f"block {block}, {phase}: {self.title}", tasks, needs, self.peak)

    def without(self, edge: tuple[str, str]) -> Dataflow:
        """The same without one of its edges, drawn as if it had it.

        Errors   ValueError where it has no such edge
        """
        require(edge in self.edges, "Dataflow.without", "the graph must have the edge", {"edge": edge}, "See edges.")
        earlier, later = edge
        needs = {**self.needs, later: self.needs[later] - {earlier}}
        return replace(self, needs=needs, levels=self.levels or self.depths())

    def picture(self, marked: Iterable[str] = ()) -> Picture:
        """A drawing with some tasks, and the edges between them, in red."""
        for name in (marked := tuple(marked)):
            self._check(name)
        return Picture(self, marked)

    def rows(self) -> list[list[str]]:
        """What there is to say of it: a word, and the numbers."""
        chain, tasks = len(self.chain()), len(self.tasks)
        kernels = sum(len(task.calls) for task in self.tasks.values())
        return [
            ["tasks", f"{tasks:,}, which run {kernels:,} kernels; {len(self.edges):,} edges"],
            ["chain", f"{chain:,} one after the other; {tasks / max(chain, 1):.1f} at a time on average"],
            ["bytes", f"{self.bytes / 1e6:,.2f} MB handed on, {self.peak / 1e6:,.2f} MB at the step's peak"],
        ]

    def __repr__(self) -> str:
        return "\n".join([f"Dataflow of {self.title}", *(f"{word:12}{text}" for word, text in self.rows())])

    def _repr_html_(self) -> str:
        """The same for notebooks, with a drawing where there are not too many tasks."""
        return self.picture()._repr_html_()

    def _reached(self, name: str, edges: Mapping[str, Iterable[str]]) -> frozenset[str]:
        self._check(name)
        found, left = set[str](), [name]
        while left:
            new = set(edges[left.pop()]) - found
            found |= new
            left += new
        return frozenset(found)

    def _check(self, name: str) -> None:
        require(
            name in self.tasks,
            "Dataflow",
            "the task must be one of it",
            {"task": name},
            nearest(name, list(self.tasks)),
        )


@dataclass(frozen=True)
class Picture:
    """A drawing of a dataflow, for notebooks."""

    dataflow: Dataflow
    marked: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        from daskgpt.instruments.dataflow_drawing import svg_dataflow  # which knows dataflows

        rows = [] if self.marked else self.dataflow.rows()
        drawn = svg_dataflow(self.dataflow, self.marked) if len(self.dataflow.tasks) <= DRAWN else ""
        return html_table(self.dataflow.title, rows) + drawn


def dataflow(
    config: GPT2Config,
    data: DataConfig | Mapping[str, Any] | None = None,
    dataflow: DataflowConfig | Mapping[str, Any] | None = None,
) -> Dataflow:
    """The tasks of a training step and what they wait for, without running it.

    Chunks and grain that are auto stand for those of `daskgpt.plan`.

    Errors    ValueError where the configurations do not fit each other

    >>> import daskgpt
    >>> small = daskgpt.preset("tiny", blocks=1)
    >>> graph = daskgpt.dataflow(small, {"batch_size": 4}, {"batch_chunk": 2, "grain": "kernel"})
    >>> graph = graph.of(block=0)
    >>> len(graph.tasks), len(graph.chain())
    (20, 10)
    """
    asked = plan(config, data, dataflow=dataflow)
    job = asked.job
    step = training_step(job, known_chunks(job)[0], known_grain(job)[0], in_place_of(job))
    tasks, needs = tasks_of(step.runnable, Trial(step).results)
    size, chunk = (" x ".join(map(str, shape)) for shape in (job.batch_shape, step.chunk))
    return Dataflow(f"{size} tokens in chunks of {chunk}, grain {step.grain}", tasks, needs, asked.found.peak)


def tasks_of(
    runnable: CompiledStep, results: Mapping[Key, int]
) -> tuple[dict[str, DataflowTask], dict[str, frozenset[str]]]:
    """Tasks by name, every one after those that it needs, and their needs; results: bytes that each returns."""
    graph, unmerged = runnable.graph, runnable.recorded.unmerged
    own = [key for key, node in graph.items() if not is_leaf(node)]
    inside = {
        key: {each for each in graph[key].dependencies if each in graph and not is_leaf(graph[each])} for key in own
    }
    calls = {key: [c.key for c in calls_of(graph[key]) if not is_pick(unmerged[c.key])] for key in own}
    chunks = {
        key: next((found for each in calls[key] if (found := chunk_of(unmerged, each, whole=False))), None)
        for key in own
    }
    names = _distinct({key: _name(runnable.title(key), chunks[key]) for key in own})
    needs = {names[key]: frozenset(names[each] for each in inside[key]) for key in own}
    depths = _depths(needs)
    tasks = {
        names[key]: DataflowTask(
            names[key], chunks[key], tuple(map(runnable.recorded.origin, calls[key])), results.get(key, 0)
        )
        for key in sorted(own, key=lambda key: (depths[names[key]], names[key]))
    }
    return tasks, needs


def _depths(needs: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """How many tasks must run one after the other before each."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        found[name] = max((found[earlier] + 1 for earlier in needs[name]), default=0)
    return found


def _name(title: str, chunk: tuple[int | None, ...] | None) -> str:
    kind, _, place = title.partition("-")
    where = "" if chunk is None else f"[{', '.join('all' if part is None else str(part) for part in chunk)}]"
    return f"{kind.removesuffix('.forward')} {place}{where}"


def _short(name: str, block: int, phase: str) -> str:
    """A name where block and pass are known."""
    kind, _, place = name.partition(" ")
    place = place.removeprefix(f"h.{block}.")
    return f"{kind.removesuffix(f'.{phase}')} {place}"


def _distinct(names: Mapping[Any, str]) -> dict[Any, str]:
    """Names, with a number behind those that others have, too."""
    seen: dict[str, int] = {}
    found: dict[Any, str] = {}
    for key, name in names.items():
        seen[name] = seen.get(name, 0) + 1
        found[key] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return found
