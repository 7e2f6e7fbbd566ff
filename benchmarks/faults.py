"""Disturb a run on a cluster repeatedly and compare its result: `python benchmarks/faults.py --faults 60`.

A scheduler and some workers of one thread run on this machine, as separate processes. Each equal part of the time has a
fault at a random moment, of one of these kinds:

    kill        SIGKILL of a worker, which is started again after some seconds
    terminate   SIGTERM, on which a worker closes its connections and ends; started again likewise
    stop        SIGSTOP of a worker for some seconds, then SIGCONT

With --namespaces (root on Linux) the scheduler (with the run beside it) and each worker have their own host, a network
namespace with an address (`namespaces.py`), and two more kinds are possible:

    partition   nothing reaches a host or leaves it for 5 to 25 seconds; its connections stay open
    restart     a host is cut off and all its processes die silently; it is started again

A process that ends by itself meanwhile, such as a worker that the scheduler has removed, is started again.

The log (JSON lines) has a line per fault with seconds since the start, kind, worker and the step of the run, lines for
the losses that the run reported, and a line per second with the step, its loss and the workers alive. At the end the
model, the moments and the losses must be those of an undisturbed run with threads, each step once in the metrics. The
run has as many steps as it needs: it is stopped after the last fault, and the undisturbed one makes as many.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from distributed import Client

from daskgpt.schedulers.workers import members

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from command_lines import PATIENCE
from machines import Machines
from namespaces import Hosts
from small_runs import FLAGS
from watched_run import WatchedRun

KINDS = ("kill", "kill", "terminate", "stop")  # kills twice as often
HOST_KINDS = ("kill", "stop", "partition", "restart")  # in namespaces
AWAY, STILL = (1.0, 6.0), (1.0, 8.0)  # seconds until a worker is started again, and that it stands still
HOST_STILL, CUT = (20.0, 20.0), (5.0, 25.0)  # in namespaces: that it stands still, and that a host is cut off
SETTLING = 10.0  # seconds after the last fault
QUIET = 5.0  # seconds without anything that happens, from which on steps count as undisturbed
# Of a run in namespaces: long enough for figures, large enough for a loss to look at, and with a group for each rank.
LONGER = "--blocks 2 --heads 2 --channels 32 --batch-size 8 --sequence-length 32 --groups 4 --warmup 100"
LONGER += " --validation-batches 1 --sample-tokens 0"


class Campaign:
    """One disturbed run, and what was done to it."""

    def __init__(
        self, folder: Path, log: IO[str], draw: random.Random, workers: int, hosts: Hosts | None = None
    ) -> None:
        self.log, self.draw = log, draw
        self.training = WatchedRun(folder, LONGER if hosts else FLAGS)
        self.machines = Machines(folder, workers, hosts)
        self.hosts = hosts
        self.deck: list[str] = []  # kinds that are to come, each as often as it is named
        self.workers, self.begin = workers, time.monotonic()
        self.later: list[tuple[float, str, str]] = []  # when, what and to whom
        self.sampled = float("inf")  # not before the first step

    def run(self, faults: int, seconds: float) -> int:
        """So many faults in about that time; the steps that were made."""
        flags: list[object] = ["--save-minutes", 0.5]
        flags += ["--worker-seconds", 1.5] if self.hosts else []
        with self.machines:
            self.machines.have(self.workers)
            where = {"wrapped": partial(self.hosts.command, 0)} if self.hosts else {}
            with self.training.start(self.machines.address, *flags, heard=self._listen, **where):
                with Client(self.machines.address) as self.client:
                    self._disturb(faults, seconds)
                return self.training.stop()

    def _disturb(self, faults: int, seconds: float) -> None:
        self._until(lambda: self.training.step > 0)
        self.begin, self.sampled = time.monotonic(), 0.0
        moments = [self.draw.uniform(number, number + 1) * seconds / faults for number in range(faults)]
        for moment in moments:
            self._until(lambda at=moment: time.monotonic() - self.begin >= at and self._candidates())
            self._fault()
        end, reached = time.monotonic() + SETTLING, self.training.step
        self._until(lambda: not self.later and time.monotonic() > end and self.training.step > reached)

    def _listen(self, line: str) -> None:
        """Note what the run says of losses, when it says it."""
        if line.startswith(("lost", "workers", "recovery")):
            self._note(said=line)

    def _until(self, holds: Callable[[], Any]) -> None:
        """Wait, and meanwhile restart or continue processes that are due."""
        reached, since = self.training.step, time.monotonic()
        while not holds():
            self._do_later()
            self._sample()
            if self.training.step > reached:
                reached, since = self.training.step, time.monotonic()
            self.training.require_going()
            assert time.monotonic() - since < PATIENCE, f"no step after {reached} for {PATIENCE} seconds"
            time.sleep(0.05)

    def _sample(self) -> None:
        """Once a second, how far the run is, and on which workers it could be."""
        if time.monotonic() - self.sampled < 1:
            return
        self.sampled = time.monotonic()
        member_names = {member["name"] for member in members(self.client).values()}
        alive = [name for name in self._candidates() if name in member_names]
        hosts = [self.machines.at[name] for name in alive]
        self._note(step=self.training.step, loss=self.training.loss, alive=alive, hosts=hosts)

    def _do_later(self) -> None:
        """Do what is due, and restart processes that have ended."""
        for worker in self.machines.ended():
            self.later = [entry for entry in self.later if entry[2] != worker or entry[1] == "heal"]
            self.later.append((time.monotonic(), "start", worker))
        due = [entry for entry in self.later if entry[0] <= time.monotonic()]
        self.later = [entry for entry in self.later if entry not in due]
        for _, what, worker in due:
            host = self.machines.at[worker]
            if what in ("heal", "boot"):
                assert self.hosts is not None
                self.hosts.heal(host)
            if what in ("start", "boot"):
                worker = self.machines.start_worker(host)  # under another name
            if what == "continue" and worker in self.machines.alive():
                self.machines.send(worker, signal.SIGCONT)
            self._note(kind=what, worker=worker, host=host, step=self.training.step)

    def _fault(self) -> None:
        if not self.deck:
            kinds = HOST_KINDS if self.hosts else KINDS
            self.deck = self.draw.sample(kinds, len(kinds))
        worker, kind = self.draw.choice(self._candidates()), self.deck.pop()
        host, now = self.machines.at[worker], time.monotonic()
        self._note(kind=kind, worker=worker, host=host, step=self.training.step)
        if kind == "stop":
            self.machines.send(worker, signal.SIGSTOP)
            self.later.append((now + self.draw.uniform(*(HOST_STILL if self.hosts else STILL)), "continue", worker))
        elif kind == "partition":
            assert self.hosts is not None
            self.hosts.cut(host)
            self.later.append((now + self.draw.uniform(*CUT), "heal", worker))
        elif kind == "restart":
            assert self.hosts is not None
            self.hosts.cut(host)
            self.hosts.kill(host)
            self.machines.kill(worker)
            self.later.append((now + self.draw.uniform(*AWAY), "boot", worker))
        else:
            if kind == "kill":
                self.machines.kill(worker)
            else:
                self.machines.send(worker, signal.SIGTERM)
                self.machines.processes.pop(worker).wait()
            self.later.append((now + self.draw.uniform(*AWAY), "start", worker))

    def _candidates(self) -> list[str]:
        """The workers that nothing is being done to."""
        busy = {worker for _, what, worker in self.later}
        return [worker for worker in self.machines.alive() if worker not in busy]

    def _note(self, **what: Any) -> None:
        self.log.write(json.dumps({"time": round(time.monotonic() - self.begin, 3), **what}) + "\n")
        self.log.flush()


def throughput(entries: list[dict[str, Any]]) -> float | None:
    """Steps that were made, as a share of those that the workers alive at each moment would have made undisturbed;
    None if nothing was ever quiet.

    Undisturbed is the mean rate over all seconds of the same run before which nothing had happened for some, by how
    many workers were alive. A worker is alive when the scheduler knows it and nothing is being done to it.
    """
    samples = [entry for entry in entries if "alive" in entry and entry["time"] > 0]
    events = [entry["time"] for entry in entries if "alive" not in entry]
    spans = [
        (late["time"] - early["time"], late["step"] - early["step"], len(early["alive"]), early["time"], late["time"])
        for early, late in pairwise(samples)
    ]
    quiet = defaultdict(list)
    for seconds, steps, alive, start, end in spans:
        if not any(start - QUIET < event < end for event in events):
            quiet[alive].append((seconds, steps))
    rates = {alive: sum(steps for _, steps in pairs) / sum(s for s, _ in pairs) for alive, pairs in quiet.items()}
    if not rates:
        return None
    expected = sum(seconds * rates.get(alive, fmean(rates.values())) for seconds, _, alive, _, _ in spans)
    return sum(steps for _, steps, *_ in spans) / expected if expected else None


def disturb(
    folder: Path, log: IO[str], faults: int, seconds: float, workers: int, seed: int, hosts: Hosts | None = None
) -> str:
    """All of it; what was done, in words.

    hosts    one more than workers, None = processes on loopback

    Errors   AssertionError with the seed
    """
    campaign = Campaign(folder, log, random.Random(seed), workers, hosts)
    steps = campaign.run(faults, seconds)
    campaign.training.require_undisturbed(steps, f"seed={seed}")
    lost = campaign.training.lost
    again, waited = sum(steps for steps, _ in lost), sum(seconds for _, seconds in lost)
    log.seek(0)
    share = throughput([json.loads(line) for line in log])
    rate = f"{share:.0%} of the steps that the living workers make undisturbed, " if share is not None else ""
    return (
        f"{faults} faults in {seconds / 60:g} minutes on {workers} workers (seed {seed}): {steps} steps, {again} of "
        f"them made again after {len(lost)} losses, {waited:.1f} s until the run was there again; {rate}no batch "
        "skipped or repeated; model, moments and losses are those of an undisturbed run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--namespaces", action="store_true", help="hosts of their own, partitions, restarts: root")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"), help="JSON lines, written anew")
    values = parser.parse_args()
    print(f"seed {values.seed}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(values.log.open("w+"))
        hosts = stack.enter_context(Hosts(values.workers + 1)) if values.namespaces else None
        print(disturb(folder, log, values.faults, 60 * values.minutes, values.workers, values.seed, hosts))


if __name__ == "__main__":
    main()
