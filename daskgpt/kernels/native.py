"""Runs of native calls: what several kernels do, as one call that gives up the interpreter's lock once; and subnormal
numbers as zero.

The functions are those that Numba has compiled, by their addresses. Numba passes each argument in as many words as it
has parts, of 64 bits each, and these rules of C calls on x86-64 and 64-bit ARM do the rest: whole numbers and addresses
go into registers and then onto the stack in their order, floating-point numbers into registers of their own, and words
beyond those that a function takes are not read.

An operation on a subnormal number (below 1.2e-38 in float32) takes an x86 processor a hundred cycles or more, and
vanishing gradients are full of them. The two bits that avoid this, FTZ for results and DAZ for arguments, are part of
a thread's state, so each thread that runs kernels sets them. On other processors nothing is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import helper, instruction, kernel
from daskgpt.kernels.simd.lanes import F64, I8, I32, I64, POINTER, VOID, X86, address_of, at, call, load, read, whole
from daskgpt.kernels.tracing import FLOATS, MOST_WORDS

ALIGNMENT = 64  # bytes of a cache line, with which the memory after the words begins
STEP = 16  # words are passed in multiples of it, to have few forms of calls
# time.perf_counter's clock: CLOCK_MONOTONIC, on macOS CLOCK_UPTIME_RAW.
_CLOCK = 8 if sys.platform == "darwin" else 1
NANOSECONDS = 1e-9

_FLUSH = 1 << 15 | 1 << 6  # results, and arguments, that are subnormal numbers


@instruction("", "n")
def _read_state(builder):
    if not X86:
        return whole(0)
    place = cgutils.alloca_once(builder, I32)
    call(builder, "llvm.x86.sse.stmxcsr", VOID, [at(builder, place, 0, I8)])
    return builder.zext(builder.load(place), I64)


@instruction("n")
def _write_state(builder, state):
    if X86:
        place = cgutils.alloca_once(builder, I32)
        builder.store(builder.trunc(state, I32), place)
        call(builder, "llvm.x86.sse.ldmxcsr", VOID, [at(builder, place, 0, I8)])


@kernel("n n")
def _set_state(state, adding):
    """Write the state, or set its bits in addition to those already set; return the previous state."""
    previous = _read_state()
    _write_state(state | previous if adding else state)
    return previous


@contextlib.contextmanager
def flush_to_zero() -> Iterator[None]:
    """Treat subnormal numbers as zero in the calling thread while the `with` block runs."""
    previous = _set_state(_FLUSH, 1)
    try:
        yield
    finally:
        _set_state(previous, 0)


def _distance_of_data() -> int:
    """Return how many bytes after its own address an array holds the address of its data.

    Python takes a microsecond to ask an array for it. The place is part of NumPy's binary interface, on which compiled
    programs rely.
    """
    array = np.empty(1)
    words = (ctypes.c_size_t * 8).from_address(id(array))
    return 8 * list(words).index(array.ctypes.data)


DATA = _distance_of_data()
# What else an array has there (PyArrayObject_fields in numpy/ndarraytypes.h), by its distance in words of 64 bits: its
# type, number of axes, their lengths, the dtype, and flags; two of the flags.
TYPE, AXES, LENGTHS, DTYPE, FLAGS = -1, 1, 2, 5, 6
CONTIGUOUS, WRITABLE = 1, 0x400
_INT = 0xFFFFFFFF  # of a word, what a C int takes
# The second word of a dtype (PyArray_Descr) has its kind, byte order and number, and a byte of flags that does not
# count. Arrays out of a pickle have a dtype object of their own.
_KIND = ~(0xFF << 24)


def kind_of(dtype: np.dtype) -> int:
    """Return what distinguishes a dtype, as a number."""
    return ctypes.c_int64.from_address(id(dtype) + DATA + 8).value & _KIND


@instruction("n n n", "n")
def _invoke(builder, address, count, place):
    """Call the function at an address with the words at a place: FLOATS numbers, then `count` others; return its
    status."""
    floats = [load(builder, place, 8 * number, F64) for number in range(FLOATS)]
    end = builder.append_basic_block("end")
    status = cgutils.alloca_once_value(builder, ir.Constant(I32, -1))
    switch = builder.switch(count, end)
    for form in range(STEP, MOST_WORDS + 1, STEP):
        with builder.goto_block(builder.append_basic_block(f"words{form}")):
            words = [load(builder, place, 8 * (FLOATS + number), I64) for number in range(form)]
            kind = ir.FunctionType(I32, [I64] * form + [F64] * FLOATS)
            builder.store(builder.call(builder.inttoptr(address, kind.as_pointer()), [*words, *floats]), status)
            builder.branch(end)
            switch.add_case(whole(form), builder.block)
    builder.position_at_end(end)
    return builder.sext(builder.load(status), I64)


@instruction("", "n")
def _now(builder):
    """The clock's nanoseconds."""
    place = builder.bitcast(cgutils.alloca_once(builder, ir.ArrayType(I64, 2)), POINTER)
    call(builder, "clock_gettime", I32, [ir.Constant(I32, _CLOCK), place])
    seconds, rest = (load(builder, place, 8 * number, I64) for number in range(2))
    return builder.add(builder.mul(seconds, whole(10**9)), rest)


@helper
def _is_as_expected(array, expected, data):
    """Return whether an array, by its address as an object, is as `run_calls` expects."""
    place, flags, axes = array + data, expected[0], expected[3]
    same = read(place, TYPE, data) == expected[1]
    same = same and read(read(place, DTYPE, data) + data, 1, data) & _KIND == expected[2]
    same = same and read(place, FLAGS, data) & flags == flags and read(place, AXES, data) & _INT == axes
    for axis in range(axes if same else 0):
        same = same and read(read(place, LENGTHS, data), axis, data) == expected[4 + axis]
    return same


@kernel("l2 l1 l2 L1 l2 n L1 L1 n")
def run_calls(calls, template, places, bases, expected, data, words, times, timed):
    """Make calls (rows of address, first word, number of words); return the number of those that succeeded, or -1 and
    make none if an array is not as expected.

    template   words of all calls, after RETURNS words for what they return
    places     rows of a word, a base and a distance: the word is the address at this distance from the base
    bases      room for the addresses of the words and of the memory after them; then those of arrays as objects, which
               become those of their data
    expected   of these arrays: flags, type by its address as an object, `kind_of` the dtype, number of axes, and their
               lengths; anything is as expected without a flag, and without a row
    data       DATA
    times      nanoseconds at the start of each call and at the end of the last one, if timed
    """
    for i in range(expected.shape[0]):
        if expected[i, 0] and not _is_as_expected(bases[2 + i], expected[i], data):
            return -1
    previous = _read_state()
    _write_state(previous | _FLUSH)
    start = address_of(words)
    bases[0] = start
    bases[1] = -(-(start + 8 * template.size) // ALIGNMENT) * ALIGNMENT
    for i in range(2, bases.size):
        bases[i] = read(bases[i] + data, 0, data)
    for i in range(template.size):
        words[i] = template[i]
    for i in range(places.shape[0]):
        words[places[i, 0]] = bases[places[i, 1]] + places[i, 2]
    made = 0
    while made < calls.shape[0]:
        if timed:
            times[made] = _now()
        if _invoke(calls[made, 0], calls[made, 2], start + 8 * calls[made, 1]) != 0:
            break
        made += 1
    if timed:
        times[made] = _now()
    _write_state(previous)
    return made
