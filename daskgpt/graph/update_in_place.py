"""Updates in place: the sums that make a gradient and the update that uses it as one task, a band of rows at a time.

Out of place, an update writes new arrays, and Dask can compute it again when a worker is lost. A local scheduler loses
no workers, so its updates overwrite the arrays. Only this module differs between the two. It rewrites a recorded graph:

    sum over chunks -> gradient -> update -> picks      becomes      one or several `RowUpdate` tasks

A band of rows of the gradient is summed and used while it is in the cache; the whole gradient is never written. A task
may update a part of the rows, so that several threads share a large tensor.

The results equal those of updates into new arrays, bit for bit:
- A sum is made row by row in the same order of chunks in any task, and an update reads one number of each array at a
  time. An update that reads more (Muon's) declares it, and gets all rows at once.
- No task sees a half-written tensor. Tasks that read the old value run before the update: these edges are returned
  beside the graph (`after`). No task of the same run reads the new value; the next run starts when this one is done,
  or waits for the update where runs overlap (`compiled.CompiledGraph.window`).
- No other task needs a gradient that is not written. A gradient with other readers than its update (such as its norm)
  is summed by separate tasks, from which the update takes its rows: all of them, or only some if no reader needs all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from daskgpt.config.errors import require
from daskgpt.graph.calls import Band, ChunkSum, KernelCall, Memory, RowSum, TaskCall, call_of, is_ours
from daskgpt.graph.nodes import Graph, Key, dependents_of, key_trees, only_key, read_parts, task
from daskgpt.kernels.bfloat16.gemm import TrainedWeight
from daskgpt.kernels.optimizers import squares

# Most numbers of a tensor that one task updates on one or two threads: some 20 ms of sums and memory traffic. More
# threads share them, down to the least number: each task packs all chunks' inputs, and takes the interpreter's lock for
# some 0.1 ms.
TASK_ELEMENTS, LEAST_ELEMENTS = 1 << 22, 1 << 20
# Of so many threads, one can wait for another's logits before both are added to the gradient of the table.
THREADS_OF_PIECE = 4


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph.

    updates   the keys of the tasks that overwrite the state, whose results no task reads; none if the state is
              replaced
    after     task -> tasks that must have run before although it does not need their results
    """

    graph: Graph
    updates: list[Key] = field(default_factory=list)
    after: dict[Key, list[Key]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Update:
    """The update of a tensor. Called, it leaves weight and moments unchanged: the kernel runs on copies, which are
    returned, the weight alone if there are no moments. So its results have the bits of an update in place.

    kernel   called as kernel(weight rows, gradient rows, *rows of each moment, hyper, **options)
    fused    summing kernel -> kernel that does its sum and the update in one pass
    whole    whether the kernel needs all rows at once
    """

    kernel: Callable[..., Any]
    fused: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    whole: bool = False

    def __call__(self, weight: Any, gradient: np.ndarray, *others: np.ndarray, **options: float) -> Any:
        *moments, hyper = others
        packed = isinstance(weight, TrainedWeight)
        new: list[Any] = [array.copy() for array in (weight.values if packed else weight, *moments)]
        self.on_rows(new[0], gradient, *new[1:], hyper, **options)
        if packed:
            new[0] = TrainedWeight.of(new[0])
        return tuple(new) if moments else new[0]

    def on_rows(self, *arrays: Any, **options: float) -> None:
        """Run the kernel, which changes weight and moments. Errors   TypeError if it returns a new weight instead"""
        made = self.kernel(*arrays, **options)
        weight = made[0] if isinstance(made, tuple) else made
        rule, got = "the kernel of an optimizer must change the weight in place", "a new one, which it returns"
        require(weight is None or weight is arrays[0], "update", rule, got, "Write weight -= ..., say.", TypeError)

    def at_once(self, bands: Sequence[Band]) -> list[Sequence[Band]]:
        """Return the bands of rows that are summed before each call of the kernel."""
        return [bands] if self.whole else [[band] for band in bands]


@dataclass(frozen=True)
class UpdateRules:
    """The rules by which a graph's updates are made in place: of tasks whose origin names a parameter, and whose kernel
    is an `Update`.

    summed    number of rows over which each gradient is summed, in all chunks together
    threads   number of tasks that can run at once
    ranked    whether several ranks share the batch
    """

    summed: int
    threads: int
    ranked: bool

    @property
    def elements(self) -> int:
        """Most numbers of a tensor that one task updates."""
        return elements_of_task(self.threads, self.ranked)

    @property
    def pieces(self) -> int:
        """Pieces of the batch that one task adds where all of them are larger than the gradient."""
        return max(self.threads // THREADS_OF_PIECE, 1)

    def updates(self, graph: Graph) -> list[Key]:
        """Return the tasks that update a parameter, in the order of the model."""
        calls = {key: call for key, node in graph.items() if isinstance(call := call_of(node), KernelCall)}
        return [key for key, call in calls.items() if call.origin and call.origin.parameter]


def squares_in(graph: Graph, keys: Iterable[Key]) -> list[Key]:
    """Return those tasks that square a gradient, which may read some of its rows at a time."""
    return [key for key in keys if call_of(graph[key]).kernel is squares]


class RowUpdate(TaskCall):
    """Update some rows of a tensor in place, a band at a time while it is in the cache.

    The rows of the gradient are summed here, added from the totals of all ranks, or given. The task takes lists: the
    pieces of each sum, as of `ChunkSum.arrange`; the start of the first one, the gradient, or totals; weight, moments
    and hyper.

    bands   the rows that are summed at a time
    """

    by_rows = True

    def __init__(
        self,
        call: KernelCall,
        bands: Sequence[Band],
        *,
        base: int,
        sums: Sequence[ChunkSum] = (),
        tree: Callable[..., np.ndarray] | None = None,
    ) -> None:
        """call   the update out of place
        base   the row with which the given gradient, or the totals, begin
        sums   sums that are made here, each continuing from the total of the one before
        tree   adds the totals of all ranks, see `distribute.Rank.add`
        """
        self.rule = cast(Update, call.kernel)
        self.bands, self.base, self.sums, self.tree = tuple(bands), base, tuple(sums), tree
        self.options, self.origin = call.options, call.origin
        self.columns, self.dtype = call.shapes(("",))[0][1:], call.dtype
        self.fused = self.rule.fused.get(sums[0].kernel) if len(sums) == 1 else None

    @property
    def traceable(self) -> bool:
        return not self.tree and is_ours(self.rule.kernel) and all(call.traceable for call in self.sums)

    @property
    def rows(self) -> slice:
        """The rows of the tensor."""
        return slice(self.bands[0][0], self.bands[-1][1])

    @property
    def size(self) -> int:
        """Number of elements of the rows."""
        return math.prod((self.bands[-1][1] - self.bands[0][0], *self.columns))

    def run(self, pieces: Sequence[Any], given: Sequence[Any], state: Sequence[Any]) -> None:
        chains = [call.in_order(chunks) for call, chunks in zip(self.sums, pieces)]
        if self.fused is not None:
            parts = [part for chain in chains[0] for part in chain.calls]
            groups = [chain.group for chain in chains[0] for _ in chain.calls]
            start = given[0] if given else None
            self.fused(parts, groups, start, state, self.rows.start, self.rows.stop, **self.options)
            return
        *tensors, hyper = state
        for bands in self.rule.at_once(self.bands):
            first, last = bands[0][0], bands[-1][1]
            weight, *moments = (tensor[first:last] for tensor in tensors)
            rows = slice(first - self.base, last - self.base)
            if self.tree:
                gradient = self.tree(*given, rows=rows)
            else:
                gradient = given[0][rows] if given else np.empty((last - first, *self.columns), self.dtype, like=hyper)
            for band in bands if self.sums else ():
                total = gradient[band[0] - first : band[1] - first]
                for number, (call, chain) in enumerate(zip(self.sums, chains)):
                    call.add(chain, [total], band[0], started=bool(given) or number > 0)
            self.rule.on_rows(weight, gradient, *moments, hyper, **self.options)
            if isinstance(tensors[0], TrainedWeight):
                tensors[0].pack(weight, first)

    def stand_in(self, memory: Memory, key: Key, *arguments: Any) -> None:
        """Hold the rows of the gradient that are used at once, unless the gradient is given."""
        for bands in self.rule.at_once(self.bands) if self.sums or self.tree else ():
            memory.array("gradients", (bands[-1][1] - bands[0][0], *self.columns), self.dtype)


def elements_of_task(threads: int, ranked: bool = False) -> int:
    """Return the most numbers of a tensor that one task updates if so many tasks can run at once. On ranks the least is
    a quarter: messages wait for the last of the sums.
    """
    return max(2 * TASK_ELEMENTS // max(threads, 2), LEAST_ELEMENTS // (4 if ranked else 1))


def update_in_place(graph: Graph, rules: UpdateRules, *, apart: bool) -> Rewritten:
    """Rewrite the updates of a graph to work in place.

    apart   whether sums and updates are separate tasks (with a barrier between backward and update)
    """
    dependents = dependents_of(graph)
    new, done, after = dict(graph), [], {}
    parts: dict[Key, list[Any]] = defaultdict(list)  # a call on a whole gradient -> those on its rows
    for update in rules.updates(graph):
        weight, gradient, *moments, hyper = graph[update].args
        last, call = only_key(gradient), graph[update].func
        others = dependents[last] - {update}
        of_rows = squares_in(graph, sorted(others))
        # Other tasks read the whole gradient, or it is summed by parts of the batch: it stays unchanged.
        shared = len(of_rows) < len(others) or isinstance(graph[last].func, RowSum)
        of_rows = [] if shared else of_rows
        # If the parts of a sum (summed, rows) are larger than its total (rows, columns), a separate task makes it as
        # soon as they are ready, so that they can be dropped.
        sums: list[Key] = []
        if not (apart or shared or of_rows):
            sums = chain_of(
                graph, last, lambda key: len(dependents[key]) == 1 and rules.summed < graph[key].func.shape[-1]
            )
        calls = [graph[key].func for key in sums]
        pieces = [call.arrange(key_trees(graph[key]))[0] for call, key in zip(calls, sums)]
        state = [only_key(argument) for argument in (weight, *moments, hyper)]
        before = start_of(graph, sums[0]) if sums else last
        gone = [update, *dependents[update], *sums, *of_rows]
        if before is not None and not shared:
            gone += chain_of(graph, before)
        for key in gone:
            del new[key]
        for number, bands in enumerate(shares(graph[last].func, call.kernel, rules.elements)):
            given = []
            if before is not None:
                given = [before if shared else row_sum(graph, new, before, number, bands, rules)]
            for reader in of_rows:
                key = (f"{reader[0]}.rows", number)
                new[key] = task(key, graph[reader].func.on_rows(), given)
                parts[reader].append(key)
            program = RowUpdate(call, bands, base=0 if shared else bands[0][0], sums=calls)
            key = (update[0], number)
            new[key] = task(key, program, [pieces, given, state])
            done.append(key)
            after[key] = [reader for reader in dependents[state[0]] if reader != update]
    read_parts(graph, new, dependents, parts)
    return Rewritten(new, done, after)


def row_sum(graph: Graph, new: Graph, key: Key, number: int, bands: Sequence[Band], rules: UpdateRules) -> Key:
    """Add the tasks that sum some rows of a gradient, and the ones they continue from; return the last one's key.

    If the parts of all pieces are larger than the total, a task adds those of one or a few pieces, and drops them.
    """
    call, before = graph[key].func, start_of(graph, key)
    pieces, *_ = call.arrange(key_trees(graph[key]))
    start = [] if before is None else [row_sum(graph, new, before, number, bands, rules)]
    together = len(pieces) if rules.summed < call.shape[-1] else rules.pieces
    for first in range(0, len(pieces), together):
        task_key = (f"{key[0]}.rows", number, first)
        numbers = range(first, min(first + together, len(pieces)))
        program = RowSum(call, bands, numbers, started=before is not None)
        new[task_key] = task(task_key, program, [pieces[first : first + together], *start])
        start = [task_key]
    return task_key


def start_of(graph: Graph, key: Key) -> Key | None:
    """Return the sum that a sum over chunks continues from."""
    extra = graph[key].args[len(graph[key].func.inputs) :]
    return only_key(extra[0]) if extra else None


def chain_of(graph: Graph, key: Key, belongs: Callable[[Key], bool] = lambda key: True) -> list[Key]:
    """Return a sum and those that it continues from as long as they belong to the chain, the first one first."""
    before = None if isinstance(graph[key].func, RowSum) else start_of(graph, key)
    return [*(chain_of(graph, before, belongs) if before is not None and belongs(before) else ()), key]


def shares(call: ChunkSum | RowSum, rule: Update, most: int) -> list[list[Band]]:
    """Return the bands of rows of a tensor in shares of at most so many numbers, or of 64 rows; in one share if they
    cannot be updated separately.
    """
    if isinstance(call, RowSum):
        call = call.call
    bands = call.bands(most)
    if rule.whole:
        return [bands]
    elements = math.prod(call.shape[1:]) * (bands[0][1] - bands[0][0])
    per_task = max(1, most // elements)
    tasks = -(-len(bands) // per_task)
    ends = [len(bands) * number // tasks for number in range(tasks + 1)]
    return [bands[first:last] for first, last in pairwise(ends)]
