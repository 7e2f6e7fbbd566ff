"""Audits of runs: stretches between checkpoints are computed again and compared with what is written.

The bits of a run follow from its configuration and data, whatever computes them. So anybody can begin at a checkpoint,
make the steps up to the next one, and must come to the same losses, weights and moments.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from math import nan
from pathlib import Path
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of
from daskgpt.config.run import DataflowConfig, RunConfig
from daskgpt.formats.models import open_model_file
from daskgpt.formats.stored_model import read_json
from daskgpt.model.parameters import RandomParameters, digest
from daskgpt.model.step import Arrays
from daskgpt.schedulers.machine import versions
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.chain import CHAIN, LINK, Entry, is_entry, read_chain
from daskgpt.training.checkpoint import STATE, DamagedCheckpoint, checked_state, checkpoints, read_checkpoint
from daskgpt.training.job import Job, require_memory
from daskgpt.training.logs import METRICS, metrics_lines
from daskgpt.training.metrics import Diverged
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import (
    PACKAGES,
    SEEDED,
    Start,
    WarmStart,
    arithmetic,
    configurations,
    data_of_run,
    open_dataset,
    require_allowed_rows,
    stored_settings,
)
from daskgpt.training.trainer import Observers, run_job


@dataclass(frozen=True)
class Stretch:
    """The steps between two neighboring checkpoints that exist.

    entries   of the chain: where it begins, then those of deleted checkpoints in between, then that of its end
    begin     the checkpoint that it begins at; None for the beginning of the run
    end       the checkpoint at its end
    """

    entries: Sequence[Entry]
    begin: Path | None
    end: Path

    def __str__(self) -> str:
        return f"steps {self.entries[0]['step'] + 1:,} to {self.entries[-1]['step']:,}"


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
            faults.insert(0, f"{len(self.losses):,} losses, that of step {step + 1:,} {written} instead of {computed}")
        return f"DIFFER: {'; '.join(faults)}"


class Audit:
    """The chain of a run, checked, and the stretches that can be computed again.

    faults      what is not as it was written, in words
    uncovered   which losses the chain does not have, in words; a killed run has some after its last checkpoint
    entries     of the chain, and of checkpoints that it lacks, by their digests
    stretches   in the order of their ends
    """

    def __init__(self, run: Path, dials: Mapping[str, Any], data: str = "", init: str = "") -> None:
        """dials   fields of `DataflowConfig`: how steps are computed
        data    where the data are, if not where the last entry says
        init    where the model that the run began with is, likewise

        Errors  FileNotFoundError if there is no run with a chain
        """
        for name in (CHAIN, METRICS):
            rule, advice = f"the folder must hold a run with {CHAIN} and {METRICS}", "Check the path."
            require((run / name).is_file(), "audit", rule, {"run": run}, advice, FileNotFoundError)
        self.run, self.dials, self.faults = run, dials, list[str]()
        self.open_dataset = lru_cache(maxsize=1)(open_dataset)
        lines = [entry for _, entry in read_chain(run / CHAIN)]
        self.faults += [f"{CHAIN}: line {n} is not as it was written" for n, entry in enumerate(lines, 1) if not entry]
        self.entries = {digest_of(entry): entry for entry in lines if entry}
        self.head = next(reversed(self.entries), "")
        settings = self.entries[self.head]["configuration"] if self.head else {}
        self.data = data or settings.get("data", {}).get("data", "")
        self.init = init or settings.get("run", {}).get("init", "")
        self.folders = dict(self._checkpoints())
        for folder in list(self.folders.values())[:1]:
            open_model_file(folder)  # makes a learned vocabulary known
        last = max((entry["step"] for entry in self.entries.values()), default=0)
        self.losses = {record["step"]: record.get("loss") for record, _ in metrics_lines(run / METRICS, last)}
        self.uncovered = self._beyond(last)
        for entry in self.entries.values():
            self._check(entry)
        self.stretches = [self._stretch(link, folder) for link, folder in self.folders.items()]

    def _checkpoints(self) -> Iterator[tuple[str, Path]]:
        """Yield the good checkpoints by the digests of their entries, and note those that the chain lacks."""
        for folder in checkpoints(self.run):
            try:
                state = checked_state(folder)
            except DamagedCheckpoint as error:
                self.faults.append(f"{folder.name}: {error}")
                continue
            link = digest_of(state)
            if link not in self.entries:
                self.faults.append(f"{folder.name}: {CHAIN} has another {STATE}, or none")
            if is_entry(state):
                self.entries.setdefault(link, state)
                yield link, folder

    def _beyond(self, last: int) -> str:
        """Return which losses are after the last entry; note those after the end of the run, and lines that count for
        no step.

        last   steps of the last entry
        """
        records = metrics_lines(self.run / METRICS, sys.maxsize)
        if extra := (self.run / METRICS).read_bytes().count(b"\n") - len(records):
            self.faults.append(f"{METRICS}: {extra:,} lines are no record of a step, or a second one")
        beyond = [record["step"] for record, _ in records if record["step"] >= last]
        if not beyond:
            return ""
        steps = f"losses of steps {beyond[0]:,} to {beyond[-1]:,} follow the last checkpoint"
        if self.head and self.entries[self.head]["configuration"]["run"]["steps"] <= last:
            self.faults.append(f"{METRICS}: {steps}, with which the run ended")
            return ""
        return steps

    def _before(self, entry: Entry) -> Entry | None:
        before = self.entries.get(str(entry.get(LINK, {}).get("previous")))
        return before if before and before["step"] < entry["step"] else None

    def _check(self, entry: Entry) -> None:
        """Note an entry that follows none, and losses that are not those of the chain."""
        before, step = self._before(entry), entry["step"]
        if before is None:
            if step:
                self.faults.append(f"{CHAIN}: the entry before that of step {step:,} is missing")
            return
        losses = [self.losses.get(number) for number in range(before["step"], step)]
        if digest_of(losses) != entry[LINK].get("losses"):
            self.faults.append(f"{METRICS}: losses of steps {before['step'] + 1:,} to {step:,} are not the chain's")

    def _stretch(self, link: str, end: Path) -> Stretch:
        entries = [self.entries[link]]
        while before := self._before(entries[0]):
            entries.insert(0, before)
            if begin := self.folders.get(digest_of(before)):
                return Stretch(entries, begin, end)
        return Stretch(entries, None, end)

    def chosen(self, share: float, seed: int) -> list[Stretch]:
        """Return a share of the stretches, drawn at random, at least one unless the share is 0."""
        count = min(len(self.stretches), max(1, round(share * len(self.stretches)))) if share else 0
        numbers = sorted(random.Random(seed).sample(range(len(self.stretches)), count))
        return [self.stretches[number] for number in numbers]

    def job(self, entry: Entry) -> Job:
        """Return the job of the steps before an entry: those of the process that wrote it, computed here.

        Errors   ValueError where the data, or the arithmetic of this machine, are not the run's
        """
        c = configurations("audit", stored_settings("audit", entry))
        dataflow = DataflowConfig(**{"precision": c["dataflow"].precision} | dict(self.dials))
        data = replace(c["data"], data=self.data)
        require_allowed_rows(entry, "audit")
        dataset = data_of_run("audit", data, entry, self.open_dataset)
        # The learning rate depends on the number of all steps; those after the entry are not made.
        steps = {"steps": c["run"].steps, "save_every": entry["step"], "validate_every": 0, "validation_batches": 1}
        run = RunConfig(**steps, seed=entry["seed"], keep_best=0)
        job = Job(c["model"], data, c["optimizer"], dataflow, run, dataset)
        then, here = (
            f"{facts.get('precision')} by {facts.get('unit')}" for facts in (entry["arithmetic"], arithmetic(job))
        )
        rule, advice = "this machine must compute with the run's arithmetic", "Audit it where that is the same."
        require(then == here, "audit", rule, {"run": f"{self.run} ({then})", "here": here}, advice)
        require_memory(job)
        return job

    def other_versions(self) -> str:
        """Return how the versions that wrote the last entry differ from those here: bits may differ with them."""
        then, now = self.entries[self.head]["versions"] if self.head else {}, versions(*PACKAGES)
        other = [name for name in now if then.get(name, now[name]) != now[name]]
        return ", ".join(f"{name} {then[name]} -> {now[name]}" for name in other)

    def compute(self, stretch: Stretch, scheduler: Scheduler, folder: Path) -> Verdict:
        """Make the steps of a stretch again and compare what they lead to, deleted checkpoints included.

        folder   that the checkpoints are written to
        """
        verdict, at, state = Verdict(), stretch.begin, stretch.entries[0]
        parameters, verdict.unknown = ({}, "") if at else self._origin(stretch.entries)
        for entry in () if verdict.unknown else stretch.entries[1:]:
            job, moments = self.job(entry), None
            if at:
                checkpoint = read_checkpoint(at, state, job.moments)
                parameters, moments = checkpoint.model.parameters, checkpoint.moments
                if at != stretch.begin:
                    shutil.rmtree(at)
            out, steps = RunFolder(str(folder / f"to-{entry['step']}")), range(state["step"], entry["step"])
            start = Start(out, parameters, moments, steps.start, [nan] * steps.start, entry=state)
            losses, at = _made(job, scheduler, start, entry["step"])
            both = zip_longest(steps, map(self.losses.get, steps), losses)
            verdict.losses += [loss for loss in both if loss[1] != loss[2]]
            if at is None:
                verdict.states["no finite model"] = [entry["step"]]
                break
            state = read_json(at / STATE, "audit", STATE)
            for name, file in state["files"].items():
                if entry["files"].get(name) != file:
                    verdict.states.setdefault(name.partition(".")[0], []).append(entry["step"])
        verdict.folder = at
        return verdict

    def _origin(self, entries: Sequence[Entry]) -> tuple[Arrays, str]:
        """Return the parameters that a run began with; why they are not known, if so."""
        first = entries[0]
        if first["step"] or "parameters" not in first:
            return {}, f"the chain is broken before the entry of step {first['step']:,}"
        job, wanted = self.job(entries[-1]), first["parameters"]
        if wanted == SEEDED:
            return RandomParameters(job.config, job.run.seed), ""
        with suppress(OSError, ValueError):
            parameters = WarmStart(self.init).model.loaded().parameters
            if digest(parameters) == wanted:
                return parameters, ""
        if self.init:
            return {}, f"the model that the run began with is not at {self.init}: name its place by --init"
        return {}, "a program gave its parameters"


def _made(job: Job, scheduler: Scheduler, start: Start, end: int) -> tuple[list[float], Path | None]:
    """Make the steps of a job up to an end; return their losses, and the checkpoint there, None if a number is not
    finite.
    """
    losses = list[float]()

    def on_step(step: int, metrics: Mapping[str, Any]) -> bool:
        losses.append(metrics["loss"])
        return step + 1 == end

    try:
        result = run_job(job, scheduler, start, Observers(on_step, quiet=True))
    except Diverged:
        return losses, None
    if start.step + len(losses) < end:  # by Ctrl-C
        raise KeyboardInterrupt
    return losses, result.checkpoint
