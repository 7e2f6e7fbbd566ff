"""Lower a program: its calls as runs of native calls, with the memory of what lives inside of it planned.

The first run of a program calls its kernels from Python, and shows the shapes of all values. From these, `lower` traces
the kernels (`kernels.tracing`): what they would call becomes a list of addresses and words, which later runs make in
one native call. Values that only such a run needs lie in its *arena*, each at a distance that no other value uses at
the same time. What cannot be traced (a kernel from outside of the package, an exchange with another rank, a decision on
a value) stays a Python call between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import getitem
from typing import Any, NamedTuple

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.kernels.native import (
    ALIGNMENT,
    CONTIGUOUS,
    DATA,
    NANOSECONDS,
    STEP,
    WRITABLE,
    kind_of,
    run_calls,
)
from daskgpt.kernels.tracing import FLOATS, MOST_WORDS, RETURNS, Buffer, NativeCall, NotNative, Operand, Trace

WORDS, ARENA = 0, 1  # bases of every run, before those of arrays
UNTIMED = np.empty(0, np.int64)
ANYTHING = np.empty((0, 4), np.int64)


class Form(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype


def form_of(value: Any) -> Any:
    """Return the form of an array or operand, a tuple of those of several; None for anything else."""
    if isinstance(value, tuple):
        return tuple(map(form_of, value))
    return Form(value.shape, value.dtype) if isinstance(value, np.ndarray | Operand) else None


@dataclass
class Lowered:
    """A lowered program; empty before its first run.

    items    `NativeRun`s, and calls that stay in Python, in order
    slots    further slots of the program, for arrays that its runs share
    """

    items: Sequence[Any] = ()
    slots: int = 0


class View(NamedTuple):
    """A part of the array in a slot of a program, which may have another shape."""

    slot: int
    form: Form
    offset: int  # in bytes

    def of(self, slots: Sequence[Any]) -> np.ndarray:
        array: np.ndarray = slots[self.slot]
        first = self.offset // array.itemsize
        return array.reshape(-1)[first : first + math.prod(self.form.shape)].reshape(self.form.shape)


class Fetched(NamedTuple):
    """An array that a run takes out of a value of the program.

    slot     for it; its own if it is such a value
    source   slot of the value, and places in nested tuples
    written  whether the run writes into it
    """

    slot: int
    source: tuple[int, ...]
    form: Form
    written: bool


@dataclass
class NativeRun:
    """Consecutive calls of a program as one native call.

    members    its calls, each with the number of its first native call, and bytes of its result
    calls      rows of address, first word, and number of words
    template   and places: as of `kernels.native.run_calls`
    arena      bytes of values that only this run needs
    arrays     slots of the arrays that it uses
    fetched    those that lie in values
    made       slots of those that it makes, and their forms
    results    slot -> array for it: its slot, or a view; or a tuple of them
    ended      slots that no later call reads
    constants  arrays that kernels read besides
    """

    members: list[tuple[Any, int, int]]
    calls: np.ndarray
    template: np.ndarray
    places: np.ndarray
    arena: int
    arrays: list[int]
    fetched: list[Fetched]
    made: dict[int, Form]
    results: dict[int, Any]
    ended: list[int]
    constants: list[np.ndarray]

    def __post_init__(self) -> None:
        most = max((len(one.form.shape) for one in self.fetched), default=0)
        self.expected = np.zeros((len(self.arrays), 4 + most), np.int64)
        for one in self.fetched:
            shape, flags = one.form.shape, CONTIGUOUS | (WRITABLE if one.written else 0)
            row = [flags, id(np.ndarray), kind_of(one.form.dtype), len(shape), *shape]
            self.expected[self.arrays.index(one.slot), : len(row)] = row
        self.parts = [one for one in self.fetched if one.source != (one.slot,)]

    def run(self, slots: list[Any], timed: bool) -> Iterator[tuple[Any, float, float, int]]:
        """Run; yield each member with its start, its end and the bytes of its result if they are timed."""
        for one in self.parts:
            slots[one.slot] = reduce(getitem, one.source, slots)
        for slot, form in self.made.items():
            slots[slot] = np.empty(*form)
        words = np.empty(len(self.template) + (self.arena + ALIGNMENT) // 8, np.int64)
        times = np.empty(len(self.calls) + 1, np.int64) if timed else UNTIMED
        done = self._run(slots, self.expected, words, times)
        if done < 0:
            self._check(slots)
            done = self._run(slots, ANYTHING, words, times)
        if done < len(self.calls):
            key = next(call.key for call, first, _ in reversed(self.members) if first <= done)
            raise refusal(MemoryError, str(key[0]), "a kernel must get its memory", {"call": done}, "Free some memory.")
        for slot, view in self.results.items():
            slots[slot] = _result(view, slots)
        for slot in self.ended:
            slots[slot] = None
        if timed:
            ends = [first for _, first, _ in self.members[1:]] + [len(self.calls)]
            for (call, first, size), end in zip(self.members, ends):
                yield call, times[first] * NANOSECONDS, times[end] * NANOSECONDS, size

    def _run(self, slots: Sequence[Any], expected: np.ndarray, words: np.ndarray, times: np.ndarray) -> Any:
        """Make all calls; see `run_calls`."""
        bases = np.array([0, 0, *map(id, map(slots.__getitem__, self.arrays))])
        return run_calls(self.calls, self.template, self.places, bases, expected, DATA, words, times, len(times) > 0)

    def _check(self, slots: list[Any]) -> None:
        """Check the arrays that lie in values, and make those contiguous that are only read."""
        for one in self.fetched:
            array, flags = slots[one.slot], slots[one.slot].flags
            if form_of(array) != one.form or (one.written and not (flags.c_contiguous and flags.writeable)):
                rule = f"the array must have shape {one.form.shape} and type {one.form.dtype}"
                rule += ", be contiguous and writable" * one.written
                got = {"shape": array.shape, "type": array.dtype}
                got |= {"contiguous": flags.c_contiguous, "writable": flags.writeable}
                raise refusal(ValueError, str(self.members[0][0].key[0]), rule, got, "Compile the step again.")
            # NumPy's function gives an array without axes one, so what is contiguous is left alone.
            if not flags.c_contiguous:
                slots[one.slot] = np.ascontiguousarray(array)


def _result(view: Any, slots: Sequence[Any]) -> Any:
    if isinstance(view, int):
        return slots[view]
    return view.of(slots) if isinstance(view, View) else view and tuple(_result(part, slots) for part in view)


@dataclass
class _Traced:
    """A call with the native calls of its kernels; None if it stays a Python call."""

    call: Any
    native: list[NativeCall] | None
    result: Any = None


def lower(
    lowered: Lowered, calls: Sequence[Any], arriving: Sequence[int], forms: Mapping[int, Any], outputs: Sequence[int]
) -> None:
    """Lower the calls of a program (`graph.program.Call`).

    arriving   slots of values from outside
    forms      of the values in all slots, see `form_of`
    outputs    slots of its results
    """
    trace = Trace()
    values = {slot: _outside(trace, forms[slot], (slot,)) for slot in arriving}
    traced = [_traced(trace, call, values, forms[call.slot]) for call in calls]
    plan = _Plan(traced, values, outputs, trace.constants)
    lowered.slots, lowered.items = len(plan.slots), plan.items


def _outside(trace: Trace, form: Any, source: tuple[int, ...]) -> Any:
    """Return an operand for an array that lies in a slot, or in a tuple there; None for anything else."""
    if isinstance(form, Form):
        return Operand(trace, Buffer(*form, source), *form)
    return tuple(_outside(trace, part, (*source, n)) for n, part in enumerate(form)) if form else None


def _traced(trace: Trace, call: Any, values: dict[int, Any], form: Any) -> _Traced:
    first, arguments = len(trace.calls), filled(call.arguments, values)
    owner = getattr(call.function, "__self__", call.function)
    if getattr(owner, "traceable", False) and None not in list(_leaves(arguments)):
        with suppress(NotNative):
            result = call.function(*arguments)
            if form_of(result) == form:
                values[call.slot] = result
                return _Traced(call, trace.calls[first:], result)
    del trace.calls[first:]
    values[call.slot] = _outside(trace, form, (call.slot,))
    return _Traced(call, None)


def filled(arguments: Any, slots: Any) -> Any:
    """Return nested lists of slots (or keys) with their values."""
    return [filled(item, slots) if isinstance(item, list) else slots[item] for item in arguments]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the operands in nested lists and tuples, and what else is there."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _operands_in(value: Any) -> Iterator[Operand]:
    return (part for part in _leaves(value) if part is not None)


@dataclass
class _Plan:
    """The division of traced calls into runs, and the place of each value.

    items    runs, and calls that stay in Python
    """

    traced: Sequence[_Traced]
    values: Mapping[int, Any]
    outputs: Sequence[int]
    constants: list[np.ndarray]
    items: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = [list(group) for _, group in groupby(self.traced, key=lambda entry: entry.native is None)]
        users: dict[Buffer, list[int]] = {}  # the groups that use each buffer, in order
        for number, group in enumerate(groups):
            for entry in group:
                for buffer in _buffers(entry):
                    users.setdefault(buffer, []).append(number)
        read = {slot for entry in self.traced if entry.native is None for slot in _leaves(entry.call.arguments)}
        self.kept = {*self.outputs, *read}  # slots whose values must be arrays
        shared = {buffer for buffer, numbers in users.items() if numbers[0] != numbers[-1] or buffer.source}
        shared |= {operand.buffer for slot in self.kept for operand in _operands_in(self.values[slot])}
        self.slots = {buffer: slot for slot, buffer in enumerate(shared, 1 + max(self.values))}
        # A view of it may be used after the program has dropped it, but not within one run.
        alone = {buffer for buffer in shared if len(buffer.source or ()) == 1 and len({*users.get(buffer, ())}) == 1}
        self.slots |= {buffer: buffer.source[0] for buffer in alone}
        for number, group in enumerate(groups):
            if group[0].native is None:
                self.items += [entry.call for entry in group]
                continue
            used = {buffer: None for entry in group for buffer in _buffers(entry)}
            last = [buffer for buffer in used if buffer in self.slots.keys() - alone and users[buffer][-1] == number]
            first = [buffer for buffer in used if buffer in self.slots and users[buffer][0] == number]
            self.items.append(self._run(group, used, first, last))

    def _run(
        self, group: Sequence[_Traced], used: Mapping[Buffer, None], first: Sequence[Buffer], last: Sequence[Buffer]
    ) -> NativeRun:
        native = [call for entry in group for call in entry.native or ()]
        made = [buffer for buffer in first if not buffer.source]
        inside, arena = arranged(list(map(_operands, native)), self.slots, made)
        arrays = [buffer for buffer in used if buffer in self.slots]
        base_of = {buffer: base for base, buffer in enumerate(arrays, ARENA + 1)}
        template, places, rows = [0] * RETURNS, list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for call in native:
            rows.append((call.address, len(template), -(-len(call.words) // STEP) * STEP))
            template += [*call.floats, *[0] * (FLOATS - len(call.floats))]
            places += [(len(template) + n, WORDS, 8 * n) for n in range(RETURNS)]
            for word in call.words:
                if isinstance(word, Operand):
                    array, start = inside.get(word.buffer, (word.buffer, 0))
                    base = ARENA if array is None else base_of[array]
                    places.append((len(template), base, start + word.offset))
                template.append(0 if isinstance(word, Operand) else word)
        members, count = [], 0
        for entry in group:
            if entry.native:
                members.append((entry.call, count, sum(operand.nbytes for operand in _operands_in(entry.result))))
                count += len(entry.native)
        kept = [entry.call.slot for entry in group if entry.call.slot in self.kept]
        return NativeRun(
            members=members,
            calls=np.array(rows, np.int64).reshape(-1, 3),
            template=np.array([*template, *[0] * MOST_WORDS], np.int64),
            places=np.array(places, np.int64).reshape(-1, 3),
            arena=arena,
            arrays=[self.slots[buffer] for buffer in arrays],
            fetched=[
                Fetched(self.slots[buffer], buffer.source, Form(buffer.shape, buffer.dtype), buffer.written)
                for buffer in first
                if buffer.source
            ],
            made={self.slots[buffer]: Form(buffer.shape, buffer.dtype) for buffer in made},
            results={slot: self._views(self.values[slot]) for slot in kept},
            ended=[slot for entry in group for slot in entry.call.ended] + [self.slots[buffer] for buffer in last],
            constants=self.constants,
        )

    def _views(self, value: Any) -> Any:
        if value is None or isinstance(value, tuple):
            return value and tuple(map(self._views, value))
        slot, whole = self.slots[value.buffer], value.shape == value.buffer.shape
        return slot if whole else View(slot, Form(value.shape, value.dtype), value.offset)


def _operands(call: NativeCall) -> list[Buffer]:
    return [word.buffer for word in call.words if isinstance(word, Operand)]


def _buffers(entry: _Traced) -> list[Buffer]:
    """Return the buffers that a call uses or passes on."""
    results = [operand.buffer for operand in _operands_in(entry.result)]
    return [buffer for call in entry.native or () for buffer in _operands(call)] + results


@dataclass
class _Room:
    """Memory for buffers: the arena, or an array before it is used itself.

    array  None for the arena
    until  number of the call from which on the array is used
    size   in bytes
    held   start and end of each place, and number of the last call that uses it, by start
    most   bytes that were held at one time, from the start on
    """

    array: Buffer | None
    until: int
    size: float
    held: list[tuple[int, int, int]] = field(default_factory=list)
    most: int = 0

    def take(self, nbytes: int, first: int, last: int) -> int | None:
        """Return the start of a place for so many bytes from one call to another; None if there is none.

        Calls are asked for in order: a place that ended before the first one is free.
        """
        self.held = [entry for entry in self.held if entry[2] >= first]
        size, start, place = -(-nbytes // ALIGNMENT) * ALIGNMENT, 0, 0
        for begin, end, _ in self.held:
            if begin - start >= size:
                break
            start, place = end, place + 1
        if start + size > self.size:
            return None
        self.held.insert(place, (start, start + size, last))
        self.most = max(self.most, start + size)
        return start


def arranged(
    users: Sequence[Sequence[Buffer]], outside: Container[Buffer] = (), made: Sequence[Buffer] = ()
) -> tuple[dict[Buffer, tuple[Buffer | None, int]], int]:
    """Return the place of each buffer inside of a run, which it has to itself from its first use to its last one: an
    array and the distance from its start; and the bytes of the arena, which is None among the arrays.

    A step keeps for the backward pass what it will need, and makes gradients there: the former lies in the memory of
    the latter until these are written.

    users    the buffers that each native call uses, in order
    outside  buffers that are arrays of their own
    made     those of them that the run makes
    """
    first, last = dict[Buffer, int](), dict[Buffer, int]()  # calls, in the order of first uses
    for number, buffers in enumerate(users):
        for buffer in buffers:
            first.setdefault(buffer, number)
            last[buffer] = number
    arena = _Room(None, len(users), math.inf)
    rooms = [_Room(array, first[array], array.nbytes) for array in made if array in first]
    rooms = [*sorted(rooms, key=lambda room: room.until), arena]  # the tightest first
    places = dict[Buffer, tuple[Buffer | None, int]]()
    for buffer, number in first.items():
        if buffer in outside:
            continue
        for room in rooms:
            if room.until > last[buffer] and (start := room.take(buffer.nbytes, number, last[buffer])) is not None:
                places[buffer] = room.array, start
                break
    return places, arena.most
