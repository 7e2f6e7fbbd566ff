"""Replays of runs: steps between checkpoints made again, and any tensor of one step.

The bits of a run follow from its configuration and data, whatever computes them. So a replay begins at a checkpoint,
or at the first parameters, and the normal trainer leads it to any later step under any dials. `daskgpt audit` compares
what it leads to, and `daskgpt rewind` shows a tensor of a step.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import dask.array as da
import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import digest_of
from daskgpt.config.run import DataflowConfig, RunConfig
from daskgpt.config.settings import Checked, setting
from daskgpt.data.dataset import BatchLoader
from daskgpt.formats.models import open_model_file
from daskgpt.formats.safetensors import BASE
from daskgpt.formats.stored_model import read_json
from daskgpt.graph.calls import Origin
from daskgpt.graph.sum_order import Groups
from daskgpt.kernels.dropout import streams
from daskgpt.model.layers import GATHER, SPLIT, Layer
from daskgpt.model.parameters import RandomParameters, digest, tensors
from daskgpt.model.precision import Precision
from daskgpt.model.step import Arrays, as_weights, gradients_of, input_leaves, input_values, state_leaves, weights_in
from daskgpt.model.tape import Tape
from daskgpt.model.transformer import mean_loss
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.checkpoint import STATE, DamagedCheckpoint, checked_state, checkpoints, read_checkpoint
from daskgpt.training.engine import State
from daskgpt.training.inference import compile_outputs
from daskgpt.training.job import Job, require_memory
from daskgpt.training.logs import CHAIN, LINK, METRICS, Entry, is_entry, metrics_lines, read_chain
from daskgpt.training.metrics import Diverged
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.start import (
    SEEDED,
    Start,
    WarmStart,
    arithmetic,
    configurations,
    data_of_run,
    open_dataset,
    require_allowed_rows,
    stored_settings,
    with_adapters,
)
from daskgpt.training.trainer import Observers, run_job

NEAREST = 5  # names that the message about an unknown one proposes


class PlacesConfig(Checked):
    """Places of what a run was made from."""

    data: str = setting("", "where the run's data are now, if not where they were")
    init: str = setting("", "where the model that the run began with is now, if not where it was")


class Made(NamedTuple):
    """Steps that were made again.

    entry    of the chain that they lead to, whose settings they have
    steps    their numbers
    losses   fewer than steps if a number was not finite
    folder   of the checkpoint after them; None if a number was not finite
    state    the entries of its state.json
    """

    entry: Entry
    steps: range
    losses: list[float]
    folder: Path | None
    state: Entry


class Replay:
    """A run whose steps can be made again.

    faults    what is not as it was written, in words
    entries   of the chain, and of checkpoints that it lacks, by their digests
    head      the digest of the last entry
    folders   good checkpoints by the digests of their entries
    losses    of the metrics, by step; None for a number that was not finite
    """

    def __init__(self, where: str, run: Path, dials: Mapping[str, Any], data: str = "", init: str = "") -> None:
        """where   the command, for errors
        dials   fields of `DataflowConfig`: how steps are computed
        data    where the data are, if not where the last entry says
        init    where the model that the run began with is, likewise

        Errors  FileNotFoundError if there is no run with a chain
        """
        for name in (CHAIN, METRICS):
            rule, advice = f"the folder must hold a run with {CHAIN} and {METRICS}", "Check the path."
            require((run / name).is_file(), where, rule, {"run": run}, advice, FileNotFoundError)
        self.where, self.run, self.dials, self.faults = where, run, dials, list[str]()
        self.open_dataset = lru_cache(maxsize=1)(open_dataset)
        lines = [entry for _, entry in read_chain(run / CHAIN)]
        self.faults += [f"{CHAIN}: line {n} is not as it was written" for n, entry in enumerate(lines, 1) if not entry]
        self.entries = {digest_of(entry): entry for entry in lines if entry}
        self.head = next(reversed(self.entries), "")
        settings = self.entries[self.head]["configuration"] if self.head else {}
        self.data = data or settings.get("data", {}).get("data", "")
        self.init = init or settings.get("run", {}).get("init", "")
        self.folders = dict(self._checkpoints())
        try:
            for folder in list(self.folders.values())[:1]:
                open_model_file(folder)  # makes a learned vocabulary known
        except FileNotFoundError as error:  # the model that the adapters of all checkpoints adapt
            self.faults.append(str(error))
            self.folders = {}
        records = metrics_lines(run / METRICS, sys.maxsize)
        self.losses = {record["step"]: record.get("loss") for record, _ in records}

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

    def before(self, entry: Entry) -> Entry | None:
        """Return the entry that one follows; None if it is missing, or for the beginning."""
        before = self.entries.get(str(entry.get(LINK, {}).get("previous")))
        return before if before and before["step"] < entry["step"] else None

    def chain(self, link: str) -> list[Entry]:
        """Return the entries that lead to one, which is the last of them."""
        entries = [self.entries[link]]
        while before := self.before(entries[0]):
            entries.insert(0, before)
        return entries

    def folder_of(self, entry: Entry) -> Path | None:
        """Return the checkpoint of an entry, if it exists."""
        return self.folders.get(digest_of(entry))

    def from_checkpoint(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return entries from the last one on, before the end, that has a checkpoint; all of them if none has."""
        there = (number for number, entry in enumerate(entries[:-1]) if self.folder_of(entry))
        return list(entries[max(there, default=0) :])

    def leading_to(self, step: int) -> list[Entry]:
        """Return the entries that lead to the state before a step, from the newest checkpoint on. The last one stands
        for that state; its settings are those of the step.

        step     counted from 0; at most the number of steps of the run, whose state is the last one

        Errors   ValueError for a step beyond the run
        """
        chain = self.chain(self.head) if self.head else []
        most = chain[-1]["configuration"]["run"]["steps"] if chain else -1
        rule, advice = f"the step must be one of 1 to {most + 1:,}, the last of which is to come", "Change --step."
        require(0 <= step <= most, self.where, rule, {"step": step + 1}, advice)
        before = [entry for entry in chain if entry["step"] <= step]
        # A killed run has made steps after its last checkpoint.
        following = chain[len(before)] if len(before) < len(chain) else chain[-1]
        return self.from_checkpoint([*before, {**following, "step": step}])

    def job(self, entry: Entry) -> Job:
        """Return the job of the steps before an entry: those of the process that wrote it, computed here.

        Errors   ValueError where the data, or the arithmetic of this machine, are not the run's
        """
        where = self.where
        c = configurations(where, stored_settings(where, entry))
        dataflow = DataflowConfig(**{"precision": c["dataflow"].precision} | dict(self.dials))
        data = replace(c["data"], data=self.data)
        require_allowed_rows(entry, where)
        dataset = data_of_run(where, data, entry, self.open_dataset)
        # The learning rate depends on the number of all steps; those after the entry are not made.
        steps = {"steps": c["run"].steps, "save_every": entry["step"]}
        run = RunConfig(**steps, validate_every=0, validation_batches=1, seed=c["run"].seed, keep_best=0)
        job = Job(c["model"], data, c["optimizer"], dataflow, run, dataset)
        then, here = (
            f"{facts.get('precision')} by {facts.get('unit')}" for facts in (entry["arithmetic"], arithmetic(job))
        )
        rule, advice = "this machine must compute with the run's arithmetic", "Do it where that is the same."
        require(then == here, where, rule, {"run": f"{self.run} ({then})", "here": here}, advice)
        require_memory(job)
        return job

    def origin(self, entries: Sequence[Entry]) -> tuple[Arrays, str]:
        """Return the parameters that a replay of entries begins with, none for one that begins at a checkpoint; why
        they are not known, if so.
        """
        first = entries[0]
        if len(entries) > 1 and self.folder_of(first):
            return {}, ""
        if first["step"] or "parameters" not in first:
            return {}, f"the chain is broken before the entry of step {first['step']:,}"
        job, wanted = self.job(entries[-1]), first["parameters"]
        if wanted == SEEDED:
            return RandomParameters(job.config, job.run.seed), ""
        for init in (str(self.run / BASE), self.init):
            with suppress(OSError, ValueError):
                parameters = with_adapters(job, WarmStart(init).model.loaded().parameters)
                if digest(parameters) == wanted:
                    return parameters, ""
        if self.init:
            return {}, f"the model that the run began with is not at {self.init}: name its place by --init"
        return {}, "a program gave its parameters"

    def made_again(
        self, entries: Sequence[Entry], parameters: Arrays, scheduler: Scheduler, folder: Path
    ) -> Iterator[Made]:
        """Make the steps between entries again, and yield those to each entry.

        entries      the first one is where they begin: at its checkpoint, or with the given parameters
        folder       that checkpoints are written to; each is deleted when the next one is there
        """
        at, state = self.folder_of(entries[0]), entries[0]
        for entry in entries[1:]:
            steps = range(state["step"], entry["step"])
            if not steps:  # the entry stands for the state before a step, which is that of a checkpoint
                return
            job, moments = self.job(entry), None
            if at:
                parameters, moments = read_checkpoint(at, job.moments)
                if at.is_relative_to(folder):
                    shutil.rmtree(at)
            out = RunFolder(str(folder / f"to-{steps.stop}"))
            start = Start(out, parameters, moments, [nan] * steps.start, entry=state)
            losses, at = _made(job, scheduler, start, steps.stop)
            state = read_json(at / STATE, self.where, STATE) if at else {}
            yield Made(entry, steps, losses, at, state)
            if at is None:
                return

    def tensors_of(self, step: int, scheduler: Scheduler) -> StepTensors:
        """Return the tensors of a step, counted from 0, which have no values until they `begin` with its state.

        Errors   as of `leading_to` and `job`
        """
        return StepTensors(self.where, self.job(self.leading_to(step)[-1]), scheduler, step)

    def state_before(self, step: int, scheduler: Scheduler) -> dict[str, np.ndarray]:
        """Compute the state before a step, counted from 0, from the newest checkpoint on; return it by name.

        Errors   as of `leading_to` and `job`; ValueError if there is nothing to begin with, or a number is not finite
                 on the way
        """
        entries = self.leading_to(step)
        parameters, unknown = self.origin(entries)
        there = ", ".join(path.name for path in checkpoints(self.run)) or "none"
        rule, advice = "a good checkpoint must be before the step", f"Give a step after one of them: {unknown}."
        require(not unknown, self.where, rule, {"run": self.run, "checkpoints": there}, advice)
        at, moments_of_run = self.folder_of(entries[0]), self.job(entries[-1]).moments
        with TemporaryDirectory(prefix=f"daskgpt-{self.where}-") as folder:
            for made in self.made_again(entries, parameters, scheduler, Path(folder)):
                at = made.folder
                rule, got = "every number must be finite until the step", {"step": step + 1}
                advice = f"Give --step {made.steps.start + len(made.losses)}, say."
                require(at is not None, self.where, rule, got, advice)
            if at:
                parameters, moments = read_checkpoint(at, moments_of_run)
            else:
                moments = {name: np.zeros(tensor.shape, np.float32) for name, tensor in moments_of_run.items()}
            return as_weights(parameters) | moments


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


class NamedTape(Tape):
    """A tape that names the arrays of a step as timelines name calls.

    named     arrays in the order of computation, by the name of the call and that of its result:
              `attention.forward-h.3.attn.y`; gradients are d and the argument: `linear.backward-h.3.mlp.c_fc.dweight`
    aliases   shorter names: without layer and pass (of several such arrays the last one), and those of calls alone
    """

    def __init__(self, precision: Precision, groups: Groups) -> None:
        super().__init__(precision, groups)
        self.named, self.aliases = dict[str, da.Array](), dict[str, str]()

    def __call__(self, where: str, layer: Layer, *arguments: da.Array, **options: Any) -> da.Array:
        y = super().__call__(where, layer, *arguments, **options)
        for name in layer.outputs.split()[::-1]:
            self._name(Origin(layer.name, "forward", where), name, self.records[-1].arrays[name])
        return y

    def _apply(self, origin: Origin, *arguments: Any, **options: Any) -> tuple[da.Array, ...]:
        results = super()._apply(origin, *arguments, **options)
        if origin.phase == "backward" and not origin.again:
            self._name(origin, f"d{origin.argument}", results[0])
        return results

    def _name(self, origin: Origin, name: str, array: da.Array) -> None:
        if origin.layer in (GATHER.name, SPLIT.name):  # they only move what others have computed, by the chunks
            return
        full = f"{origin.kind}-{origin.where}.{name}"
        self.named[full] = array
        self.aliases |= {f"{origin.where}.{name}": full, f"{origin.kind}-{origin.place}": full}


class StepTensors:
    """The tensors of a step, which are computed when they are asked for: inputs, weights and moments before the step,
    activations, and gradients before they are clipped.

    names   of all of them in the order of computation; `NamedTape` says how activations and their gradients are named,
            the others are `tokens`, `targets`, `weight.NAME`, `MOMENT.NAME`
    held    inputs and state by name; the state once it has begun
    """

    def __init__(self, where: str, job: Job, scheduler: Scheduler, step: int) -> None:
        """where   the command, for errors
        step    counted from 0
        """
        self.where, self.job, self.scheduler, self.step = where, job, scheduler, step
        data = BatchLoader(job.tokens, *job.batch_shape, job.run.seed, job.order).make(step=step)
        random = streams(job.run.seed, step, job.data.sequences) if job.optimizer.dropout else None
        self.inputs = input_values(*data, streams=random)
        self.held: dict[str, np.ndarray] = {"tokens": data[0], "targets": data[1]}
        threads, micro_shape = scheduler.threads, job.micro_shape
        chunk = ChunkChoice(job.config, micro_shape, job.dataflow, threads, job.optimizer.dropout).first
        self.tape = tape = NamedTape(job.precision, Groups(job.groups))
        self.leaves = input_leaves(tape, job.batch_shape, chunk)
        self.weights, weights = state_leaves(tape, job.config, job.precision)
        loss = mean_loss(tape, job.config, weights, self.leaves, job.optimizer.dropout)
        gradients = gradients_of(tape, job.config, weights, loss)
        full_names = {array.name: full for full, array in tape.named.items()}
        shapes = {name: array.shape for name, array in self.held.items()}
        in_state = as_weights(tensors(job.config)) | job.moments
        shapes |= {name: tensor.shape for name, tensor in in_state.items()}
        self.shapes = shapes | {name: array.shape for name, array in tape.named.items()}
        self.names = list(self.shapes)
        self.aliases = {name: f"weight.{name}" for name in weights} | tape.aliases
        self.aliases |= {f"gradient.{name}": full_names[array.name] for name, array in gradients.items()}

    def begin(self, state: Arrays) -> None:
        """Set the state before the step, by the names of a state."""
        self.held |= state
        self.state = State.of_weights(self.job.config, weights_in(state), self.job.precision)

    def resolve(self, name: str) -> str:
        """Return the name among `names` that a name stands for.

        Errors   ValueError for an unknown one, with the nearest names
        """
        full = self.aliases.get(name, name)
        if full not in self.shapes:
            close = get_close_matches(name, [*self.aliases, *self.names], NEAREST, cutoff=0.0)
            rule, advice = "the tensor must be one of the step's", f"The nearest names: {', '.join(close)}."
            raise refusal(ValueError, self.where, rule, {"tensor": name}, advice)
        return full

    def arrays(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return some tensors as whole arrays, which are computed together. Errors   as of `resolve`"""
        full_names = {name: self.resolve(name) for name in names}
        outputs = {full: self.tape.named[full] for full in full_names.values() if full in self.tape.named}
        arrays = dict(self.held)
        if outputs:
            compiled = compile_outputs(self.tape, self.leaves, outputs, self.weights, self.state.layout)
            (computed,), _ = self.scheduler.outputs(compiled, [self.inputs], self.state.packs)
            arrays |= computed
        return {name: arrays[full] for name, full in full_names.items()}
