"""Audits of runs: stretches between checkpoints are computed again and compared with what is written.

Anybody can begin at a checkpoint, make the steps up to the next one (`training/replay.py`), and must come to the same
losses, weights and moments.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from daskgpt.config.errors import number_of
from daskgpt.config.files import digest_of
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.chain import CHAIN, LINK, Entry
from daskgpt.training.logs import METRICS
from daskgpt.training.replay import Replay

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

    def __init__(
        self, run: Path, dials: Mapping[str, Any], data: str = "", init: str = "", where: str = "audit"
    ) -> None:
        """See `Replay`."""
        super().__init__(where, run, dials, data, init)
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

    def chosen(self, share: float, seed: int) -> list[Stretch]:
        """Return a share of the stretches, drawn at random, at least one unless the share is 0."""
        count = min(len(self.stretches), max(1, round(share * len(self.stretches)))) if share else 0
        numbers = sorted(random.Random(seed).sample(range(len(self.stretches)), count))
        return [self.stretches[number] for number in numbers]

    def compute(self, stretch: Stretch, scheduler: Scheduler, folder: Path, end: int | None = None) -> Verdict:
        """Make the steps of a stretch again and compare what they lead to, deleted checkpoints included.

        folder   that the checkpoints are written to
        end      number of steps after which it ends; None for the whole stretch
        """
        parameters, unknown = self.origin(stretch)
        verdict = Verdict(unknown=unknown)
        if unknown:
            return verdict
        for made in self.made_again(stretch, parameters, scheduler, folder, end):
            both = zip_longest(made.steps, map(self.losses.get, made.steps), made.losses)
            verdict.losses += [loss for loss in both if loss[1] != loss[2]]
            verdict.folder, step = made.folder, made.entry["step"]
            if made.folder is None:
                verdict.states["no finite model"] = [step]
            for name, file in made.state["files"].items() if made.folder and made.steps.stop == step else ():
                if made.entry["files"].get(name) != file:
                    verdict.states.setdefault(name.partition(".")[0], []).append(step)
        return verdict
