"""Threads that share a task: tickets for its parts, and barriers.

Each stage has two counters, which the caller allocates and sets: the number of parts that threads have taken (at first
the number of threads, since thread n begins with part n), and the number of threads that have arrived. A waiting
thread reads the counter again and again; if every thread has a core, this takes less than a microsecond. After a while
it offers its core to other threads.
"""

from numba import types
from numba.extending import intrinsic

from daskgpt.kernels.compilation import helper
from daskgpt.kernels.simd.lanes import I32, I64, address_of, call

# Distance of two counters in whole numbers, so that each has cache lines to itself.
APART = 16
# Reads of a counter, some ten microseconds, before a thread offers its core to others.
_LOOKS = 4096


@intrinsic
def _add_one(typing_context, place):
    """Add one to the whole number at an address; return the number before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, I64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def _look(typing_context, place):
    """Return the whole number at an address; whatever was written before it is visible then."""

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
    """Return the number of a part of a stage that no thread has taken."""
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
