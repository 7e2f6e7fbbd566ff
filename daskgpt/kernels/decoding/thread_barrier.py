"""Threads that share a task: tickets for its parts, and barriers.

Each stage has two counters, which the caller allocates and sets: the number of parts that threads have taken (at first
the number of threads, since thread n begins with part n), and the number of threads that have arrived. A waiting
thread reads the counter again and again; if every thread has a core, this takes less than a microsecond. After a while
it offers its core to other threads.
"""

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.simd.lanes import I32, I64, address_of, call

# Distance of two counters in whole numbers, so that each has cache lines to itself.
APART = 16
# Reads of a counter, some ten microseconds, before a thread offers its core to others.
_LOOKS = 4096


@instruction("n", "n")
def _add_one(builder, place):
    """Add one to the whole number at an address; return the number before."""
    return builder.atomic_rmw("add", builder.inttoptr(place, I64.as_pointer()), I64(1), "acq_rel")


@instruction("n", "n")
def _look(builder, place):
    """Return the whole number at an address; whatever was written before it is visible then."""
    return builder.load_atomic(builder.inttoptr(place, I64.as_pointer()), "acquire", 8)


@instruction("")
def _offer_core(builder):
    call(builder, "sched_yield", I32, [])


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
