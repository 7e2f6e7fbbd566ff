"""Train on a cluster of short-lived workers: `python benchmarks/short_lives.py --minutes 15`.

The cluster is a `LocalCluster` with `cluster.adapt(minimum=1, maximum=4)`, whose workers have `--lifetime 60s
--lifetime-stagger 15s`: after about that time each of them ends, and adapt starts another. A step has so few tasks that
adapt always keeps the minimum number of workers; to vary it, the minimum is drawn from 1 to 4 twice in a lifetime.

The log (JSON lines) has a line per second with the step and the scheduler's workers, and a line for each worker that
joins or leaves, for each new minimum, and for the run's reports on workers and losses. At the end model, moments and
losses must be those of a run with threads of as many steps, each step once in the metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import dask
from distributed import Client, LocalCluster
from faults import LONGER

from daskgpt.schedulers.workers import members

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from machines import wait_until
from watched_run import WatchedRun

LEAST, MOST = 1, 4  # workers
LIFE, STAGGER = 60.0, 15.0  # seconds
SPELL = 0.25, 0.75  # of a lifetime, that adapt may keep one number
LOOKING = 0.2  # seconds
REPLACED = {"distributed.deploy.lost-worker-timeout": "1s"}  # after which a cluster starts another; Dask itself: 15 s


class Coming:
    """Who comes and who goes, noted as it is seen.

    alive   addresses
    """

    def __init__(self, log: IO[str], client: Client) -> None:
        self.log, self.client, self.begin = log, client, time.monotonic()
        self.alive, self.gone = set[str](), 0
        self.numbers: list[int] = []  # of workers, each second

    def look(self) -> None:
        now = set(members(self.client))
        for what, who in (("came", now - self.alive), ("gone", self.alive - now)):
            for address in sorted(who):
                self.note(kind=what, worker=address)
        self.gone += len(self.alive - now)
        self.alive = now

    def sample(self, **progress: Any) -> None:
        self.numbers.append(len(self.alive))
        self.note(**progress, alive=sorted(self.alive))

    def note(self, **what: Any) -> None:
        self.log.write(json.dumps({"time": round(time.monotonic() - self.begin, 3), **what}) + "\n")
        self.log.flush()

    @property
    def replaced(self) -> float:
        """How often a worker was replaced, on average over as many as there were."""
        return self.gone / fmean(self.numbers)


@contextmanager
def short_lived(life: float, stagger: float) -> Iterator[tuple[LocalCluster, Any]]:
    """The cluster, and what adapts it."""
    settings: dict[str, Any] = {"lifetime": f"{life}s", "lifetime_stagger": f"{stagger}s"}
    with (
        dask.config.set(REPLACED),
        LocalCluster(
            n_workers=LEAST,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address=None,
            **settings,
        ) as cluster,
    ):
        yield cluster, cluster.adapt(minimum=LEAST, maximum=MOST)


def short_lives(folder: Path, log: IO[str], seconds: float, life: float, stagger: float, seed: int) -> tuple[Any, str]:
    """All of it; who came and went, and what was done, in words.

    Errors   AssertionError with the seed
    """
    draw, training = random.Random(seed), WatchedRun(folder, LONGER)
    with short_lived(life, stagger) as (cluster, adaptive), Client(cluster) as client:
        coming = Coming(log, client)

        def heard(line: str) -> None:
            if line.startswith(("lost", "workers", "recovery")):
                coming.note(said=line)

        with training.start(cluster.scheduler_address, "--save-minutes", 0.5, heard=heard):
            wait_until(lambda: training.step, "the first step")
            coming.begin = time.monotonic()
            sampled = drawn = 0.0  # when the next one is due
            while (now := time.monotonic() - coming.begin) < seconds:
                training.require_going()
                coming.look()
                if now >= drawn:
                    adaptive.minimum, drawn = draw.randint(LEAST, MOST), now + life * draw.uniform(*SPELL)
                    coming.note(kind="wanted", workers=adaptive.minimum)
                if now >= sampled:
                    sampled = now + 1
                    coming.sample(step=training.step, loss=training.loss)
                time.sleep(LOOKING)
            adaptive.minimum, reached = MOST, training.step  # it can end only if there is a worker
            wait_until(lambda: training.step > reached, "a step more")
            steps = training.stop()
    training.require_undisturbed(steps, f"seed={seed}")
    again = [steps for steps, _ in training.lost]
    mean = fmean(coming.numbers)
    words = (
        f"{seconds / 60:g} minutes, lifetimes of {life:g} +- {stagger:g} s (seed {seed}): {steps} steps on "
        f"{min(coming.numbers)} to {max(coming.numbers)} workers, {mean:.1f} on average; {coming.gone} "
        f"ended, so that each was replaced {coming.replaced:.1f} times; {len(again)} losses, after which {sum(again)} "
        "steps were made again; model, moments and losses are those of a run with threads"
    )
    return coming, words


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--lifetime", type=float, default=LIFE, help="seconds")
    parser.add_argument("--lifetime-stagger", type=float, default=STAGGER, help="seconds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--log", type=Path, default=Path("short_lives.jsonl"), help="JSON lines, written anew")
    values = parser.parse_args()
    print(f"seed {values.seed}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(values.log.open("w"))
        times = 60 * values.minutes, values.lifetime, values.lifetime_stagger
        print(short_lives(folder, log, *times, values.seed)[1])


if __name__ == "__main__":
    main()
