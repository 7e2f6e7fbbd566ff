"""Several tasks as one: their functions called one after another, with what others need returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any

from daskgpt.graph.nodes import Graph, GraphNode, Key, arguments_of
from daskgpt.graph.spans import RECORDER, Span
from daskgpt.kernels.floating_point import restore, set_flush_to_zero


@dataclass(frozen=True)
class Place:
    """Where a value is found: the result of a task, or one of the values in it."""

    key: Key
    number: int | None = None


@dataclass(frozen=True)
class Call:
    """One task inside a program: its function, and the slots of its arguments, its result, and what ends with it."""

    key: Key
    function: Callable[..., Any]
    arguments: list[Any]
    slot: int
    ended: tuple[int, ...]
    flat: bool


class Program:
    """What a merged task runs.

    It is called with the results of the tasks it depends on, and keeps values in numbered slots; a slot is emptied
    when its last reader has run, so that an activation lives no longer than in separate tasks.
    """

    def __init__(self, calls: Sequence[Call], arrivals: Sequence[tuple[int, int | None, int]], outputs: Sequence[int]):
        self.calls, self.arrivals, self.outputs = tuple(calls), tuple(arrivals), tuple(outputs)
        self.size = 1 + max((call.slot for call in calls), default=-1)
        self.size = max(self.size, 1 + max((slot for _, _, slot in arrivals), default=-1))

    def __call__(self, *results: Any) -> Any:
        previous = set_flush_to_zero()
        try:
            return self._run(results)
        finally:
            restore(previous)

    def _run(self, results: Sequence[Any]) -> Any:
        slots: list[Any] = [None] * self.size
        for argument, number, slot in self.arrivals:
            slots[slot] = results[argument] if number is None else results[argument][number]
        spans = RECORDER.spans
        for call in self.calls:
            start = perf_counter() if spans is not None else 0.0
            if call.flat:
                slots[call.slot] = call.function(*[slots[slot] for slot in call.arguments])
            else:
                slots[call.slot] = call.function(*_filled(call.arguments, slots))
            if spans is not None:
                spans.append(Span(call.key, get_ident(), start, perf_counter()))
            for slot in call.ended:
                slots[slot] = None
        if len(self.outputs) == 1:
            return slots[self.outputs[0]]
        return tuple(slots[slot] for slot in self.outputs)


def program_of(
    graph: Graph, members: Sequence[Key], outputs: Sequence[Key], places: Mapping[Key, Place]
) -> tuple[Program, list[Key]]:
    """The program of some tasks, in the given order, and the keys whose results it is called with.

    places   where values that come from outside are found; a key that is missing is a task of its own
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
        function, arguments = _function_of(graph[key], slots)
        ended = tuple(slot for slot, final in last.items() if final == number and slot not in kept)
        calls.append(Call(key, function, arguments, slots[key], ended, all(isinstance(a, int) for a in arguments)))
    return Program(calls, arrivals, [slots[key] for key in outputs]), needed


def calls_of(node: GraphNode) -> tuple[Call, ...]:
    """The calls that a merged task makes; none for a task of another kind (a barrier)."""
    return getattr(node.func, "calls", ())


def _function_of(node: GraphNode, slots: Mapping[Key, int]) -> tuple[Callable[..., Any], list[Any]]:
    """What a task calls, with slots for its arguments: a kernel call sorts out Dask's nested lists beforehand."""
    function, arguments = arguments_of(node, slots)
    if hasattr(function, "arrange"):
        return function.run, function.arrange(arguments)
    return function, arguments


def _filled(arguments: Any, slots: Sequence[Any]) -> Any:
    return [slots[item] if isinstance(item, int) else _filled(item, slots) for item in arguments]
