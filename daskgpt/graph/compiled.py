"""Compile a graph of kernel calls into tasks once, and run it repeatedly with new data at its leaves.

`KernelGraph` is what a model's dask arrays say: single kernel calls. `compile_graph` fuses them into the tasks of a
`CompiledGraph`; a scheduler gets a `Submission` for each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import dask.array as da
import numpy as np

from daskgpt.graph.barriers import with_barriers
from daskgpt.graph.calls import origin_of
from daskgpt.graph.fuse import fuse
from daskgpt.graph.lowering import Lowered
from daskgpt.graph.nodes import Graph, Key, cuts_of, is_leaf, keys_of, pieces, renamed, waiting_for
from daskgpt.graph.program import Place, Recorder, calls_of, in_run
from daskgpt.graph.update_in_place import Rewritten

STATE = "state"


class Submission(NamedTuple):
    """A submission to a scheduler.

    leaves    data by key: the chunks of a run's inputs, and packs of the state as the scheduler returned them
    keys      keys of the wanted results
    runs      number of runs of one compiled graph in it
    recorder  of its programs
    """

    graph: Graph
    leaves: Mapping[Key, Any]
    keys: list[Key]
    runs: int = 1
    recorder: Recorder | None = None


@dataclass(frozen=True)
class Layout:
    """The packing of a run's state: one tuple of arrays for each task that updates them."""

    packs: tuple[tuple[str, ...], ...]

    def pack(self, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return the packs of whole arrays by name."""
        return [tuple(values[name] for name in names) for names in self.packs]

    def unpack(self, packs: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
        """Return the arrays of packs by name."""
        return {name: array for names, pack in zip(self.packs, packs) for name, array in zip(names, pack)}

    def places(self) -> dict[str, Place]:
        """Return the place of each array."""
        return {name: Place((STATE, n), i) for n, names in enumerate(self.packs) for i, name in enumerate(names)}


class KernelGraph:
    """The graph from named input arrays to named outputs, as single kernel calls.

    Building the arrays of a step takes as long as running it, so it is done once. An input is either data of one run
    (whole arrays, cut into the input's chunks) or *state*: single-chunk arrays that stay where the scheduler holds
    them, packed according to a layout, and are replaced by results of the run or overwritten.

    token    distinguishes this graph's keys on a cluster
    inputs   those that the graph reads
    data     the leaf of a run's inputs: all their chunks
    cuts     name and index of each of these
    leaves   state name -> its leaf
    results  state name -> the task whose value replaces it; empty if a run overwrites the state or leaves it
    written  the tasks that make the new state
    after    task -> tasks that must have run before although it does not read them
    recorder of the calls, while a scheduler of this process runs them
    """

    def __init__(
        self,
        token: str,
        rewritten: Rewritten,
        inputs: Mapping[str, da.Array],
        outputs: Mapping[str, da.Array],
        state: Mapping[str, da.Array],
        updated: Mapping[str, da.Array],
    ) -> None:
        """rewritten   the graph of outputs and updates, in which passes may have made the updates overwrite the state
        inputs      may be more than the graph reads
        updated     state name -> its new value; empty if a run leaves the state as it is
        """
        self.token, self.outputs = token, outputs
        self.graph, self.after, self.in_place = rewritten.graph, rewritten.after, bool(rewritten.updates)
        self.inputs = {name: array for name, array in inputs.items() if keys_of(array)[0] in self.graph}
        self.data: Key = (f"inputs-{token}",)
        self.cuts = [(name, index) for name, array in self.inputs.items() for index in cuts_of(array)]
        self.leaves = {name: keys_of(array)[0] for name, array in state.items()}
        self.results = {} if self.in_place else {name: keys_of(array)[0] for name, array in updated.items()}
        self.written = rewritten.updates or list(self.results.values())
        self.recorder = Recorder()

    def origin(self, key: Key) -> Any:
        """Return the origin of the task of this key; None for data."""
        return origin_of(self.graph[key]) if key in self.graph else None


def compile_graph(
    kernels: KernelGraph,
    groups: Mapping[Key, Hashable],
    waits: Mapping[Key, Sequence[Key]] | None = None,
    stages: Mapping[Key, str] | None = None,
    layout: Layout | None = None,
    native: bool = False,
) -> CompiledGraph:
    """Return the tasks of a run, each made of the kernel calls of one group.

    groups  of the kernel calls; None for one that stays a task of its own
    waits   kernel call -> those that must have run before it although it does not read their results
    stages  of the kernel calls, with a barrier after each; None for no barrier
    layout  of the state; None for a pack for each group that makes some of the new state, and one for what stays
    native  whether tasks become native calls although no update is in place: for graphs that this process runs often
    """
    packs: dict[Hashable, list[str]] = defaultdict(list)
    for name, result in kernels.results.items():
        packs[groups[result]].append(name)
    kept = [name for name in kernels.leaves if name not in kernels.results]
    layout = layout or Layout(tuple(tuple(names) for names in (*packs.values(), kept) if names))
    places = {kernels.leaves[name]: place for name, place in layout.places().items() if name in kernels.leaves}
    input_keys = chain(*map(keys_of, kernels.inputs.values()))
    places |= {key: Place(kernels.data, number) for number, key in enumerate(input_keys)}
    output_keys = {name: keys_of(array) for name, array in kernels.outputs.items()}
    wanted = [*(key for keys in output_keys.values() for key in keys), *kernels.written]
    waits = waits or {}
    after = {key: [*kernels.after.get(key, ()), *waits.get(key, ())] for key in {**kernels.after, **waits}}
    graph, fused = fuse(
        kernels.graph,
        groups,
        wanted,
        places=places,
        results=list(kernels.results.values()),
        after=after,
        token=kernels.token,
        drop=kernels.in_place,
    )
    for node in graph.values():
        if calls_of(node):
            node.func.recorder = kernels.recorder
            node.func.lowered = Lowered() if kernels.in_place or native else None
    updates = list(dict.fromkeys(fused[key].key for key in kernels.written))
    if stages is not None:
        of_tasks = {key: stages[calls_of(node)[0].key] for key, node in graph.items() if not is_leaf(node)}
        graph = with_barriers(graph, of_tasks, name=f"barrier-{kernels.token}", tokens=not kernels.in_place)
    return CompiledGraph(
        kernels=kernels,
        graph=graph,
        places={name: [fused[key] for key in keys] for name, keys in output_keys.items()},
        layout=layout,
        updates=updates,
    )


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """A graph of kernel calls in tasks of some size.

    places   output -> the places of its chunks
    updates  the tasks that make the new state, out of place in the order of its packs
    windows  the graph of several runs, by their number: the last one that was made
    """

    kernels: KernelGraph
    graph: Graph
    places: Mapping[str, list[Place]]
    layout: Layout
    updates: list[Key]
    windows: dict[int, Graph] = field(default_factory=dict, repr=False)

    @property
    def tasks(self) -> int:
        """Number of tasks of one run."""
        return sum(not is_leaf(node) for node in self.graph.values())

    @property
    def output_keys(self) -> list[Key]:
        """The tasks whose results hold the outputs."""
        return list(dict.fromkeys(place.key for places in self.places.values() for place in places))

    def title(self, key: Key) -> str:
        """Return the name of a task: `linear.forward-h.0.attn.c_attn`."""
        name, mark, _ = str(key[0]).partition("_-")
        return name if mark else name.partition("-")[0]  # a barrier's key ends otherwise

    def submission(self, values: Sequence[Mapping[str, np.ndarray]], packs: Sequence[Any]) -> Submission:
        """Return one run on data and a state, or several on the data of each, as one graph: see `window`."""
        runs, leaves = len(values), {(STATE, number): pack for number, pack in enumerate(packs)}
        for run, inputs in enumerate(values):
            key = _in_run(self.kernels.data, run, runs)
            leaves[key] = tuple(inputs[name][index] for name, index in self.kernels.cuts)
        keys = [_in_run(key, run, runs) for run in range(runs) for key in self.output_keys]
        keys += [_in_run(key, runs - 1, runs) for key in self.updates]
        return Submission(self.window(runs), leaves, keys, runs, self.kernels.recorder)

    def window(self, runs: int) -> Graph:
        """Return the graph of several runs, without a barrier between them.

        Out of place, the state of a run is the results of the run before. In place there are edges from each update to
        the readers of the next run: within a run, an update already waits for the readers of the value that it
        overwrites. Between two runs, a reader must see the value that the run before wrote, so it waits for that
        update. An update of the next run then waits for the update before it through its own readers; every tensor has
        at least one.
        """
        if runs == 1:
            return self.graph
        if runs not in self.windows:
            updates = self.needs_of_last_run()
            keys = self.graph.keys() | {self.kernels.data}
            graph: Graph = {}
            for run in range(runs):
                new = {key: _in_run(key, run, runs) for key in keys}
                if run and self.kernels.results:
                    new |= {(STATE, n): _in_run(update, run - 1, runs) for n, update in enumerate(self.updates)}
                copy = renamed(self.graph, new)
                copy = {key: in_run(node, run) for key, node in copy.items()}
                for key in updates if run else ():
                    earlier = sorted(_in_run(update, run - 1, runs) for update in updates[key])
                    copy[_in_run(key, run, runs)] = waiting_for(copy[_in_run(key, run, runs)], earlier)
                graph |= copy
            self.windows.clear()
            self.windows[runs] = graph
        return self.windows[runs]

    def needs_of_last_run(self) -> dict[Key, set[Key]]:
        """Return for each task the tasks of the previous run that it must wait for if runs overlap."""
        needs: dict[Key, set[Key]] = defaultdict(set)
        home = {call.key: key for key, node in self.graph.items() for call in calls_of(node)}
        for update, readers in self.kernels.after.items():
            for reader in readers:
                needs[home[reader]].add(home[update])
        for key, node in self.graph.items() if self.kernels.results else ():
            needs[key] |= {self.updates[d[1]] for d in node.dependencies if d[0] == STATE and d[1] < len(self.updates)}
        return {key: tasks for key, tasks in needs.items() if tasks}

    def output(self, fetched: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the outputs of a run as whole arrays, from the results of `output_keys`."""
        results = dict(zip(self.output_keys, fetched))
        arrays = {}
        for name, places in self.places.items():
            array = self.kernels.outputs[name]
            arrays[name] = np.empty(array.shape, array.dtype)
            for piece, place in zip(pieces(array, arrays[name]).values(), places):
                piece[...] = results[place.key] if place.number is None else results[place.key][place.number]
        return arrays


def _in_run(key: Key, run: int, runs: int) -> Key:
    """Return a key of one of some runs in a graph; a single one keeps it."""
    return (f"{key[0]}-{run}", *key[1:]) if runs > 1 else key
