"""Which tasks of a GPT-2 step are merged, in the words of the model: blocks, layers, updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from daskgpt.graph.calls import ChunkSum, KernelCall
from daskgpt.graph.grain import GroupOf, groups
from daskgpt.graph.inplace import RowSum, RowUpdate
from daskgpt.graph.nodes import Graph, Key, is_leaf

# Blocks, and chunks in the head, that may be worked on before the oldest of them is done with.
LOOKAHEAD = 2


def groups_of(
    graph: Graph, grain: str, updates: Callable[[str], Hashable] | None = None, phases: bool = False
) -> GroupOf:
    """The groups of a step's graph at a grain.

    updates   parameter -> the group of its gradient and update; None where nothing is updated
    phases    whether forward, backward and update stay in tasks of their own
    """
    chunk_group = groups(graph, grain, stretch_of)
    owners = update_tasks(graph, (ChunkSum, RowSum) if phases else (ChunkSum,)) if updates and grain != "kernel" else {}

    def group_of(key: Key) -> Hashable:
        phase = phase_of(key) if phases else ""
        if updates is None or key not in owners:
            group = chunk_group(key)
            return group if group is None else (phase, group)
        # Each share of a large tensor's rows stays a task.
        share = key[1] if isinstance(graph[key].func, RowUpdate | RowSum) else 0
        return phase, "update", updates(owners[key]), share

    return group_of


def phase_of(key: Key) -> str:
    """forward, backward or update."""
    return layer_of(key).partition(".")[2] or "update"


def stage_of(key: Key) -> str:
    """The loop of a fork-join program that a task belongs to: a layer's forward, a layer's backward, or the update."""
    phase, where = phase_of(key), where_of(key)
    if phase == "update":
        return phase
    # The gradients of one layer belong together; what is computed again comes before them.
    whole = phase == "forward" or where.endswith(".again")
    return f"{layer_of(key)}-{where if whole else where.rpartition('.')[0]}"


def update_tasks(graph: Graph, sums: tuple[type, ...]) -> dict[Key, str]:
    """The tasks that update a parameter, and its name: AdamW, what is picked from it, and the last sum before it.

    An earlier sum (the gradient that the unembedding gives to the tied embedding) stays apart: it is there long before
    the rest, and what it reads can be dropped. So does the same sum by rows beside an update that makes its own.
    """
    owners = {}
    for key, node in graph.items():
        layer, parameter = layer_of(key), where_of(key)
        if layer == "adamw":
            owners[key] = parameter
            for dependency in node.dependencies:
                if not is_leaf(graph[dependency]) and isinstance(graph[dependency].func, sums):
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


def memory_edges(graph: Graph) -> dict[Key, list[Key]]:
    """Task -> tasks that must run before it, so that memory is given back in time.

    Dask would take one chunk through the whole backward pass before the next one, and keep what the weight gradients of
    all blocks wait for. So a block's backward waits for the updates of the blocks `LOOKAHEAD` above, and the logits of
    a chunk wait until those of the chunk `LOOKAHEAD` before have been added to the unembedding's gradient.
    """
    updates: dict[int, list[Key]] = defaultdict(list)
    for key in graph:
        if phase_of(key) == "update" and (block := block_of(key)) is not None:
            updates[block].append(key)
    edges = {
        key: updates[block + LOOKAHEAD]
        for key in graph
        if phase_of(key) == "backward" and (block := block_of(key)) is not None and block + LOOKAHEAD in updates
    }
    return edges | _head_edges(graph)


def _head_edges(graph: Graph) -> dict[Key, list[Key]]:
    def of_crossentropy(phase: str, kind: type) -> list[Key]:
        return [key for key in graph if layer_of(key) == f"crossentropy.{phase}" and isinstance(graph[key].func, kind)]

    heads, sums = of_crossentropy("forward", KernelCall), of_crossentropy("backward", RowSum)
    order = next((graph[key].func.call.order for key in sums), None)
    if order is None or len({key[2] for key in sums}) != len(order.pieces):
        return {}  # all chunks together are smaller than the gradient
    piece_of = {chunk: number for number, piece in enumerate(order.pieces) for chunk in piece}
    done: dict[int, list[Key]] = defaultdict(list)
    for key in sums:
        done[key[2] + LOOKAHEAD].append(key)
    return {head: done[piece] for head in heads if (piece := piece_of[head[1:]]) in done}


def block_of(key: Key) -> int | None:
    """The number of the transformer block a task belongs to."""
    where = where_of(key).split(".")
    return int(where[1]) if where[0] == "h" else None


def layer_group(parameter: str) -> str:
    """Weight and bias of a layer are updated together."""
    return parameter.rpartition(".")[0]


def block_group(parameter: str) -> str:
    """All tensors of a block are updated together, and all outside of the blocks."""
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("h.") else "outside"


def update_groups(grain: str) -> Callable[[str], Hashable]:
    """Parameter -> the group of its update: where a chunk is one task, updates are few and large as well."""
    return block_group if grain == "chunk" else layer_group


def title(keys: Sequence[Key]) -> str:
    """What a merged task is called: its layer and pass; of several layers, the block, segment or update they make."""
    layers = list(dict.fromkeys(layer_of(key) for key in keys))
    if len(layers) == 1:
        return str(keys[0][0])
    if "adamw" in layers:
        return f"update-{layer_group(where_of(keys[-1])) or where_of(keys[-1])}_"
    passes = {layer.partition(".")[2] for layer in layers}
    way = "forward" if passes == {"forward"} else "backward" if passes == {"backward"} else "head"
    return f"tokens.{way}-{where_of(keys[0])}_"
