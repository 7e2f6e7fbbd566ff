"""Find the first step, and the first tensor in it, in which two runs differ.

First what is written is compared: losses, and the digests of models and moments at steps where both runs have them.
Then both runs are made again from the last state that they share, each with its own settings and data:

  their replays differ   Settings or data do, or what this version makes of them: the first step whose results differ
                         is searched, and in it the first tensor in the order of computation, as `daskgpt rewind` names
                         them. `after` means the state after the update.
  their replays agree    One run is not what its settings give, because of a fault, another version or another machine.
                         The first of its losses, and of its checkpoints, that differ from the replay are named, and
                         the first tensor in that checkpoint.

Instead of runs, two models in any format that daskgpt reads are compared, setting by setting and tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, given_flags, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.audit import Audit, Verdict
from daskgpt.training.chain import CHAIN
from daskgpt.training.checkpoint import load
from daskgpt.training.job import compile_kernels
from daskgpt.training.replay import PlacesConfig, StepTensors, state_in
from daskgpt.training.start import PLACES

EPILOG = "Exit codes: 0 = no difference; 1 = a difference is named; 2 = the runs cannot be compared here."
DIGITS = 12  # of a SHA-256


def main(arguments: list[str]) -> int:
    """Compare, and print what differs."""
    flags = Parser(prog="daskgpt.bisect", description=__doc__, epilog=EPILOG)
    for name in ("one", "other"):
        flags.add_argument(name, metavar=f"RUN_{'AB'[name == 'other']}", type=Path, help="run folder, or a model")
    values, places, dataflow = flags.read(arguments, PlacesConfig, DataflowConfig)
    require_scheduler(dataflow.scheduler)
    paths = values.one, values.other
    if not all((path / CHAIN).is_file() for path in paths):
        (one, ours), (other, theirs) = map(load, paths)
        lines = differing(asdict(one.shortest()), asdict(other.shortest())), first_difference(ours, theirs)
        print("\n".join(filter(None, lines)) or "the models are equal")
        return int(any(lines))
    dials = given_flags(DataflowConfig, values)
    bisection = Bisection([Audit(path, dials, places.data, places.init, "bisect") for path in paths])
    print(f"written: {bisection.described()}", flush=True)
    if bisection.end is None:
        return 0
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        for line in bisection.differences(scheduler):
            print(line, flush=True)
    return 1


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
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name} is {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        a, b, bits = np.ascontiguousarray(a), np.ascontiguousarray(b), f"u{a.itemsize}"
        if (differ := a.view(bits) != b.view(bits)).any():  # 0 and -0 differ, and equal NaNs do not
            count, most = differ.sum(), np.fmax.reduce(np.abs(a[differ].astype(np.float64) - b[differ]))
            return f"{name}: {count:,} of {a.size:,} numbers differ, the largest difference is {most:.3g}"
    return ""


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the settings that differ, in words; empty if there are none."""
    different = [f"{name} {one[name]} and {other[name]}" for name in one if one[name] != other[name]]
    return f"settings that differ: {', '.join(different)}" if different else ""


class Bisection:
    """Two runs, and what is written of both.

    shared   number of steps after which both have the same state, by their digests: the newest such state
    end      number of steps after which something that is written differs; None if nothing does
    loss     number of the first step whose losses differ; None likewise
    """

    def __init__(self, runs: Sequence[Audit]) -> None:
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
        rule, advice = "the runs must have a loss or a state in common", "Name runs that have made the same steps."
        require(bool(self.steps or states), "bisect", rule, "none", advice)

    def described(self) -> str:
        """Return what is written, in words."""
        losses = number_of(len(self.steps), "loss", "losses")
        common = f"{losses} and {number_of(len(self.states), 'state')} that both runs have"
        if self.end is None:
            return f"{common}, all equal"
        state = self.loss is None or self.loss >= self.end
        what = f"the state after {number_of(self.end, 'step')}" if state else f"the loss of step {self.end:,}"
        return f"of {common}, {what} differs first; the state after {number_of(self.shared, 'step')} is shared"

    def differences(self, scheduler: Scheduler) -> Iterator[str]:
        """Yield lines on the first difference."""
        self.scheduler, end, shared = scheduler, self.end or 0, self.shared
        for run in self.runs:
            job = run.job_of(end)
            compile_kernels(job.precision, job.uses)
        if difference := self._in_states(shared, updated=False):
            yield from self._settings(shared)
            yield f"first step: {shared + 1:,}, which begins with other tensors\nfirst tensor: {difference}"
            return
        verdicts = [self._verdict(run) for run in self.runs]
        losses = [run.losses | {n: loss for n, _, loss in v.losses} for run, v in zip(self.runs, verdicts)]
        parted = next((step for step in range(shared, end) if losses[0].get(step) != losses[1].get(step)), None)
        if parted is None and not self._in_states(end):
            yield "the replays of both runs agree"
            for run, name, verdict in zip(self.runs, "AB", verdicts):
                yield from self._fault(run, name, verdict) if verdict.differs else ()
            return
        end, width = end if parted is None else parted + 1, 1
        while end - shared > 1:  # the states part in the step of the first loss that differs, or shortly before
            middle = max(end - width, (shared + end) // 2)
            if self._in_states(middle):
                end, width = middle, 2 * width
            else:
                shared = middle
        yield from self._settings(shared)
        one, other = (tensors.arrays(tensors.names) for tensors in self._at(shared))
        difference = first_difference(one, other) or f"after the update, {self._in_states(end)}"
        yield f"first step: {end:,}\nfirst tensor: {difference}"

    def _at(self, step: int) -> list[StepTensors]:
        """Return the tensors of both runs at a step, from the shared state on."""
        both = [run.tensors_of(step, self.scheduler) for run in self.runs]
        for run, tensors in zip(self.runs, both):
            run.lead(tensors, self.shared)
        return both

    def _in_states(self, step: int, *, updated: bool = True) -> str:
        """Return the first tensor that differs between the replayed states after some steps, as `first_difference`.

        updated   whether the order is that of the updates, or that of the parameters
        """
        one, other = ({n: t.held[n] for n in (t.updates() if updated else t.in_state)} for t in self._at(step))
        return first_difference(one, other)

    def _settings(self, step: int) -> Iterator[str]:
        """Yield a line on settings of a step that differ, and decide bits."""
        both = list[dict[str, Any]]()
        for job in (run.job_of(step) for run in self.runs):
            both.append({"seed": job.run.seed, "steps": job.steps, "tokens": job.tokens.digest[:DIGITS]})
            for name, part in {"model": job.config, "data": job.data, "optimizer": job.optimizer}.items():
                both[-1] |= {f"{name}.{key}": value for key, value in asdict(part).items() if key not in PLACES}
        if different := differing(*both):
            yield different

    def _verdict(self, run: Audit) -> Verdict:
        """Return how a run differs from its replay, from the shared state to the first difference of both runs."""
        stretch = run.leading_to(self.end or 0, self.shared)
        with TemporaryDirectory(prefix="daskgpt-bisect-") as folder:
            return run.compute(stretch, self.scheduler, Path(folder), self.end)

    def _fault(self, run: Audit, name: str, verdict: Verdict) -> Iterator[str]:
        """Yield lines on the first step after which a run is not as its replay."""
        states = [step for steps in verdict.states.values() for step in steps]
        first = min([*states, *(step + 1 for step, *_ in verdict.losses)])
        entries = {entry["step"]: entry for entry in run.chain(run.head)}
        before = max(self.shared, *(step for step in entries if step < first))
        yield f"{name} {verdict}"
        yield f"first step: {'' if first == before + 1 else f'one of {before + 1:,} to '}{first:,}"
        difference = "unknown, since there is no checkpoint after that step (--save-every 1 --keep 100)"
        if first in states and (folder := run.folder_of(entries[first])):
            tensors = run.tensors_of(first, self.scheduler)
            run.lead(tensors, self.shared)
            stored, names = state_in(folder, tensors.job), tensors.updates()
            difference = first_difference(*({name: held[name] for name in names} for held in (stored, tensors.held)))
        yield f"first tensor: {difference}"


def _digests(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of model and moments of an entry of a chain."""
    return {name: file["sha256"] for name, file in entry["files"].items()}


if __name__ == "__main__":
    run_command(main)
