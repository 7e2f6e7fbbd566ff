"""Flush-to-zero is set and restored in the thread that asks, and nowhere else."""

from __future__ import annotations

import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from daskgpt.kernels import add
from daskgpt.kernels.floating_point import flush_to_zero, flushes, restore, set_flush_to_zero

ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
HALF_OF_THE_SMALLEST = np.full(40, 2.0**-127, np.float32)
needs_x86 = pytest.mark.skipif(not ON_X86, reason="only x86 has the two bits; elsewhere the functions do nothing")


def in_a_thread(work) -> list:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results


def kernel_result() -> float:
    return float(add.forward(HALF_OF_THE_SMALLEST, HALF_OF_THE_SMALLEST)[0])


@needs_x86
def test_set_and_restored_in_a_thread():
    def work():
        before = flushes()
        previous = set_flush_to_zero()
        during, sum_during = flushes(), kernel_result()
        restore(previous)
        return before, during, sum_during, flushes(), kernel_result()

    # As arguments subnormal numbers count as zero, so even their sum, a normal number, is lost.
    assert in_a_thread(work) == [(False, True, 0.0, False, 2.0**-126)]
    assert not flushes()


@needs_x86
def test_a_thread_that_runs_already_does_not_flush():
    # A new thread starts with the state of the one that starts it; the bits of a running one are its own.
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(flushes).result()
        with flush_to_zero():
            assert flushes()
            assert not pool.submit(flushes).result()
            assert in_a_thread(flushes) == [True]
        pool.submit(set_flush_to_zero).result()
        assert pool.submit(flushes).result()
        assert not flushes()


@needs_x86
def test_nested_use_restores_the_outer_state():
    with flush_to_zero():
        with flush_to_zero():
            assert flushes()
        assert flushes()
    assert not flushes()


def test_the_state_is_restored_after_an_error():
    with pytest.raises(KeyError), flush_to_zero():
        raise KeyError
    assert not flushes()


@pytest.mark.skipif(ON_X86, reason="x86 has the two bits")
def test_nothing_happens_on_other_processors():
    assert set_flush_to_zero() == 0
    assert not flushes()
