"""The folder of a run: its configuration, its metrics, and its checkpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import locked, write_file, written
from daskgpt.formats.safetensors import BASE, digest_of_base, write_run_model
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import ReadLater, trained_tensors
from daskgpt.model.precision import values_of
from daskgpt.model.step import Arrays
from daskgpt.schedulers.opening import resume_flags
from daskgpt.schedulers.protocol import Scheduler, WorkerLost
from daskgpt.training import checkpoint
from daskgpt.training.engine import State
from daskgpt.training.job import Job, Say
from daskgpt.training.logs import CHAIN, LINK, METRICS, Chain, RecordFile, continued_metrics

CONFIG, LOCK = "config.toml", ".lock"
FILES = (CONFIG, METRICS, CHAIN, LOCK)


def new_folder() -> str:
    """Return a new folder below runs/, named by date and time, with a number if that name is taken."""
    name = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    numbered = (name.with_name(f"{name.name}-{number}") for number in count(2))
    return str(next(path for path in chain([name], numbered) if not path.exists()))


class RunFolder:
    """Writes a run. A new run writes nothing before `begin`; the folder of a resumed run is locked from the start.

    resumed   whether the folder holds a run that continues
    metrics   and `chain`: logs, open from `begin` on
    base      SHA-256 of the model that adapters adapt; empty if there are none

    Errors    FileExistsError if a new run's folder already holds one; ValueError if no folder can be made there;
              FileNotFoundError if there is no run to resume; RuntimeError if another process trains it
    """

    metrics: RecordFile
    chain: Chain

    def __init__(self, path: str, *, resumed: bool = False) -> None:
        self.path, self.resumed, self.base = Path(path), resumed, ""
        self.lock: BinaryIO | None = None
        self.open_files = ExitStack()
        # Last: closing the metrics may write records that wait, and another process could continue the run by then.
        self.open_files.callback(lambda: self.lock and self.lock.close())
        with written(path, "RunFolder"):  # its name may be too long
            present = [(self.path / name).exists() for name in (CONFIG, METRICS)]
            made = checkpoint.checkpoints(self.path)
        where, got = "RunFolder", {"out": self.path}
        folders = [str(self.path / name) for name in FILES if (self.path / name).is_dir()]
        rule, advice = "no folder may have the name of a run's file", "Rename it, or name another folder."
        require(not folders, where, rule, ", ".join(folders), advice)
        if resumed:
            rule, advice = "the folder must hold a run", "Check the path of --resume."
            require(bool(all(present) or made), where, rule, {"resume": self.path}, advice, FileNotFoundError)
            self._lock()
            with written(self.path / METRICS, where):
                RecordFile(self.path / METRICS).close()  # if it was lost: checkpoints have all but the metrics
            return
        if any(present) or made or os.path.lexists(self.path / BASE):
            raise self._taken()
        parent = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if os.path.lexists(p))
        what = "a link to nothing" if not parent.exists() else "a file"
        rule, advice = "the path must be a folder or new", f"{parent} is {what}: give another --out."
        require(parent.is_dir(), where, rule, got, advice)
        advice = f"Nothing can be written in {parent}: give another --out."
        require(os.access(parent, os.W_OK | os.X_OK), where, "the folder must be writable", got, advice)

    def begin(self, sections: Mapping[str, Any], entry: Mapping[str, Any], base: StoredModel | None = None) -> None:
        """Write the configuration and the model that adapters adapt, and open the metrics and the chain.

        entry    the state of the checkpoint that a resumed run continues from, or the beginning of a new one

        Errors   FileExistsError if another run has begun here in the meantime
        """
        if self.resumed:
            checkpoint.tidy(self.path, entry["step"])
            self.metrics = continued_metrics(self.path / METRICS, entry["step"])
        else:
            try:  # the file of metrics claims the folder: only one of two runs that start at once can create it
                with written(self.path, "RunFolder"):
                    self.path.mkdir(parents=True, exist_ok=True)
                    self.metrics = RecordFile(self.path / METRICS, new=True)
            except FileExistsError:
                raise self._taken() from None
        self.open_files.callback(self.metrics.close)
        try:
            if not self.resumed:
                self._lock()
            self.configure(sections)
            if base:
                path = self.path / BASE
                self.base = digest_of_base(path) if self.resumed else write_run_model(path, base)
            self.chain = Chain(self.path / CHAIN, entry)
            self.open_files.callback(self.chain.file.close)
        except BaseException:
            self.close()
            if not self.resumed:  # without a configuration there is no run, and the folder is free
                for name in (*FILES, BASE) if self.lock else [METRICS]:  # another process may hold the lock
                    (self.path / name).unlink(missing_ok=True)
            raise

    def _lock(self) -> None:
        """Keep other processes from training this run until this one ends."""
        with written(self.path / LOCK, "RunFolder"):
            self.lock = locked(self.path / LOCK, "RunFolder", "no other process must train this run")

    def require_held(self) -> None:
        """Check that the folder at this path still is this run's: its lock file is the one that is locked here.

        Errors   RuntimeError if it was moved, removed or taken by another run
        """
        try:
            held = self.lock is None or os.path.samestat(os.fstat(self.lock.fileno()), os.lstat(self.path / LOCK))
        except OSError:
            held = False
        rule, advice = "the run's folder must stay where it is while it trains", "Move it back."
        require(held, "RunFolder", rule, {"out": self.path}, advice, RuntimeError)

    def configure(self, sections: Mapping[str, Any]) -> None:
        """Write the resolved configuration: a TOML table for each part.

        Errors   RuntimeError if the folder is no longer this run's
        """
        self.require_held()
        lines = list[str]()
        for title, values in sections.items():
            lines += [f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
        content = "\n".join(lines).encode(errors="backslashreplace")  # names of files may have any bytes
        write_file(self.path / CONFIG, content, "RunFolder")

    def log(self, record: Mapping[str, Any], say: Say) -> None:
        """Append the metrics of a step. Without room they wait and are written later, and a line says so once."""
        waited = self.metrics.waits
        try:
            self.metrics.write(record)
        except OSError as error:
            if not waited:
                say(f"metrics    {METRICS} is to be written later, and training goes on: {error}")

    def close(self) -> None:
        """Close the files and unlock the folder."""
        self.open_files.close()

    def _taken(self) -> FileExistsError:
        rule, got = "the folder must not hold a run already", {"out": self.path}
        return refusal(FileExistsError, "RunFolder", rule, got, "Give another --out.")


def _toml(value: Any) -> str:
    """Return a number, truth value or text as TOML, which differs from JSON in one character that must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def fetched_arrays(scheduler: Scheduler, state: State) -> Arrays:
    """Return the arrays of a state by name. Those that a cluster keeps are fetched a pack at a time when they are read.

    Errors   schedulers.protocol.WorkerLost, when an array is read that is lost
    """
    places = {name: place for place, (names, _) in enumerate(zip(state.layout.packs, state.packs)) for name in names}

    @lru_cache(maxsize=2)  # the model and the moments are written side by side
    def pack(place: int) -> dict[str, Any]:
        (values,) = scheduler.fetch([state.packs[place]])
        return dict(zip(state.layout.packs[place], values))

    return ReadLater(places, lambda name: values_of(pack(places[name])[name]))


@dataclass(eq=False, repr=False)
class Saver:
    """Saves the states of a run; training waits meanwhile.

    A checkpoint that cannot be written costs a line of output. Only the last one is an error of the run.

    losses  of all steps so far: in the beginning, of those before the newest checkpoint
    news    gets the metrics of each checkpoint
    saved   step of the newest checkpoint, 0 if there is none
    best    the best checkpoint so far
    """

    job: Job
    folder: RunFolder
    scheduler: Scheduler
    say: Say
    losses: Sequence[float]
    news: dict[str, Any]

    def __post_init__(self) -> None:
        self.saved, self.best, self.since = len(self.losses), checkpoint.Best(), time.monotonic()

    def better(self, loss: float | None) -> bool:
        """Return whether a state of this validation loss, if it has one, becomes the best checkpoint."""
        return bool(self.job.run.keep_best) and loss is not None and loss < self.best.loss

    def configure(self, sections: Mapping[str, Any]) -> None:
        """Write the configuration; where that fails, a line says so."""
        try:
            self.folder.configure(sections)
        except OSError as error:
            self.say(f"settings   {CONFIG} is not written again, and training goes on: {error}")

    def due(self, done: int, loss: float | None = None) -> bool:
        """Return whether a checkpoint is due after some steps.

        loss   validation loss, if it was measured

        None is due after steps that are repeated because a worker was lost, unless their checkpoint was lost as well.
        """
        run = self.job.run
        if done <= self.saved:
            return False
        late = run.save_minutes and time.monotonic() - self.since >= 60 * run.save_minutes
        return bool(late) or self.better(loss) or bool(run.save_every and done % run.save_every == 0)

    def save(self, state: State, facts: Mapping[str, Any], loss: float | None = None, *, last: bool = False) -> None:
        """Save a state.

        facts   see `write_checkpoint`
        loss    validation loss, if it was measured
        last    whether the run ends here

        Errors  OSError if the last state cannot be written, WorkerLost if a part of it is lost
        """
        if last and self.saved == state.step:
            return
        start, path, run = time.perf_counter(), self.folder.path, self.job.run
        self.since = time.monotonic()
        best = checkpoint.Best(state.step, loss) if loss is not None and self.better(loss) else self.best
        link = {LINK: self.folder.chain.link(state.step, self.losses)}
        try:
            self._write(state, {**facts, **link, **({"best": asdict(best)} if best.step >= 0 else {})})
        except WorkerLost:
            raise
        except (OSError, RuntimeError, ValueError) as error:  # the last where something else has taken its name
            return self._failed(state.step, error, last=last)
        former, self.saved, self.best = self.best, state.step, best
        try:
            checkpoint.point(path / checkpoint.LATEST, checkpoint.step_folder(path, state.step).name)
            if best != former:
                best.point(path)
            checkpoint.prune(path, run.keep, best.step)
        except OSError as error:
            self.say(f"checkpoint step {state.step} is saved, but latest, best or older ones are not updated: {error}")
        self.news |= {"checkpoint_step": state.step, "checkpoint_s": round(time.perf_counter() - start, 3)}

    def begin(self, sections: Mapping[str, Any], entry: Mapping[str, Any], parameters: Arrays) -> None:
        """Begin the run's folder, see `RunFolder.begin`; parameters: those that the run begins with."""
        job, base = self.job, None
        if job.config.lora:
            size, encoding = replace(job.config, lora=0), job.tokens.encoding_name
            base = StoredModel(size, parameters, encoding, job.data.sequence_length)
        self.folder.begin(sections, entry, base)
        if job.run.keep_best:
            self.best = checkpoint.Best.of(self.folder.path, entry)
        self.best.point(self.folder.path)  # an earlier process may have been killed before it did

    def _write(self, state: State, facts: Mapping[str, Any]) -> None:
        job, arrays = self.job, fetched_arrays(self.scheduler, state)
        weights = ReadLater(trained_tensors(job.config), lambda name: arrays[f"weight.{name}"])
        text = job.tokens.encoding_name, job.data.sequence_length
        model = StoredModel(job.config, weights, *text, base=self.folder.base)
        shapes = {name: tensor.shape for name, tensor in job.moments.items()}
        self.folder.require_held()
        self.folder.metrics.sync()  # first: a run continues behind the metrics of its checkpoint
        checkpoint.write_checkpoint(self.folder.path, state.step, model, arrays, shapes, facts, self.folder.chain.add)

    def _failed(self, step: int, error: Exception, *, last: bool) -> None:
        """Report that a checkpoint is not written. Errors   OSError if it is the last one of the run"""
        if last:
            flags = resume_flags(self.folder.path, self.job.dataflow.scheduler)
            continued = f"continue with {flags} from step {self.saved}" if self.saved else "start again"
            raise OSError(f"{error} It was the last checkpoint of the run: {continued}.") from error
        stays = f", step {self.saved} stays" if self.saved else ""
        self.say(f"checkpoint step {step} is not saved{stays}, and training goes on: {error}")
