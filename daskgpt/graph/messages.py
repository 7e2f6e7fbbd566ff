"""Messages between ranks: the calls that send and receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from daskgpt.graph.calls import MESSAGE, Exchange, Origin

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
