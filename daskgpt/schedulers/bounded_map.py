"""A map over a stream of items with bounded memory: just enough items are in tasks to keep the threads busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from daskgpt.graph.nodes import Graph, Key, task

Item = TypeVar("Item")
Result = TypeVar("Result")

PLACES = 512  # items in one graph of a local scheduler
NOTHING = object()  # marks the end of the items


def ahead_of(threads: int) -> int:
    """Return how many items may be in progress before the result of the first one is taken."""
    return 2 * threads + 2


def each_local(
    get: Callable[..., Any],
    threads: int,
    name: str,
    function: Callable[[Item], Result],
    items: Iterator[Item],
    take: Callable[[Result], None],
) -> None:
    """Run read, call and take as one dataflow: item n is read after item n - 1 and once item n - ahead is taken;
    results are taken one after the other, by any free thread.

    Errors   the first error of items, function or take
    """
    ended = False

    def read(*_: Any) -> Any:
        nonlocal ended
        item = next(items, NOTHING)
        ended = ended or item is NOTHING
        return item

    def call(item: Any) -> Any:
        return item if item is NOTHING else function(item)

    def taken(result: Any, *_: Any) -> None:
        if result is not NOTHING:
            take(result)

    ahead = ahead_of(threads)
    while not ended:
        graph: Graph = {}
        for n in range(PLACES):
            before: list[Key] = [(f"{name}.read", n - 1)] * (n > 0) + [(f"{name}.write", n - ahead)] * (n >= ahead)
            graph[(f"{name}.read", n)] = task((f"{name}.read", n), read, before)
            graph[(name, n)] = task((name, n), call, [(f"{name}.read", n)])
            results: list[Key] = [(name, n)] + [(f"{name}.write", n - 1)] * (n > 0)
            graph[(f"{name}.write", n)] = task((f"{name}.write", n), taken, results)
        get(graph, [(f"{name}.write", PLACES - 1)])


def each_submitted(
    submit: Callable[[Callable[[], Any], str], Any],
    fetch: Callable[[list[Any]], list[Any]],
    threads: int,
    name: str,
    function: Callable[[Item], Result],
    items: Iterator[Item],
    take: Callable[[Result], None],
) -> None:
    """Do the same on a cluster, whose workers call; items are read, and results taken, in this process.

    submit   submits a call under a name and returns its future
    """
    under_way: deque[Any] = deque()
    number = 0
    while True:
        while len(under_way) < ahead_of(threads) and (item := next(items, NOTHING)) is not NOTHING:
            under_way.append(submit(partial(function, item), f"{name}-{number}"))  # type: ignore[arg-type]
            number += 1
        if not under_way:
            return
        (result,) = fetch([under_way.popleft()])
        take(result)
