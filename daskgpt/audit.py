"""Audit a run: check its chain of digests, compute stretches between its checkpoints again, and compare.

A run has the same bits whatever the chunks, threads, workers and processor. So each stretch of steps that begins at a
checkpoint must lead to the stored losses, model and moments. Deleted checkpoints between two that exist are compared
by their digests. Nothing is written into the run's folder; a stretch needs room for two checkpoints among the
temporary files (TMPDIR).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from daskgpt.config.errors import number_of, require
from daskgpt.config.files import digest_of
from daskgpt.config.flags import Parser, given_flags, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import setting
from daskgpt.schedulers.machine import versions
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job, compile_kernels
from daskgpt.training.logs import CHAIN, LINK, METRICS, Entry
from daskgpt.training.replay import PlacesConfig, Replay
from daskgpt.training.start import PACKAGES

EPILOG = (
    "Exit codes: 0 = everything agrees; 1 = the chain or a stretch does not agree; 2 = the run cannot be audited here."
)


class AuditConfig(PlacesConfig):
    """Settings of an audit."""

    share: float = setting(1.0, "share of the stretches to compute again, drawn at random; 0 = only the chain", most=1)
    seed: int = setting(0, "seed of the draw")


def main(arguments: list[str]) -> int:
    """Print a line for each fault of the chain and for each stretch, and a verdict."""
    flags = Parser(prog="daskgpt.audit", description=__doc__, epilog=EPILOG)
    flags.add_argument("run", metavar="RUN", type=Path, help="run folder")
    values, options, dataflow = flags.read(arguments, AuditConfig, DataflowConfig)
    if options.share:
        require_scheduler(dataflow.scheduler)
    audit = Audit(values.run, given_flags(DataflowConfig, values), options.data, options.init)
    there = f"{number_of(len(audit.entries), 'entry', 'entries')}, {number_of(len(audit.folders), 'checkpoint')} here"
    print(f"chain {audit.head}: {there}")
    print("".join(f"FAULT {line}\n" for line in audit.faults), end="", flush=True)
    chosen, differ, computed = audit.chosen(options.share, options.seed), 0, 0
    jobs = [audit.job(entry) for stretch in chosen for entry in stretch[1:]]  # nothing is refused later on
    if others := audit.other_versions(jobs):
        print(f"versions {others}: bits may differ for this reason alone")
    if jobs:
        compile_kernels(jobs[0].precision, jobs[0].uses)
        with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
            for stretch in chosen:
                with TemporaryDirectory(prefix="daskgpt-audit-") as folder:
                    verdict = audit.compute(stretch, scheduler, Path(folder))
                    print(f"steps {stretch[0]['step'] + 1:,} to {stretch[-1]['step']:,} {verdict}", flush=True)
                    differ, computed = differ + verdict.differs, computed + (not verdict.unknown)
    rule, advice = "there must be a stretch that can be computed again", "Keep more checkpoints: --save-every, --keep."
    got = {"run": values.run, "checkpoints": len(audit.folders)}
    require(bool(computed or audit.faults or not options.share), "audit", rule, got, advice)
    failed = bool(differ or audit.faults)
    stretches = number_of(len(audit.stretches), "stretch", "stretches")
    what = f"{computed} of {stretches} computed again, {number_of(differ, 'differs', 'differ')}"
    uncovered = f"; {audit.uncovered}, and nothing vouches for them" if audit.uncovered else ""
    whole = "NOT AS WRITTEN" if failed else "as written"
    print(f"{whole}: {what}; the chain has {number_of(len(audit.faults), 'fault')}{uncovered}")
    return int(failed)


# The steps between two neighboring checkpoints that exist, as entries of the chain: where it begins (the first one of
# all, if that is the beginning of the run), then those of deleted checkpoints in between, then that of its end.
Stretch = Sequence[Entry]


@dataclass
class Verdict:
    """The differences between what is written of a stretch and what was computed.

    losses    step, written loss (None if it is missing) and computed loss (None if that step was not reached)
    states    by the name of a file, the steps after which it differs
    folder    the checkpoint that was computed for the end; None if it was not reached
    unknown   why nothing was computed; empty if it was
    """

    losses: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    states: dict[str, list[int]] = field(default_factory=dict)
    folder: Path | None = None
    unknown: str = ""

    @property
    def differs(self) -> bool:
        """Return whether a loss or a file differs."""
        return bool(self.losses or self.states)

    def __str__(self) -> str:
        if not self.differs:
            return f"not computed: {self.unknown}" if self.unknown else "agree: losses, model and moments"
        faults = [f"{name} after step {steps[0]:,}" for name, steps in self.states.items()]
        if self.losses:
            step, written, computed = self.losses[0]
            losses = number_of(len(self.losses), "loss", "losses")
            faults.insert(0, f"{losses}, that of step {step + 1:,} {written} instead of {computed}")
        return f"DIFFER: {'; '.join(faults)}"


class Audit(Replay):
    """The chain of a run, checked, and the stretches that can be computed again.

    uncovered   which losses the chain does not have, in words; a killed run has some after its last checkpoint
    stretches   in the order of their ends
    """

    def __init__(self, run: Path, dials: Mapping[str, Any], data: str = "", init: str = "") -> None:
        """See `Replay`."""
        super().__init__("audit", run, dials, data, init)
        self.uncovered = self._beyond(max((entry["step"] for entry in self.entries.values()), default=0))
        for entry in self.entries.values():
            self._check(entry)
        self.stretches: list[Stretch] = [self.from_checkpoint(self.chain(link)) for link in self.folders]

    def _beyond(self, last: int) -> str:
        """Return which losses are after the last entry; note those after the end of the run, and lines that count for
        no step.

        last   steps of the last entry
        """
        if extra := (self.run / METRICS).read_bytes().count(b"\n") - len(self.losses):
            self.faults.append(f"{METRICS}: {number_of(extra, 'line')} beside the first record of each step")
        beyond = [step for step in self.losses if step >= last]
        if not beyond:
            return ""
        steps = f"losses of steps {beyond[0]:,} to {beyond[-1]:,} follow the last checkpoint"
        if self.head and self.entries[self.head]["configuration"]["run"]["steps"] <= last:
            self.faults.append(f"{METRICS}: {steps}, with which the run ended")
            return ""
        return steps

    def _check(self, entry: Entry) -> None:
        """Note an entry that follows none, and losses that are not those of the chain."""
        before, step = self.before(entry), entry["step"]
        if before is None:
            if step:
                self.faults.append(f"{CHAIN}: the entry before that of step {step:,} is missing")
            return
        losses = [self.losses.get(number) for number in range(before["step"], step)]
        if digest_of(losses) != entry[LINK].get("losses"):
            self.faults.append(f"{METRICS}: losses of steps {before['step'] + 1:,} to {step:,} are not the chain's")

    def other_versions(self, jobs: Sequence[Job]) -> str:
        """Return how the versions that wrote entries differ from those here: bits may differ with them.

        jobs   of the entries, which may name modules from outside of the package
        """
        now = versions(*PACKAGES) | {name: digest for job in jobs for name, digest in job.modules.items()}
        wrote = [pair for entry in self.entries.values() for pair in entry.get("versions", {}).items()]
        others = dict.fromkeys((name, then) for name, then in wrote if then != now.get(name, then))
        return ", ".join(f"{name} {then} -> {now[name]}" for name, then in others)

    def chosen(self, share: float, seed: int) -> list[Stretch]:
        """Return a share of the stretches, drawn at random, at least one unless the share is 0."""
        count = min(len(self.stretches), max(1, round(share * len(self.stretches)))) if share else 0
        numbers = sorted(random.Random(seed).sample(range(len(self.stretches)), count))
        return [self.stretches[number] for number in numbers]

    def compute(self, stretch: Stretch, scheduler: Scheduler, folder: Path) -> Verdict:
        """Make the steps of a stretch again and compare what they lead to, deleted checkpoints included.

        folder   that the checkpoints are written to
        """
        parameters, unknown = self.origin(stretch)
        verdict = Verdict(unknown=unknown)
        if unknown:
            return verdict
        for made in self.made_again(stretch, parameters, scheduler, folder):
            both = zip_longest(made.steps, map(self.losses.get, made.steps), made.losses)
            verdict.losses += [loss for loss in both if loss[1] != loss[2]]
            verdict.folder, step = made.folder, made.entry["step"]
            if made.folder is None:
                verdict.states["no finite model"] = [step]
            for name, file in made.state["files"].items() if made.folder else ():
                if made.entry["files"].get(name) != file:
                    verdict.states.setdefault(name.partition(".")[0], []).append(step)
        return verdict


if __name__ == "__main__":
    run_command(main)
