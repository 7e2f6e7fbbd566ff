"""Messages between tasks that run at the same time on different workers, through the connections of Dask's workers."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from threading import Condition
from typing import Any

import numpy as np
from distributed.protocol import to_serialize

OP = "daskgpt-message"  # what workers call it
SMALL_BYTES = 1 << 19  # of an array that is copied: what a part of a message costs besides its bytes


def _parts(message: Any, *, copied: bool) -> list[Any]:
    """A message as few arrays of bytes: its pickle with small arrays in it, and large ones apart.

    copied   whether these are copied: to a worker of the same process they would come as they are
    """
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if copied or buffer.raw().nbytes < SMALL_BYTES:
            return True
        large.append(buffer)
        return False

    pickled = pickle.dumps(message, protocol=5, buffer_callback=is_small)
    parts: list[Any] = [pickled, *(each.raw() for each in large)]
    return [to_serialize(np.frombuffer(part, np.uint8)) for part in parts]


class LostRank(OSError):
    """Another rank is gone, or was told to go no further."""


def _is_told_elsewhere(record: logging.LogRecord) -> bool:
    """Keep the traceback of a lost rank out of a worker's log: the run says it in one line."""
    return LostRank.__name__ not in record.getMessage()


class WorkerLink:
    """The link of one rank to the others of an epoch, see `graph.distribute.Link`.

    A message goes one way, on a connection that stays open: a rank whose connection to another one ends knows at once
    that this one is gone.
    """

    def __init__(self, worker: Any, epoch: str, number: int, addresses: Sequence[str]) -> None:
        self.worker, self.epoch, self.number = worker, epoch, number
        self.loop = worker.loop.asyncio_loop
        self.arrived: dict[tuple[int, Hashable], deque[Any]] = defaultdict(deque)
        self.changed = Condition()
        self.lost = ""
        mailboxes(worker)[epoch] = self
        self.outgoing: dict[int, asyncio.Queue[Any]] = {}
        self.pumps: list[asyncio.Task[None]] = []
        asyncio.run_coroutine_threadsafe(self._open(addresses), self.loop).result()

    async def _open(self, addresses: Sequence[str]) -> None:
        for rank, address in enumerate(addresses):
            if rank != self.number:
                self.outgoing[rank] = asyncio.Queue()
                self.pumps.append(asyncio.create_task(self._pump(rank, address)))

    async def _pump(self, rank: int, address: str) -> None:
        """Send what is to be sent to a rank, and notice when it is gone."""
        comm = None
        try:
            comm, copied = await self.worker.rpc.connect(address), address.startswith("inproc")
            gone = asyncio.create_task(comm.read())  # nobody answers: it ends with the connection
            gone.add_done_callback(lambda ended: self._ended(rank, address, ended))
            while (message := await self.outgoing[rank].get()) is not None:
                parts = _parts(message, copied=copied)
                done_of(self.worker)["sent"] += sum(part.data.nbytes for part in parts)
                await comm.write({"op": OP, "reply": False, "epoch": self.epoch, "parts": parts})
        except OSError as error:
            self.fail(f"worker {address}: {error}")
        finally:
            if comm is not None:
                comm.abort()

    def _ended(self, rank: int, address: str, ended: asyncio.Task[Any]) -> None:
        """Called with the end of the connection to a rank."""
        if not ended.cancelled():
            self.fail(f"worker {address}: {ended.exception() or 'it has ended'}")
            self.outgoing[rank].put_nowait(None)

    def send(self, rank: int, channel: Hashable, value: Any) -> None:
        self.loop.call_soon_threadsafe(self.outgoing[rank].put_nowait, (self.number, channel, value))

    def receive(self, rank: int, channel: Hashable) -> Any:
        """Errors   LostRank where the rank is gone"""
        queue = self.arrived[rank, channel]
        with self.changed:
            while not queue:
                if self.lost:
                    raise LostRank(self.lost)
                self.changed.wait()
            return queue.popleft()

    def deliver(self, rank: int, channel: Hashable, value: Any) -> None:
        """Keep a message until it is asked for."""
        with self.changed:
            self.arrived[rank, channel].append(value)
            self.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Let everybody who waits know that nothing will come."""
        with self.changed:
            self.lost = self.lost or reason
            self.changed.notify_all()

    def close(self) -> None:
        """End the connections."""
        links = mailboxes(self.worker)
        links.pop(self.epoch, None)
        if not links:
            self.worker.handlers.pop(OP, None)
        self.fail("the epoch is over")
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(lambda: [pump.cancel() for pump in self.pumps])


def mailboxes(worker: Any) -> dict[str, WorkerLink]:
    """The links of a worker by epoch; the first call lets the worker take messages."""
    links: dict[str, WorkerLink] = worker.__dict__.setdefault("daskgpt_links", {})

    def deliver(epoch: str, parts: Sequence[np.ndarray]) -> None:
        done_of(worker)["received"] += sum(part.nbytes for part in parts)
        if epoch in links:  # else of ranks that are over
            links[epoch].deliver(*pickle.loads(parts[0].data, buffers=[part.data for part in parts[1:]]))

    worker.handlers.setdefault(OP, deliver)
    logging.getLogger("distributed.worker").addFilter(_is_told_elsewhere)
    return links


def programs_of(worker: Any) -> dict[str, Any]:
    """What a worker is a rank of, by run: objects with a `link`."""
    found: dict[str, Any] = worker.__dict__.setdefault("daskgpt_programs", {})
    return found


def done_of(worker: Any) -> dict[str, float]:
    """What a worker's ranks have done besides what Dask counts: tasks, bytes sent and received, and busy seconds that
    windows of steps were not.
    """
    found: dict[str, float] = worker.__dict__.setdefault("daskgpt_done", defaultdict(float))
    return found


def end_programs(run: str, dask_worker: Any) -> None:
    """Forget the programs of a worker whose runs begin with this name, and their states."""
    found = programs_of(dask_worker)
    for name in [name for name in found if name.startswith(run)]:
        found.pop(name).link.close()
