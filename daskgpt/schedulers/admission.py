"""Who may work for a run: processes of the same versions and the same arithmetic as its own, whenever they come."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from distributed import WorkerPlugin
from distributed.core import Status

import daskgpt
from daskgpt.config.errors import refusal
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.kernels.float32.blas import one_order
from daskgpt.schedulers.leaving import give, named
from daskgpt.schedulers.members import members

PACKAGES = ("dask", "distributed", "numpy", "numba")


def identity(packed: bool) -> dict[str, str]:
    """Versions of this process, and who multiplies here: what bits and messages between processes depend on.

    packed   whether products run in bfloat16
    """
    known = {"daskgpt": f"{daskgpt.__version__} ({_sources()})"} | {name: version(name) for name in PACKAGES}
    known["float32 products"] = "fused" if one_order(np.dtype(np.float32)) else "library"
    return known | ({"bfloat16 products": unit().name.lower()} if packed else {})


@functools.cache
def _sources() -> str:
    """What tells this package's sources from others of the same version."""
    folder = Path(daskgpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=str):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]


class Admission(WorkerPlugin):
    """Refuses a worker that is another than the run's own process: one that comes ends, for one that is there already
    the run does not begin.
    """

    def __init__(self, name: str, expected: Mapping[str, str], packed: bool, there: Collection[str]) -> None:
        """there   addresses of the workers that were there before"""
        self.name, self.expected, self.packed, self.there = name, expected, packed, there

    def setup(self, worker: Any) -> None:
        """Errors   RuntimeError naming what differs"""
        own = identity(self.packed)
        other = [f"{name}={own.get(name)} (the run: {v})" for name, v in self.expected.items() if own.get(name) != v]
        if not other:
            return
        rule = "a worker must have the versions and the arithmetic of the run"
        got = f"worker={worker.address}, {', '.join(other)}"
        error = refusal(RuntimeError, "daskgpt", rule, got, "Start it in an equal environment.")
        if worker.address in self.there:
            raise error
        # Of a worker that comes Dask would log the error, and let it work. Closed like this, no nanny starts it again.
        logging.getLogger("distributed.worker").error(str(error))
        worker.status = Status.paused  # begins with no task meanwhile
        worker.loop.add_callback(worker.close, executor_wait=False, reason="not equal to the run")


def admit_equals(client: Any, packed: bool) -> None:
    """Let only workers take part, those that are there and those that come, that are equal to this process.

    Errors   RuntimeError naming a worker that is there and what of it differs
    """
    there = tuple(members(client))
    give(client, Admission(named(client, "admission"), identity(packed), packed, there))
