"""Messages between tasks that run at the same time on different workers, through the connections of Dask's workers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from daskgpt.schedulers import dask_internals as internals
from daskgpt.schedulers.local import return_memory

OP = "daskgpt-message"  # the handler of a worker
LEAVING, LEFT, RECEIVED = "leaving", "left", "received"  # channels of a rank that leaves, and of the replies to it
LEAVING_SECONDS = 25.0  # that a worker waits until its ranks have left; Dask ends one that closes for half a minute
CONNECT_SECONDS = 8.0  # after which an address counts as unreachable
SMALL_BYTES = 1 << 19  # arrays below this are copied, which costs less than a part of a message of their own


async def unreached(addresses: Sequence[str], dask_scheduler: Any = None, dask_worker: Any = None) -> dict[str, str]:
    """Return the addresses that this process, a scheduler or worker, cannot connect to, each with the reason.

    A process that is stopped can be connected to: the system answers.
    """
    security = (dask_scheduler or dask_worker).connection_args.get("ssl_context")

    async def attempt(address: str) -> str:
        protocol, place = internals.parse_address(address)
        if protocol not in ("tcp", "tls"):
            return ""
        try:
            opened = asyncio.open_connection(*internals.parse_host_port(place))
            _, writer = await asyncio.wait_for(opened, CONNECT_SECONDS)
        except TimeoutError:
            return f"no answer in {CONNECT_SECONDS:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        if protocol == "tls":  # Dask warns of connections that end before their handshake
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.start_tls(security), CONNECT_SECONDS)
        writer.close()
        return ""

    reasons = await asyncio.gather(*map(attempt, addresses))
    return {address: reason for address, reason in zip(addresses, reasons) if reason}


class LostRank(OSError):
    """Another rank is gone, or has failed."""


@dataclass(eq=False)
class WorkerRanks:
    """The state of a worker for the runs that it takes part in.

    programs   by run: objects with a `link`
    links      by epoch
    """

    programs: dict[str, Any] = field(default_factory=dict)
    links: dict[str, WorkerLink] = field(default_factory=dict)

    def take(self, epoch: str, parts: Sequence[np.ndarray]) -> None:
        """Take a message for any rank of this worker; those of epochs that are over are dropped."""
        if (link := self.links.get(epoch)) is not None:
            rank, channel, value = pickle.loads(parts[0].data, buffers=[part.data for part in parts[1:]])
            link.take(rank, channel, value)


_RANKS: WeakKeyDictionary[Any, WorkerRanks] = WeakKeyDictionary()


def ranks_of(worker: Any) -> WorkerRanks:
    """Return the state of a worker of this process for its runs."""
    return _RANKS.setdefault(worker, WorkerRanks())


def forget_worker(worker: Any) -> None:
    """Remove what this module has left with a worker."""
    internals.forget_messages(worker, OP)
    _RANKS.pop(worker, None)


def end_programs(run: str, dask_worker: Any) -> None:
    """Remove the programs of runs whose names begin with `run` from a worker, with their states."""
    programs = ranks_of(dask_worker).programs
    ended = [name for name in programs if name.startswith(run)]
    for name in ended:
        programs.pop(name).link.close()
    if ended:
        gc.collect()
        return_memory()


async def leave(run: str, dask_worker: Any) -> None:
    """Let the programs of runs whose names begin with `run` leave a worker that closes, in good order."""
    programs = [program for name, program in ranks_of(dask_worker).programs.items() if name.startswith(run)]
    leaving = [asyncio.create_task(asyncio.to_thread(program.leave)) for program in programs]
    if leaving:
        await asyncio.wait(leaving, timeout=LEAVING_SECONDS)


def leaving(epoch: str, dask_worker: Any) -> tuple[set[int], str]:
    """Return the ranks of an epoch that a worker knows to leave or to have left, and why another one is gone."""
    link = ranks_of(dask_worker).links.get(epoch)
    return (link.leaving, link.lost) if link else (set(), "the epoch is over")


class WorkerLink:
    """Connects one rank with the others of an epoch; a `graph.distribute.Link`.

    Messages go one way on a connection that stays open: when the connection to another rank ends, that rank is gone.

    lost   why another rank is gone; empty while all are there, or have left
    """

    def __init__(self, worker: Any, epoch: str, number: int, addresses: Sequence[str]) -> None:
        """addresses   of the workers of all ranks, by number"""
        self.worker, self.epoch, self.number = worker, epoch, number
        self.loop, self.ranks = internals.event_loop(worker), ranks_of(worker)
        self.arrived: dict[tuple[int, Hashable], deque[Any]] = defaultdict(deque)
        self.changed = Condition()
        self.lost, self.left = "", set[int]()
        others = [rank for rank in range(len(addresses)) if rank != number]
        self.outgoing = {rank: asyncio.Queue[Any]() for rank in others}
        self.ranks.links[epoch] = self
        # Until `forget_worker`: messages may come after the last link.
        internals.handle_messages(worker, OP, self.ranks.take)
        self.pumps = [asyncio.run_coroutine_threadsafe(self._pump(rank, addresses[rank]), self.loop) for rank in others]

    async def _pump(self, rank: int, address: str) -> None:
        """Send messages to a rank until it is gone."""
        comm = None
        try:
            comm, copied = await internals.connection(self.worker, address), address.startswith("inproc")
            gone = asyncio.create_task(comm.read())  # the other side sends nothing: this ends with the connection
            gone.add_done_callback(lambda ended: self._ended(rank, address, ended))
            while (message := await self.outgoing[rank].get()) is not None:
                parts = _parts(message, copied=copied)
                await comm.write({"op": OP, "reply": False, "epoch": self.epoch, "parts": parts})
        except OSError as error:
            self._gone(rank, f"worker {address}: {error}")
        finally:
            if comm is not None:
                comm.abort()

    def _ended(self, rank: int, address: str, ended: asyncio.Task[Any]) -> None:
        """Handle the end of the connection to a rank."""
        if not ended.cancelled():
            self._gone(rank, f"worker {address}: {ended.exception() or 'it has ended'}")
            self.outgoing[rank].put_nowait(None)

    def send(self, rank: int, channel: Hashable, value: Any) -> None:
        """Begin to send a value to a rank."""
        self.loop.call_soon_threadsafe(self.outgoing[rank].put_nowait, (self.number, channel, value))

    def receive(self, rank: int, channel: Hashable) -> Any:
        """Wait for the next value of a channel. Errors   LostRank where a rank is gone"""
        with self.changed:
            queue = self.arrived[rank, channel]
            while not queue:
                if self.lost or rank in self.left:
                    raise LostRank(self.lost or f"rank {rank} has left")
                self.changed.wait()
            return queue.popleft()

    def take(self, rank: int, channel: Hashable, value: Any) -> None:
        """Take a value that a rank has sent."""
        with self.changed:
            self.arrived[rank, channel].append(value)
            if channel == LEFT:
                self.left.add(rank)
                self.send(rank, RECEIVED, None)
            self.changed.notify_all()

    @property
    def leaving(self) -> set[int]:
        """The ranks that leave, or have left."""
        return {rank for rank in self.outgoing if self.arrived[rank, LEAVING]}

    def announce(self) -> None:
        """Tell all other ranks that this one leaves."""
        for rank in self.outgoing:
            self.send(rank, LEAVING, None)

    def hand_over(self, value: Any) -> None:
        """Send what this rank has to the first one that stays, and wait until all others know that it has left."""
        others = self.outgoing.keys() - self.left
        heir = min(others - self.leaving, default=None)
        for rank in others:
            self.send(rank, LEFT, value if rank == heir else None)
        for rank in others:
            with suppress(LostRank):
                self.receive(rank, RECEIVED)

    def _gone(self, rank: int, reason: str) -> None:
        """Handle the end of a rank, which may have left before."""
        if rank not in self.left:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Raise LostRank in all tasks that wait for a message, now and later."""
        with self.changed:
            self.lost = self.lost or reason
            self.changed.notify_all()

    def close(self) -> None:
        """End the connections."""
        self.ranks.links.pop(self.epoch, None)
        self.fail("the epoch is over")
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(lambda: [pump.cancel() for pump in self.pumps])


def _parts(message: Any, *, copied: bool) -> list[Any]:
    """Return a message as few arrays of bytes: its pickle with the small arrays, and the large ones.

    copied   whether large arrays are copied as well: a worker of the same process would get them as they are
    """
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if copied or buffer.raw().nbytes < SMALL_BYTES:
            return True
        large.append(buffer)
        return False

    pickled = pickle.dumps(message, protocol=5, buffer_callback=is_small)
    parts: list[Any] = [pickled, *(buffer.raw() for buffer in large)]
    return [internals.to_serialize(np.frombuffer(part, np.uint8)) for part in parts]


def is_not_reported(record: logging.LogRecord) -> bool:
    """Filter tracebacks from a worker's log: of lost ranks, which the run reports in one line, and of heartbeats that
    the end of a cluster cuts short.
    """
    said, kind = record.getMessage(), type(record.exc_info[1]).__name__ if record.exc_info else ""
    return LostRank.__name__ not in said and not (kind == "CommClosedError" and "heartbeat" in said)
