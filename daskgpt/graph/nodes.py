"""The nodes of a Dask graph. Only this module touches `dask._task_spec`, which Dask keeps private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import DataNode, List, Task, TaskRef
from dask._task_spec import GraphNode as GraphNode
from dask.array.core import slices_from_chunks
from dask.core import reverse_dict
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from daskgpt.config.errors import require

Key = tuple[Any, ...]
Graph = dict[Key, GraphNode]
Chunks = tuple[tuple[int, ...], ...]


def keys_of(array: da.Array) -> list[Key]:
    """Return the keys of an array's chunks, last axis fastest."""
    return [(array.name, *index) for index in product(*map(range, array.numblocks))]


def cuts_of(array: da.Array) -> list[Any]:
    """Return the indices of an array's chunks in the whole, which are views."""
    # The ellipsis makes the chunk of an array without axes a view, too.
    return [(*index, ...) for index in slices_from_chunks(array.chunks)]


def pieces(array: da.Array, value: np.ndarray) -> dict[Key, np.ndarray]:
    """Return the chunks of `array` if the whole is `value`, as views."""
    return {key: value[index] for key, index in zip(keys_of(array), cuts_of(array))}


def array_of(name: str, chunks: Chunks, dtype: np.typing.DTypeLike, value: np.ndarray | None = None) -> da.Array:
    """Return a dask array whose chunks are views of `value` (dask.array.from_array would copy and hash them).

    value   None for an array without data: a leaf of a recorded graph, which `with_leaves` fills for each run

    Errors   RuntimeError if Dask makes array expressions, which have no graph to record
    """
    rule, advice = "Dask's array expressions must be off", "Unset DASK_ARRAY__QUERY_PLANNING before Python starts."
    require(not da.array_expr_enabled(), "daskgpt", rule, {"array.query-planning": True}, advice, RuntimeError)
    empty = da.Array({}, name, chunks, dtype=dtype)
    data = dict.fromkeys(keys_of(empty)) if value is None else pieces(empty, value)
    nodes = {key: DataNode(key, chunk) for key, chunk in data.items()}
    return da.Array(HighLevelGraph.from_collections(name, nodes, ()), name, chunks, dtype=dtype)


def from_numpy(name: str, value: np.ndarray, chunks: Chunks) -> da.Array:
    """Return a dask array of these values."""
    return array_of(name, chunks, value.dtype, value)


def graph_of(arrays: Iterable[da.Array]) -> Graph:
    """Return the tasks of the arrays, without fusing or changing any."""
    graph: Graph = HighLevelGraph.merge(*(array.__dask_graph__() for array in arrays)).to_dict()
    return graph


def in_one_layer(graph: Graph) -> HighLevelGraph:
    """Return the graph in a form that Dask's clients use directly: for a plain dictionary they would pickle all tasks
    to compute a name.
    """
    return HighLevelGraph.from_collections("step", graph, ())


def pinned(calls: Mapping[str, tuple[str, Callable[[], Any]]]) -> HighLevelGraph:
    """Return a graph of independent calls by their keys, each to be made on the worker with an address."""
    layers = {
        key: MaterializedLayer({key: Task(key, call)}, annotations={"workers": [address], "allow_other_workers": False})
        for key, (address, call) in calls.items()
    }
    return HighLevelGraph(layers, {key: set() for key in layers})


def with_leaves(graph: Graph, leaves: Mapping[Key, Any]) -> Graph:
    """Return the recorded graph with new data at its leaves."""
    return {**graph, **{key: DataNode(key, value) for key, value in leaves.items()}}


def renamed(graph: Graph, new: Mapping[Key, Key]) -> Graph:
    """Return the graph with other keys; keys that are not in `new` stay."""
    return {new.get(key, key): node.substitute(new, key=new.get(key, key)) for key, node in graph.items()}


def is_leaf(node: GraphNode) -> bool:
    """Return whether a node is data, not a task."""
    return isinstance(node, DataNode)


def key_tree(argument: Any) -> Any:
    """Return an argument of a task, a chunk or lists of them, as a key or nested lists of keys."""
    return [key_tree(item) for item in argument.args] if isinstance(argument, List) else argument.key


def key_trees(node: GraphNode) -> list[Any]:
    """Return the arguments of a task, each as a key or nested lists of keys."""
    assert isinstance(node, Task)
    return [key_tree(argument) for argument in node.args]


def all_keys(tree: Any) -> list[Key]:
    """Return the keys in nested lists, one after the other."""
    return [key for item in tree for key in all_keys(item)] if isinstance(tree, list) else [tree]


def only_key(argument: Any) -> Key:
    """Return the key of the one task that an argument names, however deep in lists."""
    (key,) = all_keys(key_tree(argument))
    return key


def task(key: Key, function: Any, arguments: Iterable[Any]) -> GraphNode:
    """Return a task that calls `function` with the results of other tasks.

    arguments   keys, nested lists of keys, or arguments of another task
    """

    def argument(given: Any) -> Any:
        if isinstance(given, list):
            return List(*map(argument, given))
        return given if isinstance(given, TaskRef | List) else TaskRef(given)

    return Task(key, function, *map(argument, arguments))


def waiting_for(node: GraphNode, earlier: Iterable[Key]) -> GraphNode:
    """Return the same task, to run after others whose results it does not read; they are its last arguments."""
    assert isinstance(node, Task)
    extra = [TaskRef(key) for key in earlier if key not in node.dependencies]
    return Task(node.key, node.func, *node.args, *extra) if extra else node


def dependents_of(graph: Graph) -> dict[Key, set[Key]]:
    """Return for each task the tasks that read its result."""
    dependents: dict[Key, set[Key]] = reverse_dict({key: node.dependencies for key, node in graph.items()})
    return dependents


def read_parts(graph: Graph, new: Graph, dependents: Mapping[Key, set[Key]], parts: Mapping[Key, list[Key]]) -> None:
    """Let the readers of a task that was divided read a list of its parts."""
    for reader in {other for key in parts for other in dependents[key]}:
        arguments = [parts[key] if (key := only_key(a)) in parts else a for a in graph[reader].args]
        new[reader] = task(reader, graph[reader].func, arguments)
