"""Who belongs to a cluster now, as its scheduler says when it is asked."""

from __future__ import annotations

from typing import Any

from distributed.client import ClosedClientError


def identity(client: Any) -> dict[str, Any]:
    """What the scheduler says of itself and of all workers.

    Not `Client.scheduler_info`, which returns what the client has got last: every two seconds it asks for an answer
    without workers, and where that one comes meanwhile, nobody seems to be there.

    Errors   ClosedClientError, and OSError where the scheduler does not answer
    """
    if client.scheduler is None:
        raise ClosedClientError
    return dict(client.sync(client.scheduler.identity, n_workers=-1))


def members(client: Any) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of each worker, by address. Errors   those of `identity`"""
    return dict(identity(client)["workers"])


def running(client: Any, ready: str = "") -> list[str]:
    """Addresses of the workers that take tasks: not of those that only begin, end, or have no memory left.

    ready   what the heartbeats of a worker must tell of as well

    Errors   those of `identity`
    """
    known = members(client).items()
    return [a for a, worker in known if worker["status"] == "running" and (not ready or ready in worker["metrics"])]
