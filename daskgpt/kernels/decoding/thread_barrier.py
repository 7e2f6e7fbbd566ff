"""Threads that share a task: tickets for its parts, and barriers.

Each stage has two counters in memory of the caller, which sets them before: how many parts have been given away (at
first as many as there are threads, whose first parts have their own numbers), and how many threads have arrived. A
thread that waits looks again and again, which takes less than a microsecond where every thread has a core, and offers
its core to others after a while where not.
"""

from numba import types
from numba.extending import intrinsic

from daskgpt.kernels.compilation import helper
from daskgpt.kernels.simd.lanes import I32, I64, address_of, call

# Whole numbers from one counter to the next: each in cache lines of its own.
APART = 16
# Looks before a thread offers its core to others: some ten microseconds.
_LOOKS = 4096


@intrinsic
def _add_one(typing_context, place):
    """The whole number at an address before one was added to it."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, I64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def _look(typing_context, place):
    """The whole number at an address, and with it all that was written before it was."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _offer_core(typing_context):
    def generate(context, builder, signature, arguments):
        return call(builder, "sched_yield", I32, [])

    return types.int32(), generate


@helper
def next_part(counters, stage):
    """Number of a part of a stage that no thread has."""
    return _add_one(address_of(counters) + (2 * stage) * 8 * APART)


@helper
def meet(counters, stage, threads):
    """Wait until all threads are done with a stage."""
    place = address_of(counters) + (2 * stage + 1) * 8 * APART
    if _add_one(place) + 1 >= threads:
        return
    looks = 0
    while _look(place) < threads:
        looks += 1
        if looks > _LOOKS:
            _offer_core()
