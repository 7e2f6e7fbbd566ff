"""Find the first step, and the first tensor in it, in which two runs differ.

First what is written is compared: losses, and the digests of models and moments at steps where both runs have them.
Then both runs are made again from the last state that they share, each with its own settings and data:

  their replays differ   Settings or data do, or what this version makes of them: the first step whose results differ
                         is searched, and in it the first tensor in the order of computation, as `daskgpt rewind` names
                         them. `after` means the state after the update.
  their replays agree    One run is not what its settings give, because of a fault, another version or another machine.
                         The first of its losses, and of its checkpoints, that differ from the replay are named, and
                         the first tensor in that checkpoint.

Instead of runs, two models in any format that daskgpt reads are compared tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from daskgpt.config.flags import Parser, add_flags, from_flags, given_flags, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.formats.stored_model import read_json
from daskgpt.model.step import as_weights
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.chain import CHAIN
from daskgpt.training.checkpoint import STATE, load, read_checkpoint
from daskgpt.training.job import compile_kernels
from daskgpt.training.replay import Made, PlacesConfig, Replay, StepTensors
from daskgpt.training.start import PLACES

EPILOG = "Exit codes: 0 = no difference; 1 = a difference is named; 2 = the runs cannot be compared here."
DIGITS = 12  # of a SHA-256


def main(arguments: list[str]) -> int:
    """Compare, and print what differs."""
    flags = Parser(prog="daskgpt.bisect", description=__doc__, epilog=EPILOG)
    for name in ("one", "other"):
        flags.add_argument(name, metavar=f"RUN_{'AB'[name == 'other']}", type=Path, help="run folder, or a model")
    add_flags(flags, PlacesConfig)
    add_flags(flags, DataflowConfig)
    values = flags.parse_args(arguments)
    places, dataflow = from_flags(PlacesConfig, values), from_flags(DataflowConfig, values)
    require_scheduler(dataflow.scheduler)
    paths = values.one, values.other
    if not all((path / CHAIN).is_file() for path in paths):
        return _told(first_difference(*(load(path)[1] for path in paths)), "the models are equal")
    dials = given_flags(DataflowConfig, values)
    bisection = Bisection([Replay("bisect", path, dials, places.data, places.init) for path in paths])
    print(f"written: {bisection.described()}", flush=True)
    if bisection.end is None:
        return 0
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        for line in bisection.differences(scheduler):
            print(line, flush=True)
    return 1


def _told(difference: str, equal: str) -> int:
    print(difference or equal)
    return int(bool(difference))


def first_difference(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> str:
    """Return the first tensor, in the order of both mappings, whose bits differ or which one of them lacks, in words;
    empty if there is none.
    """
    names = list(one)
    for name, before in zip(other, [None, *other]):  # what only the other has comes behind the same tensor as there
        if name not in one:
            names.insert(names.index(before) + 1 if before in names else 0, name)
    for name in names:
        if name not in one or name not in other:
            return f"{name} is missing in {'AB'[name in one]}"
        a, b = one[name], other[name]
        if a.shape != b.shape:
            return f"{name} has shapes {a.shape} and {b.shape}"
        if a.tobytes() != b.tobytes():
            differences = np.abs(a.astype(np.float64) - b)
            count, most = np.count_nonzero(differences != 0), np.nanmax(differences)
            return f"{name}: {count:,} of {a.size:,} numbers differ, the largest difference is {most:.3g}"
    return ""


class Bisection:
    """Two runs, and what is written of both.

    shared   number of steps after which both have the same state, by their digests: the newest such state
    end      number of steps after which something that is written differs; None if nothing does
    loss     number of the first step whose losses differ; None likewise
    """

    def __init__(self, runs: Sequence[Replay]) -> None:
        self.runs = runs
        chains = [run.chain(run.head) if run.head else [] for run in runs]
        one, other = ({entry["step"]: _digests(entry) for entry in chain if entry["files"]} for chain in chains)
        states = sorted(one.keys() & other.keys())
        unequal = next((step for step in states if one[step] != other[step]), None)
        losses = [run.losses for run in runs]
        self.steps = sorted(losses[0].keys() & losses[1].keys())
        self.loss = next((step for step in self.steps if losses[0][step] != losses[1][step]), None)
        ends = [end for end in (unequal, None if self.loss is None else self.loss + 1) if end is not None]
        self.states, self.end = states, min(ends, default=None)
        self.shared = max((step for step in states if step < (self.end or 0)), default=0)

    def described(self) -> str:
        """Return what is written, in words."""
        common = f"{len(self.steps):,} losses and {len(self.states):,} states that both runs have"
        if self.end is None:
            return f"{common} are equal"
        state = self.loss is None or self.loss >= self.end
        what = f"the state after {self.end:,} steps" if state else f"the loss of step {self.end:,}"
        return f"of {common}, {what} differs first; the state after {self.shared:,} steps is shared"

    def differences(self, scheduler: Scheduler) -> Iterator[str]:
        """Yield lines on the first difference."""
        end = self.end or 0
        for run in self.runs:
            job = run.tensors_of(max(end - 1, 0), scheduler).job
            compile_kernels(job.precision, job.uses)
        if difference := self._in_states(self.shared, scheduler, updated=False):
            yield from self._settings(self.shared, scheduler)
            yield f"first step: {self.shared + 1:,}, which begins with other tensors"
            yield f"first tensor: {difference}"
            return
        losses, faults = zip(*(self._replayed(run, name, scheduler) for run, name in zip(self.runs, "AB")))
        parted = next((step for step, loss in losses[0].items() if losses[1].get(step) != loss), None)
        if parted is None and not self._in_states(end, scheduler):
            yield "the replays of both runs agree"
            yield from (line for lines in faults for line in lines)
            return
        shared, end, width = self.shared, end if parted is None else parted + 1, 1
        while end - shared > 1:  # the states part in the step of the first loss that differs, or shortly before
            middle = max(end - width, (shared + end) // 2)
            if self._in_states(middle, scheduler):
                end, width = middle, 2 * width
            else:
                shared = middle
        yield from self._settings(shared, scheduler)
        yield f"first step: {end:,}"
        one, other = (tensors.arrays(tensors.names) for tensors in self._at(shared, scheduler))
        yield f"first tensor: {first_difference(one, other) or f'after the update, {self._in_states(end, scheduler)}'}"

    def _at(self, step: int, scheduler: Scheduler) -> list[StepTensors]:
        """Return the tensors of both runs at a step, from the shared state on."""
        both = [run.tensors_of(step, scheduler) for run in self.runs]
        for run, tensors in zip(self.runs, both):
            run.lead(tensors, self.shared)
        return both

    def _in_states(self, step: int, scheduler: Scheduler, *, updated: bool = True) -> str:
        """Return the first tensor that differs between the replayed states after some steps, as `first_difference`.

        updated   whether the order is that of the updates, or that of the parameters
        """
        both = self._at(step, scheduler)
        one, other = ({name: t.held[name] for name in (t.updates() if updated else t.job.state)} for t in both)
        return first_difference(one, other)

    def _settings(self, step: int, scheduler: Scheduler) -> Iterator[str]:
        """Yield lines on settings of a step that differ, and decide bits."""
        jobs = [run.tensors_of(step, scheduler).job for run in self.runs]
        one, other = (
            {
                f"{name}.{key}": value
                for name, part in parts.items()
                for key, value in asdict(part).items()
                if key not in PLACES
            }
            | {"seed": job.run.seed, "steps": job.steps, "tokens": job.tokens.digest[:DIGITS], "groups": job.groups}
            for job in jobs
            for parts in [{"model": job.config, "data": job.data, "optimizer": job.optimizer}]
        )
        different = [f"{name} {one[name]} and {other[name]}" for name in one if one[name] != other[name]]
        if different:
            yield f"settings that differ: {', '.join(different)}"

    def _replayed(self, run: Replay, name: str, scheduler: Scheduler) -> tuple[dict[int, float], list[str]]:
        """Return the losses of a run that is made again from the shared state, by step; and lines on the first step
        after which it is not as its replay.
        """
        losses, low, high, lines, end = dict[int, float](), self.shared, 0, list[str](), self.end or 0
        entries = run.leading_to(end, self.shared)
        with TemporaryDirectory(prefix="daskgpt-bisect-") as folder:
            for made in run.made_again(entries, run.first_parameters(entries), scheduler, Path(folder), end):
                losses |= zip(made.steps, made.losses)
                wrong = next((n for n in made.steps if run.losses.get(n) not in (None, losses.get(n))), None)
                if wrong is not None and not high:
                    high, other = wrong + 1, losses.get(wrong)
                    lines.append(f"{name}: its loss of step {high:,} is {run.losses[wrong]}, its replay's {other}")
                if made.folder and made.steps.stop == made.entry["step"]:
                    state = read_json(made.folder / STATE, "bisect", STATE)
                    if _digests(state) == _digests(made.entry):
                        low = low if high else made.steps.stop
                        continue
                    high = min(high or made.steps.stop, made.steps.stop)
                    lines.append(f"{name}: its state after {made.steps.stop:,} steps is not that of its replay")
                    lines.append(f"first tensor: {self._unlike(run, made, state, scheduler)}")
                    break
        if lines:
            lines.insert(0, f"first step: {'' if high == low + 1 else f'one of {low + 1:,} to '}{high:,}")
            if not any(line.startswith("first tensor") for line in lines):
                lines.append("first tensor: unknown, since no checkpoint follows at once (--save-every 1 --keep 100)")
        return losses, lines

    def _unlike(self, run: Replay, made: Made, state: Mapping[str, Any], scheduler: Scheduler) -> str:
        """Return the first tensor of a checkpoint that differs from its replay, in words."""
        tensors, both = run.tensors_of(made.steps.stop, scheduler), list[dict[str, np.ndarray]]()
        if not (stored := run.folder_of(made.entry)):
            return "unknown, since that checkpoint is deleted (--keep, --keep-every)"
        for folder, entry in ((stored, made.entry), (made.folder or stored, state)):
            checkpoint = read_checkpoint(folder, entry, tensors.job.moments)
            arrays = as_weights(checkpoint.model.parameters) | dict(checkpoint.moments)
            both.append({name: arrays[name] for name in tensors.updates()})
        return first_difference(*both)


def _digests(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of model and moments of an entry of a chain."""
    return {name: file["sha256"] for name, file in entry["files"].items()}


if __name__ == "__main__":
    run_command(main)
