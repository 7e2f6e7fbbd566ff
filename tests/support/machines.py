"""A cluster of real processes that tests may kill: a scheduler, workers that come and go, and what scripts start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from command_lines import PATIENCE
from distributed import Client, WorkerPlugin
from namespaces import Hosts

from daskgpt.graph import program
from daskgpt.schedulers.connect import BETWEEN_TASKS
from daskgpt.schedulers.workers import members

ROOT = Path(__file__).parents[2]


def wait_until(holds: Callable[[], Any], what: str = "") -> Any:
    """What `holds` returns as soon as that is something."""
    end = time.monotonic() + PATIENCE
    while not (answer := holds()):
        assert time.monotonic() < end, f"not within {PATIENCE} seconds: {what}"
        time.sleep(0.05)
    return answer


def terminal(**variables: str) -> dict[str, str]:
    """What a terminal has: this Python first on the PATH, this checkout's package, no settings of Dask; and its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT)} | variables


def session_of(leader: int) -> list[psutil.Process]:
    """What still runs of a process and all that it started; what has ended and waits to be noticed does not count."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # ended meanwhile
    return processes


@contextmanager
def started(
    command: list[Any], environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, of which nothing is left afterwards.

    environment   None = that of a terminal
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    process = subprocess.Popen(command, env=environment or terminal(), start_new_session=True, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        finally:
            for member in session_of(process.pid):
                member.kill()


class Machines:
    """A scheduler and workers of one thread, without nannies: who is killed stays away until another is started.

    hosts   where they run: the scheduler on the first one, workers on the others; None = on this machine's loopback
    at      the host of each process, by its name
    """

    def __init__(self, folder: Path, workers: int, hosts: Hosts | None = None) -> None:
        self.folder, self.count, self.hosts = folder, 0, hosts
        self.at: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.log = (folder / "machines.log").open("w")
        paths = [*(str(ROOT / name) for name in ("", "tests", "tests/support", "tests/nightly", "benchmarks"))]
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        variables = {"PYTHONPATH": os.pathsep.join(paths)}
        # As local clusters have it: idle processes take a fifth of the processor time of Dask's defaults.
        for name, (_, ours) in BETWEEN_TASKS.items():
            variables[f"DASK_{name}".upper().replace(".", "__").replace("-", "_")] = str(ours)
        self.environment = os.environ | variables
        file = folder / "scheduler.json"
        # If this process is killed, the scheduler ends by itself, and its workers with it.
        flags = ["--port", "0", "--scheduler-file", str(file), "--idle-timeout", "1h"]
        self._start("scheduler", 0, "scheduler", *flags)
        wait_until(lambda: file.exists() and file.stat().st_size, "scheduler")
        self.address: str = json.loads(file.read_text())["address"]
        for _ in range(workers):
            self.start_worker()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(reversed(self.processes)):
            self.kill(name)
        self.log.close()

    def start_worker(self, host: int = 0, *, memory: str = "auto", contact: Sequence[str] = ()) -> str:
        """The name of a new worker, which may take seconds to come.

        host    where; 0 = where the fewest are
        memory  how much it may take, as `dask worker` takes it
        contact flags for its addresses, in place of --host
        """
        name, self.count = f"w{self.count}", self.count + 1
        if self.hosts and not host:
            taken = [self.at[other] for other in self.alive()]
            host = min(range(1, self.hosts.count), key=taken.count)
        flags = ["--no-nanny", "--nthreads", "1", "--name", name, "--local-directory", str(self.folder / name)]
        self._start(name, host, "worker", self.address, "--memory-limit", memory, *flags, contact=contact)
        return name

    def _start(self, name: str, host: int, *command: str, contact: Sequence[str] = ()) -> None:
        self.at[name] = host
        address = self.hosts.addresses[host] if self.hosts else "127.0.0.1"
        flags = [*(contact or ("--host", address)), "--dashboard-address", f"{address}:0", "--no-dashboard"]
        started = [sys.executable, "-m", "dask", *command, *flags]
        self.processes[name] = subprocess.Popen(
            self.hosts.command(host, started) if self.hosts else started,
            cwd=self.folder,  # Python would import from here first
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """With SIGKILL, until it is gone."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def have(self, workers: int) -> None:
        """Start as many as are missing, end those that are too many, and wait until all of them take tasks."""
        for name in self.alive()[workers:]:
            self.kill(name)
        with Client(self.address) as client:

            def there() -> bool:
                for _ in range(workers - len(self.alive())):  # also for one that ended before it was connected
                    self.start_worker()
                return [worker["status"] for worker in members(client).values()] == ["running"] * workers

            wait_until(there, "workers")

    def ended(self) -> list[str]:
        """The workers whose processes have ended by themselves, each told once."""
        gone = [n for n, process in self.processes.items() if n != "scheduler" and process.poll() is not None]
        for name in gone:
            del self.processes[name]
        return gone

    def alive(self) -> list[str]:
        """The workers whose processes run."""
        return [n for n, process in self.processes.items() if n != "scheduler" and process.poll() is None]

    def said(self) -> str:
        """What scheduler and workers have logged."""
        return (self.folder / "machines.log").read_text()


@contextmanager
def on_workers(address: str, plugin: WorkerPlugin) -> Iterator[None]:
    """Let the workers of a cluster have a plugin."""
    with Client(address) as client:
        client.register_plugin(plugin)
        try:
            yield
        finally:
            client.unregister_worker_plugin(plugin.name)


class Killing(WorkerPlugin):
    """Kills its worker with SIGKILL at the `after`th time that something happens; of all workers only one.

    kind   part of the name of what happens
    once   a file that the one who is killed makes
    """

    name = "kill-itself"

    def __init__(self, kind: str, after: int, once: Path) -> None:
        self.kind, self.left, self.once = kind, after, once

    def count(self, name: str) -> None:
        """Count what has happened, if it is of the kind."""
        self.left -= self.kind in name
        if self.kind in name and self.left <= 0:
            with suppress(FileExistsError):  # of another worker
                self.once.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


class KillItself(Killing):
    """Kills as its worker begins with a task of a kind."""

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if finish == "executing":
            self.count(str(key))


class KillInKernel(Killing):
    """Kills as its worker ends a kernel call of a kind inside of a window of steps."""

    def setup(self, worker: Any) -> None:
        self.span = program.Span

        def dying(key: Any, *rest: Any) -> Any:
            self.count(key[0])
            return self.span(key, *rest)

        program.Span = dying

    def teardown(self, worker: Any) -> None:
        program.Span = self.span


class KillAsItSends(Killing):
    """Kills as its worker sends a part of the state to somebody who is no worker: the client, for a checkpoint."""

    def setup(self, worker: Any) -> None:
        self.worker, self.send = worker, worker.handlers["get_data"]
        send = self.send

        async def dying(comm: Any, keys: Any, **options: Any) -> Any:
            if not options.get("who"):
                self.count(" ".join(map(str, keys)))
            return await send(comm, keys=keys, **options)

        worker.handlers["get_data"] = dying

    def teardown(self, worker: Any) -> None:
        worker.handlers["get_data"] = self.send
