"""Build a graph from dask arrays once, run it again and again with new data at its leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import dask.array as da
import numpy as np

from daskgpt.graph.barriers import with_barriers
from daskgpt.graph.grain import GroupOf, merge
from daskgpt.graph.inplace import InPlace
from daskgpt.graph.nodes import Graph, Key, graph_of, is_leaf, keys_of, pieces, renamed, waiting_for
from daskgpt.graph.program import Place, calls_of, in_run

STATE = "state"


class Runs(Protocol):
    """What a scheduler offers a recording."""

    description: str
    in_place: bool

    @property
    def threads(self) -> int:
        """How many tasks can run at once."""
        ...

    def run(self, graph: Graph, leaves: Mapping[Key, Any], keys: list[Key]) -> list[Any]:
        """Results of `keys`, left where they were made."""
        ...

    def fetch(self, results: list[Any]) -> list[Any]:
        """The results here."""
        ...


@dataclass(frozen=True)
class Layout:
    """How the state of a run is packed: one tuple of arrays for each task that updates them."""

    packs: tuple[tuple[str, ...], ...]

    def pack(self, values: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """The packs of whole arrays by name."""
        return [tuple(values[name] for name in names) for names in self.packs]

    def unpack(self, packs: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: array for names, pack in zip(self.packs, packs) for name, array in zip(names, pack)}

    def places(self) -> dict[str, Place]:
        """Where each array is found."""
        return {name: Place((STATE, n), i) for n, names in enumerate(self.packs) for i, name in enumerate(names)}


class Recording:
    """The graph that leads from named input arrays to named outputs, merged into tasks of the wanted size.

    Building the arrays of a step and merging their tasks takes as long as running it, so it is done once. An input is
    either data of one run (`values`: whole arrays, cut into the input's chunks) or *state*: single-chunk arrays that
    stay where the scheduler keeps them, packed as `layout` says, and are replaced by results of the run.
    """

    def __init__(
        self,
        inputs: Mapping[str, da.Array],
        outputs: Mapping[str, da.Array],
        state: Mapping[str, da.Array],
        updated: Mapping[str, da.Array],
        *,
        title_of: Callable[[Sequence[Key]], str],
        layout: Layout | None = None,
        in_place: Callable[[Graph], InPlace] | None = None,
    ) -> None:
        """updated   state name -> its new value; empty where a run leaves the state as it is
        title_of  names a merged task
        layout    of the state; None where the tasks that update it decide
        in_place  rewrites the graph so that the state's arrays are written over; None: they are replaced
        """
        self.inputs, self.outputs, self.title_of = dict(inputs), dict(outputs), title_of
        self.unmerged = graph_of([*outputs.values(), *updated.values()])
        self._leaves = {name: keys_of(array)[0] for name, array in state.items()}
        self._results = {name: keys_of(array)[0] for name, array in updated.items()}
        self._given_layout = layout
        self._in_place = in_place is not None
        self._written, self._after = list(self._results.values()), {}
        if in_place:
            rewritten = in_place(self.unmerged)
            self.unmerged, self._written, self._after = rewritten.graph, rewritten.updates, rewritten.after
            self._results, self._given_layout = {}, Layout((tuple(state),))

    def merge(self, group_of: GroupOf, waits: Mapping[Key, Sequence[Key]] | None = None) -> None:
        """Make the tasks of a run from groups of the unmerged ones. It can be done again with other groups.

        waits   task -> tasks that must have run before it for other reasons than their results
        """
        leaves, results = self._leaves, self._results
        packs = {group: (STATE, n) for n, group in enumerate(dict.fromkeys(map(group_of, results.values())))}
        carried = {leaves[name]: (packs[group_of(result)], result) for name, result in results.items()}
        given = self._given_layout.places() if self._given_layout else {}
        places = {leaves[name]: place for name, place in given.items() if name in leaves}
        keys = {name: keys_of(array) for name, array in self.outputs.items()}
        wanted = [*(key for own in keys.values() for key in own), *self._written]
        after = {
            key: [*self._after.get(key, ()), *(waits or {}).get(key, ())] for key in {**self._after, **(waits or {})}
        }
        merged = merge(self.unmerged, group_of, self.title_of, wanted, places, carried, after, self._in_place)
        self.graph = merged.graph
        self.places = {name: [merged.places[key] for key in own] for name, own in keys.items()}
        self.layout = self._given_layout or _layout({name: merged.places[key] for name, key in results.items()})
        self._output_keys = list(dict.fromkeys(place.key for places in self.places.values() for place in places))
        self._windows: dict[int, Graph] = {}
        self._updates = list(dict.fromkeys(merged.places[key].key for key in self._written))
        if results:  # in the order of the packs
            self._updates = [merged.places[results[names[0]]].key for names in self.layout.packs]

    def wait_between(self, stage_of: Callable[[Key], str], *, tokens: bool) -> None:
        """Put a barrier after each stage of the merged tasks, see `with_barriers`."""
        first = {key: calls_of(node)[0].key for key, node in self.graph.items() if not is_leaf(node)}
        self.graph = with_barriers(self.graph, lambda key: stage_of(first[key]), tokens=tokens)

    def run(
        self, scheduler: Runs, values: Mapping[str, np.ndarray], packs: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """One run: handles of the outputs for `output`, and the packs of the new state."""
        data = self._data(values) | self._state(packs)
        results = scheduler.run(self.graph, data, self._output_keys + self._updates)
        count = len(self._output_keys)
        return results[:count], results[count:] if self._results else list(packs)

    def run_window(
        self, scheduler: Runs, values: Sequence[Mapping[str, np.ndarray]], packs: Sequence[Any]
    ) -> list[list[Any]]:
        """Several runs as one graph, without a barrier between them; the handles of each one's outputs.

        A task waits only for what it needs: one that reads a tensor of the state for the update of that tensor in the
        run before, and an update for the readers of its own run. Only where the state is updated in place.
        """
        graph = self._window(len(values))
        data = self._state(packs)
        for run, own in enumerate(values):
            data |= {_in_run(key, run): value for key, value in self._data(own).items()}
        outputs = [[_in_run(key, run) for key in self._output_keys] for run in range(len(values))]
        flat = [key for keys in outputs for key in keys] + [_in_run(key, len(values) - 1) for key in self._updates]
        results = iter(scheduler.run(graph, data, flat))
        return [[next(results) for _ in keys] for keys in outputs]

    def _window(self, runs: int) -> Graph:
        """The recorded graph so many times, with the edges from each update to the readers of the next run."""
        if runs not in self._windows:
            updates = self.needs_of_last_run()
            own = self.graph.keys() | {key for array in self.inputs.values() for key in keys_of(array)}
            graph: Graph = {}
            for run in range(runs):
                copy = renamed(self.graph, {key: _in_run(key, run) for key in own})
                copy = {key: in_run(node, run) for key, node in copy.items()}
                for key in updates if run else ():
                    earlier = sorted(_in_run(update, run - 1) for update in updates[key])
                    copy[_in_run(key, run)] = waiting_for(copy[_in_run(key, run)], earlier)
                graph |= copy
            self._windows = {runs: graph}
        return self._windows[runs]

    def needs_of_last_run(self) -> dict[Key, set[Key]]:
        """Task -> the tasks of the run before that it has to wait for, where runs overlap."""
        needs: dict[Key, set[Key]] = defaultdict(set)
        home = {call.key: key for key, node in self.graph.items() for call in calls_of(node)}
        for update, readers in self._after.items():
            for reader in readers:
                needs[home[reader]].add(home[update])
        for key, node in self.graph.items() if self._results else ():
            needs[key] |= {self._updates[d[1]] for d in node.dependencies if d[0] == STATE}
        return {key: tasks for key, tasks in needs.items() if tasks}

    def _data(self, values: Mapping[str, np.ndarray]) -> dict[Key, Any]:
        return {key: part for name, value in values.items() for key, part in pieces(self.inputs[name], value).items()}

    def _state(self, packs: Sequence[Any]) -> dict[Key, Any]:
        return {(STATE, number): pack for number, pack in enumerate(packs)}

    def output(self, scheduler: Runs, handles: list[Any]) -> dict[str, np.ndarray]:
        """The outputs as whole arrays."""
        results = dict(zip(self._output_keys, scheduler.fetch(handles)))
        arrays = {}
        for name, places in self.places.items():
            array = self.outputs[name]
            arrays[name] = np.empty(array.shape, array.dtype)
            for piece, place in zip(pieces(array, arrays[name]).values(), places):
                piece[...] = results[place.key] if place.number is None else results[place.key][place.number]
        return arrays


def _in_run(key: Key, run: int) -> Key:
    """A key of one of several runs in a graph."""
    return (f"{key[0]}-{run}", *key[1:])


def _layout(places: Mapping[str, Place]) -> Layout:
    """A pack for each task that updates state, in the order of its results."""
    packs: dict[Key, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name].number or 0):
        packs.setdefault(places[name].key, []).append(name)
    tasks = dict.fromkeys(place.key for place in places.values())
    return Layout(tuple(tuple(packs[key]) for key in tasks))
