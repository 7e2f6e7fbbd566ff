"""Memory that kernels work in: pieces of pages, a thread's own, and a call before it grows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from daskgpt.kernels.vectors.scratch import PAGE, Scratch


def test_pieces_start_at_pages_and_lie_apart():
    scratch = Scratch(lambda: None)
    sizes = (1, PAGE, 0, PAGE + 1, 7)
    addresses = scratch(*sizes)
    assert all(address % PAGE == 0 for address in addresses)
    assert [after - before for before, after in pairwise(addresses)] == [PAGE, PAGE, 0, 2 * PAGE]
    assert scratch(*sizes) == addresses
    assert scratch(PAGE) == addresses[:1], "less is found where more was"


def test_every_thread_has_its_own_and_is_prepared_before_its_memory_grows():
    """A thread asks for the tile registers there: one that was never asked would die of its first product."""
    asked: list[int] = []
    scratch = Scratch(lambda: asked.append(threading.get_ident()))
    assert asked == [], "nothing is asked for by whoever only imports"

    def use(size: int) -> tuple[int, list[int]]:
        return threading.get_ident(), scratch(size)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        first, (place,) = one.submit(use, 100).result()
        second, (elsewhere,) = other.submit(use, 100).result()
        assert first != second
        assert abs(place - elsewhere) >= PAGE
        assert asked == [first, second]
        assert one.submit(use, PAGE).result() == (first, [place])
        assert asked == [first, second]
        one.submit(use, PAGE + 1).result()
        assert asked == [first, second, first]
