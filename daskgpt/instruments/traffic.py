"""What passes between workers in a step, what each of them does and holds, without running it: `--plan --workers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from daskgpt.graph.nodes import GraphNode, Key
from daskgpt.graph.program import calls_of
from daskgpt.graph.recording import AHEAD, SENT, STATE, Runnable
from daskgpt.graph.spreading import PartJoin, PartSum, PartTotal, Sent
from daskgpt.training.placement import LOSS
from daskgpt.training.stand_ins import Trial
from daskgpt.training.step import TrainingStep

KINDS = ("weights", "sums", "activations", "losses")
SHOWN = 8  # workers


@dataclass
class Load:
    """A worker's part of one step after the first.

    tasks      that it runs, the data that it is sent included
    sent       bytes to other workers by kind, and `received` from them
    memory     bytes at most: what it holds and makes, and all weights that it is sent
    """

    tasks: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    memory: int = 0


def loads(step: TrainingStep) -> list[Load]:
    """The part of each worker in a recorded step that is spread over several.

    A result goes once to each worker that reads it. Not counted are what the client sends (the batch and the graph),
    Dask's messages, and who reads the loss.
    """
    trial, runnable = Trial(step), step.runnable
    homes, graph, sizes = runnable.homes, runnable.graph, trial.results
    found = [Load() for _ in range(step.spread_over)]
    passed: dict[tuple[Key, int], None] = {}
    for key, node in graph.items():
        found[homes.get(key, 0)].tasks += 1  # to a cluster data of a step is a task as well
        for dependency in node.dependencies:
            if homes.get(dependency, homes.get(key, 0)) != homes.get(key, 0):
                passed[dependency, homes.get(key, 0)] = None
    for dependency, reader in passed:
        kind, size = _sent(runnable, dependency, sizes)
        found[homes[dependency]].sent[kind] += size
        found[reader].received[kind] += size
    for number, own in enumerate(found):
        own.memory = trial.account.peaks[number] + own.received["weights"]
    return found


def _sent(runnable: Runnable, key: Key, sizes: dict[Key, int]) -> tuple[str, int]:
    """Kind and bytes of a result that goes to another worker. Of the state each pack is what its update returns, from
    whichever worker it comes; so is what is sent in its place, which the owner's task alone has made.
    """
    if key[0] == STATE or key[0].startswith(AHEAD):
        return "weights", sizes[runnable.updates[key[1]]]
    if key[0].startswith(SENT):
        return "weights", sizes[key[:2]]
    return _kind(runnable.graph[key]), sizes.get(key, 0)


def _kind(node: GraphNode) -> str:
    functions = [getattr(call.function, "__self__", call.function) for call in calls_of(node)]
    if any(isinstance(function, Sent) and function.share.unit == LOSS for function in functions):
        return "losses"
    sums = any(isinstance(function, PartSum | PartTotal | PartJoin) for function in functions)
    return "sums" if sums else "activations"


def describe_loads(found: Sequence[Load]) -> str:
    """A table for people, of megabytes a step."""
    widths = {"weights": 9, "sums": 9, "activations": 12, "losses": 7}
    kinds = "".join(f"{kind:>{width}}" for kind, width in widths.items())
    lines = [f"{'worker':8} {'tasks':>6}{kinds}{'sent':>9}{'received':>10} {'memory':>8}"]
    for number, own in enumerate(found[:SHOWN]):
        cells = "".join(f"{own.sent[kind] / 1e6:{width},.1f}" for kind, width in widths.items())
        sent, received = own.sent.total() / 1e6, own.received.total() / 1e6
        lines.append(f"{number:<8} {own.tasks:6,}{cells}{sent:9,.1f}{received:10,.1f} {own.memory / 1e6:8,.0f}")
    lines += [f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
    whole = sum((own.sent for own in found), Counter[str]())
    cells = "".join(f"{whole[kind] / 1e6:{width},.1f}" for kind, width in widths.items())
    together = f"{sum(own.tasks for own in found):6,}{cells}{whole.total() / 1e6:9,.1f}"
    return "\n".join([*lines, f"{'together':8} {together}   MB a step"])
