"""Disturb a run on a cluster at random moments and compare what it ends with: `python tests/faults.py --faults 60`.

A scheduler and some workers of one thread run on this machine, as processes of their own. Each fault is one of

    kill        SIGKILL of a worker, which is started again after some seconds
    terminate   SIGTERM, at which a worker says goodbye and ends; started again likewise
    stop        SIGSTOP of a worker for some seconds, then SIGCONT

The log (JSON lines) has a line a fault: seconds since the start, kind, worker, the step that the run was at, and
likewise what it said of losses. At the end the model, the moments and the losses must be those of a run with threads
that nobody has disturbed, each step once in the metrics. The run has as many steps as it needs: it is stopped after
the last fault, and the undisturbed one makes as many.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from command_lines import run, write_text
from machines import Machines
from small_runs import FLAGS, losses_of, steps_in, tensors_of

from daskgpt.config.stopping import STOPPED

KINDS = ("kill", "kill", "terminate", "stop")  # kills twice as often
AWAY, STILL = (1.0, 6.0), (1.0, 8.0)  # seconds until a worker is started again, and that it stands still
SETTLING, PATIENCE = 10.0, 300.0  # seconds after the last fault, and for what should take a few
STEPS = 1_000_000  # more than there will be


class Campaign:
    """One disturbed run, and what was done to it."""

    def __init__(self, folder: Path, log: IO[str], draw: random.Random, workers: int) -> None:
        self.out, self.log, self.draw = folder / "run", log, draw
        self.text = write_text(folder)
        self.common = ["--data", self.text, *FLAGS.split(), "--schedule", "constant", "--validate-every", "0"]
        self.machines = Machines(folder, workers)
        self.workers, self.begin = workers, time.monotonic()
        self.later: list[tuple[float, str, str]] = []  # when, what and to whom

    def run(self, faults: int, seconds: float) -> int:
        """So many faults in about that time; the steps that were made."""
        self.machines.have(self.workers)
        flags = ["--scheduler", self.machines.address, "--out", self.out, "--steps", STEPS, "--save-minutes", 0.5]
        command = [sys.executable, "-m", "daskgpt.train", *map(str, [*self.common, *flags])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        listener = threading.Thread(target=self._listen, args=(process,))
        listener.start()
        try:
            self._until(lambda: self.step() > 0, process)
            self.begin = time.monotonic()
            moments = sorted(self.draw.uniform(0, seconds) for _ in range(faults))
            for moment in moments:
                self._until(lambda at=moment: time.monotonic() - self.begin >= at and self._candidates(), process)
                self._fault()
            end, reached = time.monotonic() + SETTLING, self.step()
            self._until(lambda: not self.later and time.monotonic() > end and self.step() > reached, process)
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            listener.join()
            self.machines.__exit__(None, None, None)
        assert code == STOPPED, f"exit code {code}: {process.communicate()[1]}"
        return steps_in(self.out)[-1]

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Note what the run says of losses, when it says it."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("lost", "workers", "recovery")):
                self._note(said=line.rstrip())

    def step(self) -> int:
        """How many steps the metrics tell of."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _until(self, holds: Any, process: subprocess.Popen[str]) -> None:
        """Wait, and meanwhile start again and let go on whoever's time has come."""
        reached, since = self.step(), time.monotonic()
        while not holds():
            self._do_later()
            if self.step() > reached:
                reached, since = self.step(), time.monotonic()
            ended = process.poll()
            assert ended is None, f"it ended with {ended}: {process.communicate()[1]}"
            assert time.monotonic() - since < PATIENCE, f"no step after {reached} for {PATIENCE} seconds"
            time.sleep(0.05)

    def _do_later(self) -> None:
        due = [entry for entry in self.later if entry[0] <= time.monotonic()]
        self.later = [entry for entry in self.later if entry not in due]
        for _, what, worker in due:
            if what == "start":
                worker = self.machines.start_worker()  # under another name
            elif worker in self.machines.alive():
                self.machines.send(worker, signal.SIGCONT)
            self._note(kind=what, worker=worker, step=self.step())

    def _fault(self) -> None:
        worker, kind = self.draw.choice(self._candidates()), self.draw.choice(KINDS)
        self._note(kind=kind, worker=worker, step=self.step())
        now = time.monotonic()
        if kind == "stop":
            self.machines.send(worker, signal.SIGSTOP)
            self.later.append((now + self.draw.uniform(*STILL), "continue", worker))
            return
        if kind == "kill":
            self.machines.kill(worker)
        else:
            self.machines.send(worker, signal.SIGTERM)
        self.later.append((now + self.draw.uniform(*AWAY), "start", worker))

    def _candidates(self) -> list[str]:
        """The workers that nothing is being done to."""
        busy = {worker for _, what, worker in self.later}
        return [worker for worker in self.machines.alive() if worker not in busy]

    def _note(self, **what: Any) -> None:
        self.log.write(json.dumps({"time": round(time.monotonic() - self.begin, 3), **what}) + "\n")
        self.log.flush()


def disturb(folder: Path, log: IO[str], faults: int, seconds: float, workers: int, seed: int) -> str:
    """All of it; what was done, in words.

    Errors   AssertionError with the seed
    """
    campaign = Campaign(folder, log, random.Random(seed), workers)
    steps = campaign.run(faults, seconds)
    whole = folder / "whole"
    done = run("train", *campaign.common, "--steps", steps, "--out", whole, "--save-minutes", 0)
    assert done.returncode == 0, done.stderr
    # It may have been stopped as it made some steps again: the metrics are then ahead of the model.
    assert losses_of(campaign.out)[:steps] == losses_of(whole), f"seed={seed}: other losses"
    assert tensors_of(campaign.out) == tensors_of(whole), f"seed={seed}: other bits"
    records = [json.loads(line) for line in (campaign.out / "metrics.jsonl").read_text().splitlines()]
    lost = [record for record in records if "lost_s" in record]
    again, waited = sum(record["lost_steps"] for record in lost), sum(record["lost_s"] for record in lost)
    return (
        f"{faults} faults in {seconds / 60:g} minutes on {workers} workers (seed {seed}): {steps} steps, {again} of "
        f"them made again after {len(lost)} losses, {waited:.1f} s until the run was there again; model, moments and "
        "losses are those of a run that nobody has disturbed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"), help="JSON lines, written anew")
    values = parser.parse_args()
    print(f"seed {values.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, values.log.open("w") as log:
        print(disturb(Path(folder), log, values.faults, 60 * values.minutes, values.workers, values.seed))


if __name__ == "__main__":
    main()
