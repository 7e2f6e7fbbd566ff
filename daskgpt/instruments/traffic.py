"""What passes between the workers that share a step, without running it: `--plan --workers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from daskgpt.graph.distribute import Joined, Shard, ShardUpdate, Store
from daskgpt.model.parameters import tensors
from daskgpt.training.step import TrainingStep

KINDS = ("totals", "weights", "rows")
SHOWN = 8  # workers


@dataclass
class Load:
    """What a worker sends in one step, and what it receives, in bytes by kind.

    totals    of gradients, to who updates these rows
    weights   that it has updated, to all others
    rows      of activations that are summed where the table is updated that they belong to
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


def loads(step: TrainingStep) -> list[Load]:
    """The part of each worker, from the step that one of them has recorded.

    Not counted are the loss, the squares that make the norm of a gradient, and Dask's messages.
    """
    rank = step.rank
    assert rank is not None, "a step of one of several ranks"
    known, found = tensors(step.config), [Load() for _ in range(rank.count)]

    def pass_on(sender: int, reader: int, kind: str, size: int) -> None:
        if sender != reader:
            found[sender].sent[kind] += size
            found[reader].received[kind] += size

    owners: dict[str, set[int]] = {}
    for shard, parameter in _shards(step):
        owners.setdefault(parameter, set()).add(shard.owner)
        rows = shard.rows.stop - shard.rows.start
        values = rows * prod(known[parameter].shape[1:])
        half = shard.rounded and step.precision.packed and known[parameter].row.multiplied
        for other in range(rank.count):
            pass_on(other, shard.owner, "totals", 4 * values * len(rank.subtrees_of(other)))
            pass_on(shard.owner, other, "weights", (2 if half else 4) * values)
    for node in step.recorded.unmerged.values():
        if isinstance(getattr(node, "func", None), Joined):
            call = node.func.call
            sizes = {"t": step.batch_shape[1]} | {axis: sum(chunks) for axis, chunks in call.chunks.items()}
            sequence = sum(4 * prod(sizes.get(axis, step.config.channels) for axis in axes[1:]) for axes in call.inputs)
            for other in range(rank.count):
                first, last = rank.sequences_of(other)
                for owner in owners[node.func.parameter]:
                    pass_on(other, owner, "rows", (last - first) * sequence)
    return found


def _shards(step: TrainingStep) -> list[tuple[Shard, str]]:
    """All shards of a step, and the parameters that they are rows of."""
    functions = (getattr(node, "func", None) for node in step.recorded.unmerged.values())
    return [(each.shard, each.origin.parameter) for each in functions if isinstance(each, ShardUpdate | Store)]


def describe_loads(found: Sequence[Load]) -> str:
    """A table for people, of megabytes a step."""
    lines = [f"{'worker':8} " + "".join(f"{kind:>9}" for kind in KINDS) + f"{'sent':>9}{'received':>10}"]
    for number, own in enumerate(found[:SHOWN]):
        cells = "".join(f"{own.sent[kind] / 1e6:9,.1f}" for kind in KINDS)
        lines.append(f"{number:<8} {cells}{own.sent.total() / 1e6:9,.1f}{own.received.total() / 1e6:10,.1f}")
    lines += [f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
    whole = sum((own.sent for own in found), Counter[str]())
    cells = "".join(f"{whole[kind] / 1e6:9,.1f}" for kind in KINDS)
    return "\n".join([*lines, f"{'together':8} {cells}{whole.total() / 1e6:9,.1f}{'MB a step':>14}"])
