"""Programs, which fused tasks run, and records of the time and thread of each of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from threading import Lock, get_ident
from time import perf_counter
from typing import Any, NamedTuple

from daskgpt.graph.calls import KernelCall
from daskgpt.graph.lowering import Lowered, NativeRun, filled, form_of, lower
from daskgpt.graph.nodes import Graph, GraphNode, Key, key_trees, task
from daskgpt.kernels.native import flush_to_zero


class Span(NamedTuple):
    """One call: the key of its (unmerged) task, its thread, seconds of time.perf_counter, bytes that it returned.

    run   the run of the graph that it belongs to
    """

    key: Key
    thread: int
    start: float
    end: float
    bytes: int = 0
    run: int = 0


class Spans(list[Span]):
    """Calls, task by task as they end.

    running   thread -> when the task that it runs began; its calls follow when it has ended
    """

    def __init__(self, calls: Iterable[Span] = ()) -> None:
        super().__init__(calls)
        self.running: dict[int, float] = {}


class Recorder:
    """Collects the calls of programs: of one graph, which a scheduler of this process runs, so that several runs may
    share the process; or of all programs that a cluster has sent to this process.

    spans       of the calls while they are recorded, else None
    first_run   number of the graph's run on its scheduler; programs that a cluster sends have their own
    """

    def __init__(self) -> None:
        self.spans: Spans | None = None
        self.first_run = 0

    def __reduce__(self) -> Any:
        return recorder_of_process, ()  # a program that is sent to a process belongs to the recorder there


RECORDER = Recorder()


def recorder_of_process() -> Recorder:
    """Return the recorder of the programs that a cluster has sent to this process."""
    return RECORDER


def bytes_of(result: Any) -> int:
    """Return the bytes of the arrays that a call returned; arrays updated in place are not returned."""
    if isinstance(result, tuple):
        return sum(map(bytes_of, result))
    return getattr(result, "nbytes", 0)


@dataclass(frozen=True)
class Place:
    """The place of a value: the result of a task, or one of the values in it."""

    key: Key
    number: int | None = None


@dataclass(frozen=True)
class Call:
    """One task inside a program: its function, and the slots of its arguments, its result, and values to drop after
    it."""

    key: Key
    function: Callable[..., Any]
    arguments: list[Any]
    slot: int
    ended: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Layer and pass, as its key begins."""
        return str(self.key[0]).partition("-")[0]


class Values:
    """The results of a task that others read one by one: each is dropped when its last reader has taken it.

    Dask drops the result of a task only as a whole, when no task needs any of it. The logits of a chunk would then live
    as long as its loss.
    """

    def __init__(self, values: Sequence[Any], readers: Sequence[int]) -> None:
        self.values, self.left, self.lock = list(values), list(readers), Lock()

    def __getitem__(self, number: int) -> Any:
        return self.values[number]

    def take(self, number: int) -> Any:
        """Return a value to one of its readers."""
        with self.lock:
            value = self.values[number]
            self.left[number] -= 1
            if not self.left[number]:
                self.values[number] = None
        return value


class Program:
    """The program of a fused task.

    It is called with the results of the tasks it depends on, and holds values in numbered slots; a slot is emptied
    when its last reader has run, so that an activation lives no longer than in separate tasks.

    run       its place among several runs in one graph, recorded in spans
    recorder  of its calls
    lowered   shared with copies for other runs; None if all calls stay in Python
    """

    run = 0
    recorder = RECORDER
    lowered: Lowered | None = None

    def __init__(
        self,
        calls: Sequence[Call],
        arrivals: Sequence[tuple[int, int | None, int]],
        outputs: Sequence[int],
        readers: Sequence[int] | None = None,
        packed: bool = False,
    ) -> None:
        """arrivals  (argument, number of the value in it or None, slot) of each value from outside
        readers   number of tasks that read each output, if values are dropped one by one
        packed    whether a tuple is returned even if there is one output
        """
        self.calls, self.arrivals, self.outputs = tuple(calls), tuple(arrivals), tuple(outputs)
        self.readers, self.packed = readers, packed
        self.size = 1 + max([*(call.slot for call in calls), *(slot for _, _, slot in arrivals)], default=-1)

    def __call__(self, *results: Any) -> Any:
        slots: list[Any] = [None] * self.size
        for argument, number, slot in self.arrivals:
            result = results[argument]
            if number is None:
                slots[slot] = result
            else:
                slots[slot] = result.take(number) if isinstance(result, Values) else result[number]
        spans, thread, run = self.recorder.spans, get_ident(), self.recorder.first_run + self.run
        native = self.lowered is not None and self.lowered.items
        if spans is not None:
            spans.running[thread] = perf_counter()
        calls = self._lowered(slots, spans is not None) if native else self._called(slots)
        for call, start, end, size in calls:
            if spans is not None:
                spans.append(Span(call.key, thread, start, end, size, run))
        if spans is not None:
            spans.running.pop(thread, None)
        if len(self.outputs) == 1 and not self.packed:
            return slots[self.outputs[0]]
        values = tuple(slots[slot] for slot in self.outputs)
        return values if self.readers is None else Values(values, self.readers)

    def _called(self, slots: list[Any]) -> Iterator[tuple[Call, float, float, int]]:
        """Make all calls from Python, then lower them; yield each with its start, its end and bytes of its result."""
        forms = {slot: form_of(slots[slot]) for _, _, slot in self.arrivals}
        with flush_to_zero():
            for call in self.calls:
                yield self._made(call, slots)
                if type(made_by := getattr(call.function, "__self__", None)) is KernelCall:
                    made_by.check(call.key, slots[call.slot])
                forms[call.slot] = form_of(slots[call.slot])
                _drop(slots, call.ended)
        if self.lowered is not None:
            lower(self.lowered, self.calls, [slot for *_, slot in self.arrivals], forms, self.outputs)

    def _lowered(self, slots: list[Any], timed: bool) -> Iterator[tuple[Call, float, float, int]]:
        assert self.lowered is not None
        items = self.lowered.items
        slots += [None] * self.lowered.slots
        # Native runs flush by themselves; to do it from Python takes the interpreter's lock.
        with nullcontext() if all(isinstance(item, NativeRun) for item in items) else flush_to_zero():
            for item in items:
                if isinstance(item, NativeRun):
                    yield from item.run(slots, timed)
                else:
                    yield self._made(item, slots)
                    _drop(slots, item.ended)

    def _made(self, call: Call, slots: list[Any]) -> tuple[Call, float, float, int]:
        """Make a call from Python; return it with its start, its end and the bytes of its result."""
        start = perf_counter()
        slots[call.slot] = call.function(*filled(call.arguments, slots))
        return call, start, perf_counter(), bytes_of(slots[call.slot])


def program_of(
    graph: Graph,
    members: Sequence[Key],
    outputs: Sequence[Key],
    places: Mapping[Key, Place],
    readers: Mapping[Key, int] | None,
    packed: bool = False,
) -> tuple[Program, list[Key]]:
    """Return the program of some tasks in the given order, and the keys whose results it is called with.

    places   places of values from outside; a key that is missing is a separate task
    readers  number of other tasks that read each value, None if all are held until the last of them is read
    packed   whether it returns a tuple even of one value
    """
    slots: dict[Key, int] = {}
    needed: list[Key] = []
    arrivals = []
    inside = set(members)
    for key in members:
        for dependency in sorted(graph[key].dependencies - inside - slots.keys(), key=str):
            place = places.get(dependency, Place(dependency))
            if place.key not in needed:
                needed.append(place.key)
            slots[dependency] = len(slots)
            arrivals.append((needed.index(place.key), place.number, slots[dependency]))
    for key in members:
        slots[key] = len(slots)
    last = {slots[dependency]: number for number, key in enumerate(members) for dependency in graph[key].dependencies}
    kept = {slots[key] for key in outputs}
    calls = []
    for number, key in enumerate(members):
        function, arguments = graph[key].func, filled(key_trees(graph[key]), slots)
        if hasattr(function, "arrange"):  # a kernel call: its arguments are taken out of Dask's nested lists beforehand
            function, arguments = function.run, function.arrange(arguments)
        ended = tuple(slot for slot, final in last.items() if final == number and slot not in kept)
        calls.append(Call(key, function, arguments, slots[key], ended))
    counts = None if readers is None else [readers[key] for key in outputs]
    return Program(calls, arrivals, [slots[key] for key in outputs], counts, packed), needed


def in_run(node: GraphNode, run: int) -> GraphNode:
    """Return a fused task as part of a run so many runs later; other nodes (data, barriers) unchanged."""
    if not calls_of(node):
        return node
    program = copy(node.func)
    program.run += run
    return task(node.key, program, node.args)


def calls_of(node: GraphNode) -> tuple[Call, ...]:
    """Return the calls that a fused task makes; none for a task of another kind (a barrier)."""
    return getattr(getattr(node, "func", None), "calls", ())


def _drop(slots: list[Any], ended: Sequence[int]) -> None:
    for slot in ended:
        slots[slot] = None
