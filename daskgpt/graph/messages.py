"""Messages between ranks: the tasks that send and receive, and the part of one rank in a graph of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from daskgpt.graph.calls import MESSAGE, Exchange, Origin, wait
from daskgpt.graph.fuse import in_order
from daskgpt.graph.nodes import Graph, Key, as_it_is, task

Channel = tuple[str, int]  # kind of the data, and the bucket


class Link(Protocol):
    """A connection that carries messages between ranks, in order for each pair."""

    def send(self, rank: int, channel: Channel, value: Any) -> None:
        """Begin to send; the arrays must stay unchanged until the other rank has used them and replied."""

    def receive(self, rank: int, channel: Channel) -> Any:
        """Wait for the next value of a channel and return it."""


@dataclass(frozen=True)
class Peers:
    """This one of several ranks, and its link to the others."""

    number: int
    count: int
    link: Link = field(repr=False, compare=False)


def send(
    link: Link,
    rank: int,
    channel: Channel,
    origin: Origin | None,
    pick: Callable[..., Any] | None = None,
    size: int = 0,
) -> Exchange:
    """Return a call that sends the results of other tasks to a rank.

    pick   makes the message from the results; None if they are sent unchanged, in a list
    size   bytes of the message
    """

    def run(*values: Any) -> None:
        link.send(rank, channel, pick(*values) if pick else list(values))

    return Exchange(run, origin, size=size, peer=rank, channel=channel)


def receive(link: Link, rank: int, channel: Channel, origin: Origin | None) -> Exchange:
    """Return a call that waits in its thread for a message; tasks that must run before are its arguments."""
    return Exchange(lambda *before: link.receive(rank, channel), origin, MESSAGE, peer=rank, channel=channel)


def own_part(graph: Graph, ranks: Mapping[Key, int], own: Peers) -> tuple[Graph, Key]:
    """Cut a graph whose tasks belong to several ranks into the part of one rank, with its messages.

    ranks   of the tasks and of the leaves that they read

    Return the graph, and a task that is done when everything is sent.

    A task that receives waits in its thread. Its level is the greatest number of messages on a path to it; it runs only
    after everything of its level or below has been sent, so ranks cannot deadlock.
    """

    def channel_of(source: Key) -> Channel:
        return f"{source[0].partition('_-')[0]}{source[1:]}", 0  # the rest of the key differs on each rank

    level: dict[Key, int] = {}  # greatest number of messages on a path to a task
    crossing: dict[tuple[Key, int], int] = {}  # a result and the rank that it is sent to -> the level of the message
    for key in in_order(graph):
        level[key] = 0
        for source in graph[key].dependencies:
            messages = level.get(source, 0) + (ranks[source] != ranks[key])
            level[key] = max(level[key], messages)
            if ranks[source] != ranks[key]:
                crossing[source, ranks[key]] = messages
    new, sent = dict[Key, Any](), dict[Key, int]()
    for (source, rank), messages in crossing.items():
        if ranks[source] == own.number:
            key = (f"send.{source[0]}", *source[1:], rank)
            new[key] = task(key, send(own.link, rank, channel_of(source), None, as_it_is), [source])
            sent[key] = messages
    arrived: dict[Key, Key] = {}
    for (source, rank), messages in crossing.items():
        if rank == own.number:
            key = arrived[source] = (f"receive.{source[0]}", *source[1:], ranks[source])
            after = [other for other, own_messages in sent.items() if own_messages <= messages]
            new[key] = task(key, receive(own.link, ranks[source], channel_of(source), None), after)
    for key, node in graph.items():
        if ranks[key] == own.number:
            new[key] = node.substitute({source: arrived[source] for source in node.dependencies if source in arrived})
    last = (f"sent-{own.number}",)
    new[last] = task(last, wait, sent)
    return new, last
