"""Which tasks of a GPT-2 step are merged, in the words of the model: blocks, layers, updates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from daskgpt.graph.grain import GroupOf, groups
from daskgpt.graph.inplace import RowUpdate
from daskgpt.graph.nodes import Graph, Key


def groups_of(graph: Graph, grain: str, updates: Callable[[str], Hashable] | None = None) -> GroupOf:
    """The groups of a step's graph at a grain.

    updates   parameter -> the group of its gradient and update; None where nothing is updated
    """
    chunk_group = groups(graph, grain, stretch_of)
    owners = update_tasks(graph) if updates and grain != "kernel" else {}

    def group_of(key: Key) -> Hashable:
        if updates is None or key not in owners:
            return chunk_group(key)
        # Each share of a large tensor's rows stays a task.
        share = key[1] if isinstance(graph[key].func, RowUpdate) else 0
        return "update", updates(owners[key]), share

    return group_of


def update_tasks(graph: Graph) -> dict[Key, str]:
    """The tasks that update a parameter, and its name: AdamW, what is picked from it, and the last sum before it.

    An earlier sum (the gradient that the unembedding gives to the tied embedding) stays apart: it is there long before
    the rest, and what it reads can be dropped.
    """
    owners = {}
    for key, node in graph.items():
        layer, parameter = layer_of(key), where_of(key)
        if layer == "adamw":
            owners[key] = parameter
            if isinstance(node.func, RowUpdate):
                continue
            for dependency in node.dependencies:
                if ".backward" in layer_of(dependency):
                    owners[dependency] = parameter
    return owners


def layer_of(key: Key) -> str:
    """`linear.forward` of a key `linear.forward-h.0.attn.c_attn-token`."""
    return str(key[0]).split("-")[0]


def where_of(key: Key) -> str:
    """`h.0.attn.c_attn` of a key `linear.forward-h.0.attn.c_attn-token`."""
    return str(key[0]).split("-")[1]


def stretch_of(key: Key) -> Hashable:
    """The block a task belongs to and whether forward or backward; the embedding goes with the first block."""
    where = where_of(key).split(".")
    if where[0] == "h":
        stretch = ".".join(where[:2])
    else:
        stretch = "h.0" if where[0] == "wte+wpe" else "head"
    return stretch, stretch != "head" and "backward" in layer_of(key)


def layer_group(parameter: str) -> str:
    """Weight and bias of a layer are updated together."""
    return parameter.rpartition(".")[0]


def title(keys: Sequence[Key]) -> str:
    """What a merged task is called: its layer and pass; of several layers, the block, segment or update they make."""
    layers = list(dict.fromkeys(layer_of(key) for key in keys))
    if len(layers) == 1:
        return str(keys[0][0])
    if "adamw" in layers:
        return f"update-{layer_group(where_of(keys[-1]))}_"
    passes = {layer.partition(".")[2] for layer in layers}
    way = "forward" if passes == {"forward"} else "backward" if passes == {"backward"} else "head"
    return f"tokens.{way}-{where_of(keys[0])}_"
