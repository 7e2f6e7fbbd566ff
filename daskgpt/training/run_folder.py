"""The folder of a run: its configuration, its metrics, and the checkpoints that are written while it trains."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import advice_on, locked, replacing, written
from daskgpt.formats.stored_model import ReadLater, StoredModel
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.model.step import Arrays
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.chain import CHAIN, LINK, Chain
from daskgpt.training.checkpoint import (
    LATEST,
    Best,
    Checkpoint,
    checkpoints,
    point,
    prune,
    step_folder,
    tidy,
    write_checkpoint,
)
from daskgpt.training.engine import State
from daskgpt.training.job import Job, Say
from daskgpt.training.logs import METRICS, RecordFile, open_metrics

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

    Errors    FileExistsError if a new run's folder already holds one; ValueError if no folder can be made there;
              FileNotFoundError if there is no run to resume; RuntimeError if another process trains it
    """

    def __init__(self, path: str, *, resumed: bool = False) -> None:
        self.path, self.resumed = Path(path), resumed
        self.metrics: RecordFile | None = None
        self.chain: Chain | None = None
        self.lock: BinaryIO | None = None
        with written(path, "RunFolder"):  # its name may be too long
            present = [(self.path / name).exists() for name in (CONFIG, METRICS)]
        where, got = "RunFolder", {"out": self.path}
        if resumed:
            rule, advice = f"the folder must hold a run ({CONFIG} and {METRICS})", "Check the path of --resume."
            require(all(present), where, rule, {"resume": self.path}, advice, FileNotFoundError)
            self._lock()
            return
        if any(present) or checkpoints(self.path):
            raise self._taken()
        parent = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        rule, advice = "the path must be a folder or new", f"{parent} is a file: give another --out."
        require(parent.is_dir(), where, rule, got, advice)
        advice = f"Nothing can be written in {parent}: give another --out."
        require(os.access(parent, os.W_OK | os.X_OK), where, "the folder must be writable", got, advice)

    def begin(self, sections: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Write the configuration, and open the metrics and the chain.

        entry    the state of the checkpoint that a resumed run continues from, or the beginning of a new one

        Errors   FileExistsError if another run has begun here in the meantime
        """
        done = entry["step"] if self.resumed else None
        if done is not None:
            tidy(self.path, done)
        else:
            try:  # the file of metrics claims the folder: only one of two runs that start at once can create it
                with written(self.path, "RunFolder"):
                    self.path.mkdir(parents=True, exist_ok=True)
                    self.metrics = open_metrics(self.path, None)
            except FileExistsError:
                raise self._taken() from None
            self._lock()
        try:
            self.configure(sections)
            self.metrics = self.metrics or open_metrics(self.path, done)
            self.chain = Chain(self.path / CHAIN, entry)
        except BaseException:
            self.close()
            if not self.resumed:  # without a configuration there is no run, and the folder is free
                for name in FILES:
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
        with replacing(self.path / CONFIG, "RunFolder") as file:
            file.write("\n".join(lines).encode(errors="backslashreplace"))  # names of files may have any bytes

    def log(self, record: Mapping[str, Any], say: Say) -> None:
        """Append the metrics of a step. Without room they wait and are written later, and a line says so once."""
        assert self.metrics
        waited = self.metrics.waits
        try:
            self.metrics.write(record)
        except OSError as error:
            if not waited:
                say(f"metrics    {METRICS} is to be written later: {reason(error)}; training goes on")

    def sync(self) -> None:
        """Flush the metrics to the disk. Errors   OSError if there is no room"""
        assert self.metrics
        self.metrics.sync()

    def close(self) -> None:
        """Close the files and unlock the folder."""
        for file in (self.metrics, self.chain.file if self.chain else None, self.lock):
            if file is not None:
                file.close()

    def _taken(self) -> FileExistsError:
        rule, got = "the folder must not hold a run already", {"out": self.path}
        return refusal(FileExistsError, "RunFolder", rule, got, "Give another --out.")


def _toml(value: Any) -> str:
    """Return a number, truth value or text as TOML, which differs from JSON in one character that must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Niceness of the writing thread: steps use all cores, and it gets the time that they leave, and a hundredth of a core.
NICENESS = 19
SPARE = 1.1  # free memory that a copy of the state needs, as a multiple of its size


def fetched_arrays(scheduler: Scheduler, state: State) -> Arrays:
    """Return the arrays of a state that a cluster keeps, which are fetched a pack at a time when they are read.

    Errors   schedulers.failures.WorkerLost, when an array is read that is lost
    """
    places = {name: place for place, (names, _) in enumerate(zip(state.layout.packs, state.packs)) for name in names}

    @lru_cache(maxsize=2)  # the model and the moments are written side by side
    def pack(place: int) -> Arrays:
        (values,) = scheduler.fetch([state.packs[place]])
        return {name: values_of(value) for name, value in zip(state.layout.packs[place], values)}

    return ReadLater(places, lambda name: pack(places[name])[name])


@dataclass
class _Save:
    """A checkpoint that is being written.

    best     the run's best checkpoint once this one is written
    written  whether it is complete
    waited   how long training has waited for it [s]
    """

    step: int
    best: Best
    thread: threading.Thread = field(init=False)
    written: bool = False
    waited: float = 0.0
    seconds: float = 0.0
    error: Exception | None = None


class Saver:
    """Saves the states of a run, one at a time.

    The local schedulers write over the state: training waits while it is copied in memory or, without room for a copy,
    until it is written. A cluster's state never changes, and is fetched while the next steps run.
    A checkpoint that cannot be written costs a line of output. Only the last one is an error of the run.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        scheduler: Scheduler,
        say: Say,
        newest: int,
        best: Best,
        losses: Sequence[float],
    ) -> None:
        """newest   step of the checkpoint that the run was resumed from, 0 for a new run
        best     the best checkpoint of earlier processes
        losses   of all steps so far
        """
        self.job, self.folder, self.scheduler, self.say, self.losses = job, folder, scheduler, say, losses
        self.saved, self.best, self.since = newest, best, time.monotonic()
        self.current: _Save | None = None
        self.room: dict[str, np.ndarray] = {}  # the memory of the copies
        self.warned = False
        self.metrics: dict[str, Any] = {}

    @property
    def chain(self) -> Chain:
        """The chain of the run."""
        assert self.folder.chain
        return self.folder.chain

    def begin(self) -> None:
        """Point `best` to the best checkpoint: an earlier process may have been killed before it did."""
        self.best = self.best if self.job.run.keep_best else Best()
        self.best.point(self.folder.path)

    def better(self, loss: float | None) -> bool:
        """Return whether a state of this validation loss, if it has one, becomes the best checkpoint."""
        save = self.current
        best = save.best if save and not save.error else self.best
        return bool(self.job.run.keep_best) and loss is not None and loss < best.loss

    def due(self, done: int, loss: float | None = None) -> bool:
        """Return whether a checkpoint is due after some steps.

        loss   validation loss, if it was measured

        A checkpoint that is due by time waits until the one before it is written. None is due after steps that are
        repeated because a worker was lost, unless their checkpoint was lost as well.
        """
        run, save = self.job.run, self.current
        if done <= (save.step if save and not save.error else self.saved):
            return False
        if self.better(loss):
            return True
        if run.save_every and done % run.save_every == 0:
            return True
        late = run.save_minutes and time.monotonic() - self.since >= 60 * run.save_minutes
        return bool(late) and not (save and save.thread.is_alive())

    def save(self, state: State, facts: Mapping[str, Any], loss: float | None = None, *, last: bool = False) -> None:
        """Save a state in the background, after an earlier save has ended.

        facts   see `Checkpoint`
        loss    validation loss, if it was measured
        last    whether the run ends here: the state is written without a copy, and waited for

        Errors  OSError if the last state cannot be written
        """
        start = time.perf_counter()
        self.wait()
        self._finish()
        if last and self.saved == state.step:
            return
        self.since = time.monotonic()
        arrays, background = self._arrays(state, copied=not last)
        best = Best(state.step, loss) if loss is not None and self.better(loss) else self.best
        save = self.current = _Save(state.step, best)
        link = {LINK: self.chain.link(state.step, self.losses)}
        facts = {**facts, **link, **({"best": asdict(best)} if best.step >= 0 else {})}
        # A daemon, so that a process that ends does not wait for it: an unfinished checkpoint has a temporary name.
        arguments = (save, arrays, facts, background and not last)
        save.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        save.thread.start()
        if last or not background:
            save.thread.join()
        save.waited = time.perf_counter() - start
        if last:
            self._finish(last=True)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.current:
            self.current.thread.join()

    def news(self) -> dict[str, Any]:
        """Return the metrics of a checkpoint that was written since the last call; empty if there was none."""
        self._finish()
        news, self.metrics = self.metrics, {}
        return news

    def _finish(self, *, last: bool = False) -> None:
        """Report a save that has ended, if there is one."""
        save = self.current
        if save is None or save.thread.is_alive():
            return
        self.current = None
        if save.error and save.written:
            what = "is saved, but latest, best or older ones are not updated"
            self.say(f"checkpoint step {save.step} {what}: {reason(save.error)}")
        elif save.error and last:
            rule, where = "the last checkpoint must be written", step_folder(self.folder.path, save.step)
            continued = f"continue with --resume from step {self.saved}" if self.saved else "start again"
            advice = f"{advice_on(cause_of(save.error))} Then {continued}."
            raise refusal(OSError, "train", rule, f"path={where} ({reason(save.error)})", advice) from save.error
        elif save.error:
            stays = f", step {self.saved} stays" if self.saved else ""
            self.say(f"checkpoint step {save.step} is not saved: {reason(save.error)}; training goes on{stays}")
            return
        seconds, waited = round(save.seconds, 3), round(save.waited, 3)
        self.metrics = {"checkpoint_step": save.step, "checkpoint_s": seconds, "checkpoint_waited_s": waited}

    def _arrays(self, state: State, *, copied: bool) -> tuple[Arrays, bool]:
        """Return the arrays of a state, and whether steps may run while they are read."""
        if not self.scheduler.in_place:
            return fetched_arrays(self.scheduler, state), True
        values = {name: values_of(value) for name, value in state.layout.unpack(state.packs).items()}
        if not copied or not self._make_room(values):
            return values, False
        with ThreadPoolExecutor(self.scheduler.threads) as pool:
            list(pool.map(np.copyto, self.room.values(), (values[name] for name in self.room)))
        return self.room, True

    def _make_room(self, values: Arrays) -> bool:
        """Allocate memory for copies of a state once; return whether there is enough."""
        if not self.room:
            free, size = available_memory(), sum(value.nbytes for value in values.values())
            if free >= SPARE * size:
                self.room = {name: np.empty_like(value) for name, value in values.items()}
            elif not self.warned:
                self.warned = True
                needs = f"{size / 1e9:.2f} GB for a copy are not free ({free / 1e9:.2f} GB are)"
                self.say(f"checkpoint training waits while one is written: {needs}")
        return bool(self.room)

    def _write(self, save: _Save, arrays: Arrays, facts: Mapping[str, Any], background: bool) -> None:
        start, job, folder = time.perf_counter(), self.job, self.folder
        try:
            if background and sys.platform == "linux":  # elsewhere it would be the priority of the whole process
                thread = threading.get_native_id()
                with suppress(OSError):  # some containers forbid it
                    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
            weights = ReadLater(tensors(job.config), lambda name: arrays[f"weight.{name}"])
            model = StoredModel(job.config, weights, job.tokens.encoding_name, job.data.sequence_length)
            shapes = {name: tensor.shape for name, tensor in job.moments.items()}
            checkpoint = Checkpoint(save.step, model, arrays, shapes, facts)
            folder.require_held()
            folder.sync()  # first: a run continues behind the metrics of its checkpoint
            newest = write_checkpoint(folder.path, checkpoint, self.chain.add)
            save.written, self.saved, former, self.best = True, save.step, self.best, save.best
            point(folder.path / LATEST, newest.name)
            if former != self.best:
                self.best.point(folder.path)
            prune(folder.path, job.run.keep, self.best.step)
        except Exception as error:  # of any kind: it must not end the run, and `_finish` reports it
            save.error = error
        save.seconds = time.perf_counter() - start


def cause_of(error: Exception) -> Exception:
    """Return the system's error behind an error of writing, if there is one."""
    return error.__cause__ if isinstance(error.__cause__, OSError) else error


def reason(error: Exception) -> str:
    """Return the reason why a file was not written, in the system's words if there are any."""
    cause = cause_of(error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return str(text).splitlines()[0]
