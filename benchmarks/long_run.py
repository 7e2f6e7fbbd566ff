"""Measure the growth of scheduler, workers and client over many small steps: `python benchmarks/long_run.py`.

A scheduler, two workers of one thread and `daskgpt.train` run on this machine, each in its own process. The log (JSON
lines) has a line for every hundred steps: step, seconds, tasks that the scheduler knows, and the resident memory of
each process in kB. At the end a table shows the growth of each of them in kB per step, in the first and in the second
half of the steps (least squares); without growth the values scatter around zero.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from math import inf
from pathlib import Path
from statistics import linear_regression
from typing import IO, Any

import psutil
from distributed import Client

from daskgpt.config.stopping import STOPPED

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from machines import Machines
from small_runs import FLAGS
from watched_run import WatchedRun


def tasks_known(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def long_run(
    folder: Path, log: IO[str], steps: int, seconds: float = inf, every: int = 100, flags: str = FLAGS
) -> list[dict[str, Any]]:
    """All of it, or as much as there is time for; the lines of the log.

    Errors   AssertionError with what the run said, where it does not end well
    """
    entries = list[dict[str, Any]]()
    with Machines(folder, 2) as machines:
        machines.have(2)
        with WatchedRun(folder, flags).start(machines.address, steps=steps) as training:
            processes = machines.processes | {"client": training.process}
            watched = {name: psutil.Process(process.pid) for name, process in processes.items()}
            begin = time.monotonic()
            with Client(machines.address) as client:
                while training.process.poll() is None and time.monotonic() - begin < seconds:
                    if (step := training.step) // every > (entries[-1]["step"] if entries else 0) // every:
                        at, tasks = time.monotonic() - begin, client.run_on_scheduler(tasks_known)
                        memory = {name: own.memory_info().rss // 1000 for name, own in watched.items()}
                        entries.append({"step": step, "time": round(at, 1), "tasks": tasks, **memory})
                        log.write(json.dumps(entries[-1]) + "\n")
                        log.flush()
                    time.sleep(0.2)
                if training.process.poll() is None:
                    training.stop()
        assert training.process.returncode in (0, STOPPED), training.errors.read_text()
    return entries


def grown(entries: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Of what a step makes more on average: in the first half of the steps, and in the second."""
    middle = (entries[0]["step"] + entries[-1]["step"]) / 2
    halves = [[e for e in entries if e["step"] <= middle], [e for e in entries if e["step"] >= middle]]
    first, second = (linear_regression([e["step"] for e in half], [e[name] for e in half]).slope for half in halves)
    return first, second


def table(entries: list[dict[str, Any]]) -> str:
    last = entries[-1]
    lines = [f"{last['step']} steps      first    last   first half, a step   second half"]
    for name in [name for name in last if name not in ("step", "time")]:
        unit, ends = ("" if name == "tasks" else "kB"), (entries[0][name], last[name])
        slopes = "".join(f"{slope:15.3f} {unit:2}" for slope in grown(entries, name))
        lines.append(f"{name:12} {ends[0]:7,} {ends[1]:7,} {slopes}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=inf, help="after which it ends with fewer steps")
    parser.add_argument("--flags", default=FLAGS, help="of daskgpt.train: the model and its batches")
    parser.add_argument("--log", type=Path, default=Path("long_run.jsonl"), help="JSON lines, written anew")
    values = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(values.log.open("w"))
        print(table(long_run(folder, log, values.steps, 60 * values.minutes, flags=values.flags)))


if __name__ == "__main__":
    main()
