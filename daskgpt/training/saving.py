"""When a run saves its state, and how: it is copied between two steps, and written while the next ones compute."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from daskgpt.config.errors import refusal
from daskgpt.config.stopping import CanGoOn
from daskgpt.formats.opened import ReadLater
from daskgpt.formats.run_model import StoredModel
from daskgpt.graph.nodes import Graph, Key, task
from daskgpt.graph.recording import GraphRun, Layout
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import values_of
from daskgpt.schedulers.machine import available_memory
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import NONE, Best, Checkpoint, point_best, prune, step_folder, write_checkpoint
from daskgpt.training.job import Job
from daskgpt.training.run_folder import FolderLost, RunFolder
from daskgpt.training.step import State

COPY_BYTES = 2**24  # that one task copies
# Niceness of the writer beside steps, which use all cores: it takes what they leave, and a hundredth of a core.
BESIDE = 19
SPARE = 1.1  # free memory for a copy, as a multiple of it


class FetchedState(Mapping[str, np.ndarray]):
    """The arrays of a state that a cluster keeps, by name: fetched a pack at a time, and held until another one is.

    Errors   schedulers.losses.LostResults where one is gone
    """

    def __init__(self, scheduler: Scheduler, layout: Layout, packs: Sequence[Any]) -> None:
        self.scheduler, self.packs = scheduler, list(zip(layout.packs, packs))
        self.place = {name: number for number, (names, _) in enumerate(self.packs) for name in names}
        self.latest: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.latest:
            self.latest = {}  # before there are others
            names, pack = self.packs[self.place[name]]
            (fetched,) = self.scheduler.fetch([pack])
            self.latest = {own: values_of(value) for own, value in zip(names, fetched)}
        return self.latest[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)


@dataclass
class _Save:
    """One save, on its way or done."""

    step: int
    best: Best  # as soon as it is written
    waited: float  # seconds that training has waited for it
    seconds: float = 0.0
    error: Exception | None = None


class Saver:
    """Saves the states of one run, one at a time.

    Under the local schedulers, which write over the state, training waits for a copy in memory, or where there is no
    room for one until all is written. A cluster's state never changes: it is fetched while the next steps compute.
    What goes wrong costs a checkpoint and a line, never the run.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        scheduler: Scheduler,
        say: Callable[[str], None],
        newest: int = 0,
        spared: frozenset[Path] = frozenset(),
        best: Best = NONE,
    ) -> None:
        """newest   the step of the checkpoint that is gone on from, 0 where there is none
        spared   damaged checkpoints, which are not deleted
        best     the best checkpoint of earlier processes
        """
        self.job, self.folder, self.scheduler, self.say, self.spared = job, folder, scheduler, say, spared
        self.since = time.monotonic()
        self.thread: threading.Thread | None = None
        self.current: _Save | None = None
        self.saved, self.best = newest, best
        self.told_of_memory = False
        self.room: dict[str, np.ndarray] = {}  # what the state is copied into, made once
        self.room_maker: threading.Thread | None = None
        self.metrics: dict[str, Any] = {}

    def next_fixed(self, done: int) -> int | None:
        """How many steps will have been made at the next checkpoint that the number of steps decides."""
        run = self.job.run
        ends = [(done // every + 1) * every for every in (run.save_every, run.keep_every) if every]
        return min(ends, default=None)

    def begin(self) -> None:
        """Let `best` mean what it should: a killed process may not have come to that, and the best one may be gone."""
        self.best = self.best if self.job.run.keep_best else NONE
        point_best(self.folder.path, self.best)

    def better(self, loss: float | None) -> bool:
        """Whether a state of this validation loss, None where nobody has measured it, is to be the best checkpoint."""
        save = self.current
        known = save.best if save and not save.error else self.best
        return bool(self.job.run.keep_best) and loss is not None and loss < known.loss

    def due(self, done: int, loss: float | None = None) -> bool:
        """Whether a checkpoint is due after so many steps. One by time waits until the one before is written.

        loss   on the held-out text, where it was measured

        None is of steps that are made again after a loss, unless the loss has cost it.
        """
        run = self.job.run
        if done <= (self.current.step if self.current and not self.current.error else self.saved):
            return False
        if self.better(loss):
            return True
        # Of replicas on their own there is no checkpoint: it waits until they meet.
        before = self.job.round_begin(done - 1)
        if any(every and done // every > before // every for every in (run.save_every, run.keep_every)):
            return True
        late = run.save_minutes and time.monotonic() - self.since >= 60 * run.save_minutes
        return bool(late) and not (self.thread and self.thread.is_alive())

    def prepare(self, state: State) -> None:
        """Before the first checkpoint, have room for a copy of the state made while steps run.

        Memory that is written to for the first time comes from the system page by page: that takes several times as
        long as the copy.
        """
        if self.room_maker or not self.scheduler.in_place or not self._will_save():
            return
        values = _values(state.layout.unpack(state.packs))
        free, size = available_memory(), sum(value.nbytes for value in values.values())
        if free is None or free >= SPARE * size:
            self.room_maker = threading.Thread(target=self._make_room, args=(values,), name="room", daemon=True)
            self.room_maker.start()
        elif not self.told_of_memory:
            self.told_of_memory = True
            self.say(
                f"checkpoint training waits while one is written: {size / 1e9:.2f} GB for a copy are not free "
                f"({free / 1e9:.2f} GB are)"
            )

    def _will_save(self) -> bool:
        """Whether there will be a checkpoint beside steps: of those by time the run must have made half of the way."""
        run, minutes = self.job.run, self.job.run.save_minutes
        ends = self.next_fixed(0), run.validate_every if run.keep_best else None
        by_steps = any(end and end < self.job.steps for end in ends)
        return by_steps or (bool(minutes) and time.monotonic() - self.since >= 30 * minutes)

    def _make_room(self, values: Mapping[str, np.ndarray]) -> None:
        _give_way()
        room = {name: np.empty_like(value) for name, value in values.items()}
        for array in room.values():
            array.fill(0)
        self.room = room

    def save(self, state: State, facts: Mapping[str, Any], loss: float | None = None, *, last: bool = False) -> None:
        """Begin to save a state; an earlier save is waited for.

        facts   see `Checkpoint`
        loss    on the held-out text, where it was measured
        last    whether nothing is computed meanwhile: then it is written from where it is, and waited for

        Errors  OSError where the last one cannot be written, with what stays
        """
        start = time.perf_counter()
        self.wait()
        self._ended()
        if last and self.saved == state.step:
            return
        self.since = time.monotonic()
        take, wait = self._taken(state, copied=not last)
        best = Best(state.step, loss) if loss is not None and self.better(loss) else self.best
        save = self.current = _Save(state.step, best, time.perf_counter() - start)
        # Nobody waits for a daemon as the process ends: what it has not finished is a leftover under its own name.
        arguments = (save, take, {**facts, **best.facts()}, wait or last)
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self.thread.start()
        if wait or last:
            self.thread.join()
            save.waited = time.perf_counter() - start
        if last:
            self._require_saved(save)

    def wait(self) -> None:
        """Wait until what is being saved is written."""
        if self.thread:
            self.thread.join()

    def news(self) -> dict[str, Any]:
        """Metrics of what was saved since this was last asked; empty where nothing was."""
        self._ended()
        news, self.metrics = self.metrics, {}
        return news

    def _ended(self) -> None:
        """Note what has become of a save that is no longer on its way."""
        save = self.current
        if save is None or self.thread is None or self.thread.is_alive():
            return
        self.current = None
        if isinstance(save.error, CanGoOn):
            raise save.error
        if save.error:
            stays = f", step {self.saved} stays" if self.saved else ""
            self.say(f"checkpoint step {save.step} is not saved: {reason(save.error)}; training goes on{stays}")
            return
        seconds, waited = round(save.seconds, 3), round(save.waited, 3)
        self.metrics = {"checkpoint_step": save.step, "checkpoint_s": seconds, "checkpoint_waited_s": waited}

    def _require_saved(self, save: _Save) -> None:
        if isinstance(save.error, CanGoOn):
            raise save.error
        if save.error:
            stays = f" from step {self.saved}" if self.saved else ""
            raise refusal(
                OSError,
                "train",
                "the last checkpoint must be written",
                f"path={step_folder(self.folder.path, save.step)} ({reason(save.error)})",
                f"Make room there and go on with --resume{stays}.",
            ) from save.error

    def _taken(self, state: State, *, copied: bool) -> tuple[Callable[[], Mapping[str, np.ndarray]], bool]:
        """What gives the arrays of a state, by name, and whether training must wait until they are written."""
        layout, packs, scheduler = state.layout, state.packs, self.scheduler
        if not scheduler.in_place:
            fetched = FetchedState(scheduler, layout, packs)  # now: the next step may change what is there
            return lambda: fetched, False
        values = _values(layout.unpack(packs))
        if copied and self.room_maker:
            self.room_maker.join()
        if copied and self.room:
            copy_in_tasks(scheduler, values, self.room)
            return lambda: self.room, False
        return lambda: values, True

    def _write(
        self, save: _Save, take: Callable[[], Mapping[str, np.ndarray]], facts: Mapping[str, Any], awaited: bool
    ) -> None:
        start, job = time.perf_counter(), self.job
        try:
            if not awaited:
                _give_way()
            values = take()
            weights = ReadLater(tensors(job.config), lambda name: values[f"weight.{name}"])
            moments = ReadLater((name for name in values if not name.startswith("weight.")), values.__getitem__)
            model = StoredModel(job.config, weights, job.tokens.encoding_name, job.data.sequence_length)
            checkpoint = Checkpoint(save.step, model, moments, facts)
            # What a cluster keeps is fetched to be written: less of it is here at a time then.
            here = self.scheduler.in_place
            written = self._written(checkpoint, here)
            self.saved, self.spared = save.step, self.spared - {written}
            if save.best != self.best:
                point_best(self.folder.path, save.best)
                self.best = save.best
            self.folder.require_held()
            prune(self.folder.path, job.run.keep, job.run.keep_every, self.best.step, self.spared)
        except Exception as error:  # of whatever kind: it must not end the run, and `news` tells it
            save.error = error
        save.seconds = time.perf_counter() - start

    def _written(self, checkpoint: Checkpoint, here: bool) -> Path:
        """The checkpoint's folder: in the run's, or in a new one beside where that is not this run's any more."""

        def last_look() -> None:
            self.folder.logs.sync()
            self.folder.require_held()

        try:
            self.folder.require_held()
            return write_checkpoint(self.folder.path, checkpoint, last_look, beside=here)
        except (FolderLost, FileNotFoundError):
            if self.folder.is_held():
                raise
            former, kept = self.folder.leave()
            self.best = NONE
            write_checkpoint(kept, checkpoint, beside=here)
            rule = "the run's folder must stay where it is while it trains"
            got = f"out={former} ({'another run is there' if former.exists() else 'it is gone'})"
            advice = f"The model after {checkpoint.step} steps is kept in {kept}: go on with --resume {kept}."
            raise refusal(CanGoOn, "RunFolder", rule, got, advice) from None


def reason(error: Exception) -> str:
    """Why a file was not written, in the system's words where it has said it."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return str(text).splitlines()[0]


def _give_way() -> None:
    """Lower this thread's priority, and that of threads it starts."""
    if sys.platform == "linux":  # elsewhere this means the whole process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(BESIDE, os.getpriority(os.PRIO_PROCESS, own)))


def copy_in_tasks(scheduler: Scheduler, values: Mapping[str, np.ndarray], into: Mapping[str, np.ndarray]) -> None:
    """Copy arrays into others of the same names and shapes, by tasks on all threads."""
    token = uuid4().hex[:8]
    graph: Graph = {}
    leaves: dict[Key, Any] = {}
    for number, names in enumerate(_shares(values)):
        leaf, key = (f"state-{number}_-{token}",), (f"state.copy-{number}_-{token}",)
        leaves[leaf] = tuple((values[name], into[name]) for name in names)
        graph[key] = task(key, _copy, [leaf])
    scheduler.fetch(scheduler.run(GraphRun(graph, leaves, list(graph))))


def _copy(pairs: tuple[tuple[np.ndarray, np.ndarray], ...]) -> None:
    for values, into in pairs:
        np.copyto(into, values)


def _shares(values: Mapping[str, np.ndarray]) -> list[list[str]]:
    """The names in groups of some size."""
    shares: list[list[str]] = [[]]
    size = 0
    for name, value in values.items():
        if size >= COPY_BYTES:
            shares.append([])
            size = 0
        shares[-1].append(name)
        size += value.nbytes
    return shares


def _values(held: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a state, which may hold some of them packed as well."""
    return {name: values_of(value) for name, value in held.items()}
