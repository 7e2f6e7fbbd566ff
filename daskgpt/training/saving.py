"""Saves a run: when a checkpoint is due, how the state is copied between two steps, and the thread that writes it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.config.stopping import CanGoOn
from daskgpt.formats.stored_model import ReadLater, StoredModel
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import NO_BEST, Best, Checkpoint, point_best, prune, step_folder, write_checkpoint
from daskgpt.training.job import Job
from daskgpt.training.run_folder import FolderLost, RunFolder
from daskgpt.training.step import State

Arrays = Mapping[str, np.ndarray]  # of a state, by name
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
    waited   how long training has waited for it [s]
    """

    step: int
    best: Best
    thread: threading.Thread = field(init=False)
    waited: float = 0.0
    seconds: float = 0.0
    error: Exception | None = None


class Saver:
    """Saves the states of a run, one at a time.

    The local schedulers write over the state: training waits while it is copied in memory, or, where there is no room
    for a copy, until it is written. A cluster's state never changes, and is fetched while the next steps run.
    A checkpoint that cannot be written costs a line of output. Only the last one is an error of the run.
    """

    def __init__(
        self, job: Job, folder: RunFolder, scheduler: Scheduler, say: Callable[[str], None], newest: int, best: Best
    ) -> None:
        """newest   step of the checkpoint that the run was resumed from, 0 for a new run
        best     the best checkpoint of earlier processes
        """
        self.job, self.folder, self.scheduler, self.say = job, folder, scheduler, say
        self.saved, self.best, self.since = newest, best, time.monotonic()
        self.current: _Save | None = None
        self.room: dict[str, np.ndarray] = {}  # the memory of the copies
        self.warned = False
        self.metrics: dict[str, Any] = {}

    def next_fixed(self, done: int) -> int | None:
        """Return how many steps precede the next checkpoint that is due by the number of steps."""
        run = self.job.run
        ends = [(done // every + 1) * every for every in (run.save_every, run.keep_every) if every]
        return min(ends, default=None)

    def begin(self) -> None:
        """Point `best` to the best checkpoint: an earlier process may have been killed before it did."""
        self.best = self.best if self.job.run.keep_best else NO_BEST
        point_best(self.folder.path, self.best)

    def better(self, loss: float | None) -> bool:
        """Return whether a state of this validation loss, if it has one, becomes the best checkpoint."""
        save = self.current
        known = save.best if save and not save.error else self.best
        return bool(self.job.run.keep_best) and loss is not None and loss < known.loss

    def due(self, done: int, loss: float | None = None) -> bool:
        """Return whether a checkpoint is due after some steps.

        loss   validation loss, where it was measured

        A checkpoint that is due by time waits until the one before it is written. None is due after steps that are
        repeated because a worker was lost, unless their checkpoint was lost as well.
        """
        run, save = self.job.run, self.current
        if done <= (save.step if save and not save.error else self.saved):
            return False
        if self.better(loss):
            return True
        # Between two rounds, replicas have no common state: a checkpoint that was due there is due at their end.
        before = self.job.round_begin(done - 1)
        if any(every and done // every > before // every for every in (run.save_every, run.keep_every)):
            return True
        late = run.save_minutes and time.monotonic() - self.since >= 60 * run.save_minutes
        return bool(late) and not (save and save.thread.is_alive())

    def save(self, state: State, facts: Mapping[str, Any], loss: float | None = None, *, last: bool = False) -> None:
        """Save a state in the background, after an earlier save has ended.

        facts   see `Checkpoint`
        loss    validation loss, where it was measured
        last    whether the run ends here: the state is written without a copy, and waited for

        Errors  OSError where the last state cannot be written
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
        facts = {**facts, **({"best": asdict(best)} if best.step >= 0 else {})}
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
        """Return the metrics of a checkpoint that was written since the last call; empty where there was none."""
        self._finish()
        news, self.metrics = self.metrics, {}
        return news

    def _finish(self, *, last: bool = False) -> None:
        """Report a save that has ended, if there is one."""
        save = self.current
        if save is None or save.thread.is_alive():
            return
        self.current = None
        if isinstance(save.error, CanGoOn):
            raise save.error
        if save.error and last:
            rule, where = "the last checkpoint must be written", step_folder(self.folder.path, save.step)
            advice = f"Make room there and continue with --resume{f' from step {self.saved}' if self.saved else ''}."
            raise refusal(OSError, "train", rule, f"path={where} ({reason(save.error)})", advice) from save.error
        if save.error:
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
            if free is None or free >= SPARE * size:
                self.room = {name: np.empty_like(value) for name, value in values.items()}
            elif not self.warned:
                self.warned = True
                needs = f"{size / 1e9:.2f} GB for a copy are not free ({free / 1e9:.2f} GB are)"
                self.say(f"checkpoint training waits while one is written: {needs}")
        return bool(self.room)

    def _write(self, save: _Save, arrays: Arrays, facts: Mapping[str, Any], background: bool) -> None:
        start, job, folder = time.perf_counter(), self.job, self.folder

        def before_rename() -> None:
            folder.logs.sync()
            folder.require_held()

        try:
            if background and sys.platform == "linux":  # elsewhere it would be the priority of the whole process
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
            weights = ReadLater(tensors(job.config), lambda name: arrays[f"weight.{name}"])
            moments = ReadLater((n for n in arrays if not n.startswith("weight.")), arrays.__getitem__)
            model = StoredModel(job.config, weights, job.tokens.encoding_name, job.data.sequence_length)
            shapes = {name: tensor.shape for name, tensor in job.moments.items()}
            checkpoint = Checkpoint(save.step, model, moments, facts, shapes)
            try:
                folder.require_held()
                write_checkpoint(folder.path, checkpoint, before_rename)
            except (FolderLost, FileNotFoundError):
                if folder.is_held():
                    raise
                raise self._kept_elsewhere(checkpoint) from None
            self.saved = save.step
            if save.best != self.best:
                point_best(folder.path, save.best)
                self.best = save.best
            folder.require_held()
            prune(folder.path, job.run.keep, job.run.keep_every, self.best.step)
        except Exception as error:  # of any kind: it must not end the run, and `_finish` reports it
            save.error = error
        save.seconds = time.perf_counter() - start

    def _kept_elsewhere(self, checkpoint: Checkpoint) -> CanGoOn:
        """Write a checkpoint of a run that lost its folder into a new one; return the error that ends the run."""
        former, kept = self.folder.leave()
        self.best = NO_BEST
        write_checkpoint(kept, checkpoint)
        rule = "the run's folder must stay where it is while it trains"
        got = f"out={former} ({'another run is there' if former.exists() else 'it is gone'})"
        advice = f"The model after {checkpoint.step} steps is kept in {kept}: continue with --resume {kept}."
        return refusal(CanGoOn, "RunFolder", rule, got, advice)


def reason(error: Exception) -> str:
    """Return why a file was not written, in the system's words where there are any."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return str(text).splitlines()[0]
