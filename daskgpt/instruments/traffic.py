"""What passes between the workers that share a step, without running it: `--plan --workers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

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
    distribution = step.distribution
    assert distribution is not None, "a step of one of several ranks"
    rank = distribution.rank
    known, found = tensors(step.config), [Load() for _ in range(rank.count)]

    def pass_on(sender: int, reader: int, kind: str, size: int) -> None:
        if sender != reader:
            found[sender].sent[kind] += size
            found[reader].received[kind] += size

    owners: dict[str, set[int]] = {}
    for shard in (each for own in distribution.shards.values() for each in own):
        owners.setdefault(shard.parameter, set()).add(shard.owner)
        half = shard.rounded and step.precision.packed and known[shard.parameter].row.multiplied
        for other in range(rank.count):
            pass_on(other, shard.owner, "totals", shard.bytes * len(rank.subtrees_of(other)))
            pass_on(shard.owner, other, "weights", shard.bytes // (2 if half else 1))
    for call, parameter in distribution.gathered:
        sizes = {"t": step.batch_shape[1]} | {axis: sum(chunks) for axis, chunks in call.chunks.items()}
        sequence = sum(4 * prod(sizes.get(axis, step.config.channels) for axis in axes[1:]) for axes in call.inputs)
        for other in range(rank.count):
            first, last = rank.sequences_of(other)
            for owner in owners[parameter]:
                pass_on(other, owner, "rows", (last - first) * sequence)
    return found


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
