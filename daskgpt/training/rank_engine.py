"""The engine of a cluster whose workers share each batch: windows of steps, one task a worker."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, cast
from uuid import uuid4

import numpy as np

from daskgpt.data.dataset import Batch
from daskgpt.graph.compiled import Layout
from daskgpt.graph.sum_order import sequences_of_rank
from daskgpt.model.parameters import RandomParameters, Tensor, tensors
from daskgpt.model.step import Arrays, Outcome, as_weights
from daskgpt.schedulers.cluster import ClusterScheduler, loss, losses_as_errors, places_apart
from daskgpt.schedulers.links import end_programs, leave, leaving
from daskgpt.schedulers.protocol import WorkerLost
from daskgpt.training import rank_program
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.engine import Engine, State, holds_weights
from daskgpt.training.job import Job, Say

PAUSE, NOTICE = 0.05, 5.0  # seconds between two looks at a worker that leaves, and until it has announced that
WINDOW_SECONDS = 3.0  # of a window, about: many times what it costs to begin one
PACK_BYTES = 1 << 25  # of small arrays that are copied, sent and kept together


class RankEngine(Engine):
    """Runs a job's steps on the workers of a cluster; chunks and grain are chosen, and kernel calls recorded, there.

    made    number of steps before the state
    chunk   sequences and tokens of a chunk where one process has the whole batch
    given   the state that ranks are to begin with; None while they hold one
    copies  of the ranks' state, by pack, made on request and dropped with the next step
    held    the copies of the parameters, as a step holds them
    constants   the parameters that no step changes, by pack: futures of them, which stay as long as the run
    parameters  from which they are sent, again if they are lost
    epoch   identifies the ranks that have the state; a new one begins with each change of workers and each loss
    owned   how many rows of each array each rank updates
    heirs   for each rank that has left, the rank that has its rows
    pace    seconds between two copies of the state; a window is not longer
    """

    scheduler: ClusterScheduler
    ranks = True
    described_tasks = f"some steps of a worker, about {WINDOW_SECONDS:g} s, are a task"
    made, tasks, grain, chunk = 0, 0, "", (0, 0)  # tasks: of all ranks, in the last steps

    def __init__(self, job: Job, scheduler: ClusterScheduler, say: Say = print) -> None:
        self.job, self.scheduler, self.say = job, scheduler, say
        dataflow = replace(job.dataflow, precision=job.precision.name)
        self.sent_job = replace(job, dataset=None, dataflow=dataflow)
        self.run_name, self.epoch = f"{scheduler.name} {uuid4().hex[:8]}", ""
        self.grain = job.dataflow.grain
        dropout = job.optimizer.dropout
        self.chunk = ChunkChoice(job.config, job.micro_shape, job.dataflow, scheduler.threads, dropout).first
        self.layout = Layout(tuple(_packs(job, job.state)))
        frozen = {name: tensor for name, tensor in tensors(job.config).items() if not tensor.trained}
        self.constants = dict[tuple[str, ...], Any].fromkeys(_packs(job, as_weights(frozen)))
        self.parameters: Arrays = {}
        self.addresses: list[str] = []
        self.owned: list[dict[str, int]] = []
        self.heirs: dict[int, int] = {}
        self.given: State | None = None
        self.copies, self.held = dict[tuple[str, ...], Any](), list[Any]()
        self.kept = False  # whether kernel calls are kept for a timeline
        self.seconds = WINDOW_SECONDS  # of one step; until the first one is made
        self.pace = math.inf
        self.workers = len(scheduler.addresses())

    @property
    def described_chunks(self) -> str:
        """Description of the chunks; each rank chooses its own."""
        groups, workers = self.job.groups, self.workers
        idle = f" ({groups} of {workers} have one: --groups decides how many)" if groups < workers else ""
        return f"chosen by each worker for its share of the batch{idle}"

    def together(self) -> int:
        most = max(1, round(min(WINDOW_SECONDS, self.pace) / max(self.seconds, 1e-6)))
        every = self.job.run.snapshot_every
        return min(most, every - self.made % every) if every > 0 else most

    def initial(self, parameters: Arrays, moments: Arrays | None = None, step: int = 0) -> State:
        """Return a state whose packs are on workers; random weights need none."""
        if isinstance(parameters, RandomParameters) and not moments and not self.constants:
            return State(Layout(()), [], step)
        moments, self.parameters = moments or {}, parameters if self.constants else {}
        layout = Layout(tuple(names for names in self.layout.packs if holds_weights(names) or names[0] in moments))
        packs = []
        for names in layout.packs:  # one at a time: they may come from a file
            arrays = (moments[name] if name in moments else parameters[name.removeprefix("weight.")] for name in names)
            packs.append(self.scheduler.held(tuple(arrays)))
        return State(layout, packs, step)

    def resume(self, state: State) -> None:
        self.given, self.made, self.copies, self.held = state, state.step, {}, []

    def state(self) -> State:
        """Return the state; where ranks hold it, its packs are futures of copies."""
        return self.given if self.given is not None else self._copied(self.layout)

    def weights(self) -> State:
        if self.given is not None:
            return self._whole(self.given.weights)
        state = self._whole(self._copied(Layout(tuple(filter(holds_weights, self.layout.packs)))))
        if not self.job.precision.packed:
            return state
        if not self.held:
            hold = partial(self.scheduler.submit, "state.hold", rank_program.hold_pack, self.sent_job)
            self.held = list(map(hold, state.layout.packs, state.packs))
        return replace(state, packs=self.held)

    def _whole(self, state: State) -> State:
        """Return a state with the parameters that no step changes, which are sent unless they are on the cluster."""
        for names, pack in self.constants.items():
            if pack is None or not all(self.scheduler.present([pack])):
                arrays = (self.parameters[name.removeprefix("weight.")] for name in names)
                self.constants[names] = self.scheduler.held(rank_program.Pack(arrays))
        layout = Layout((*state.layout.packs, *self.constants))
        return replace(state, layout=layout, packs=[*state.packs, *self.constants.values()])

    def copied_apart(self) -> State:
        """Return the state with two copies of each pack on different workers, where there are several, as futures.

        No other task may read them: of the copies that this leaves, Dask's memory manager keeps one, perhaps that on
        the worker with the other copy.
        """
        return State(self.layout, self._copies_of(self.layout.packs, apart=True), self.made)

    def _copied(self, layout: Layout) -> State:
        """Return copies of these packs of the ranks' state."""
        missing = [names for names in layout.packs if names not in self.copies]
        if missing:
            self.copies |= {names: copy for names, (copy,) in zip(missing, self._copies_of(missing))}
        return State(layout, [self.copies[names] for names in layout.packs], self.made)

    def run(self, batches: Sequence[Batch], steps: int) -> list[Outcome]:
        if self.given is None:
            self._wait_for_ranks()
        changed = self.workers != len(self.addresses) and self._ranks() != self.addresses
        if self.given is not None or self.heirs or changed:
            self._begin(self.state())
            self.given = None
        ids = np.min_scalar_type(self.job.config.padded_vocabulary)
        tokens, targets, *others = (np.stack(part) for part in zip(*batches))
        parts = [tokens.astype(ids), targets.astype(ids), *others]
        arguments, count, (sequences, _) = [], len(self.addresses), self.job.batch_shape
        for rank in range(count):
            rows = sequences_of_rank(rank, count, self.job.groups, sequences)
            mine = [np.ascontiguousarray(part[:, rows]) for part in parts]
            arguments.append((self.made, steps, mine, self.kept))
        ended = self._windows(arguments)
        self.seconds = max(window.seconds for window in ended) / len(batches)
        for line in ended[0].messages if 0 not in self.heirs else ():
            self.say(f"rank 0     {line}")
        self.tasks, self.grain = sum(window.tasks for window in ended), ended[0].grain
        self.made, self.copies, self.held = self.made + len(batches), {}, []
        return cast(list[Outcome], ended[0].outcomes)

    def close(self) -> None:
        """Remove the state and its copies from the workers."""
        self.scheduler.needed = set()
        self.given, self.copies, self.held, self.constants, self.parameters = None, {}, [], {}, {}
        with suppress(OSError, RuntimeError, ValueError):  # the cluster is gone
            self.scheduler.call_on(end_programs, self.run_name)

    def _ranks(self) -> list[str]:
        """Return the addresses of the workers that share the batch from now on."""
        addresses = sorted(self.scheduler.addresses(), key=lambda a: (a not in self.addresses, a))
        return addresses[: self.job.groups]

    def _begin(self, state: State) -> None:
        """Make the present workers ranks with this state.

        Errors   WorkerLost if a part of the state is lost: a rank would wait for it for ever
        """
        start = time.perf_counter()
        self.copies, self.held = {}, []
        self.epoch, self.scheduler.needed = uuid4().hex[:8], set()
        self.scheduler.await_worker()
        before, self.addresses = self.addresses, self._ranks()
        while not self.scheduler.without_unreached(self.addresses):
            self.addresses = self._ranks()
        threads = self.scheduler.threads_of_workers()
        left = threads.keys() & set(before) - set(self.addresses)
        if left:
            self.scheduler.call_on(end_programs, self.run_name, workers=left)
        left -= self.scheduler.monitor.stuck.keys()
        self.scheduler.needed = {*self.addresses, *left}  # all that may hold the state
        with self._aborting():
            if not all(self.scheduler.present(list(state.packs))):
                raise loss(self.scheduler.client, "a part of the state")
            state = self._whole(state)
        count = len(self.addresses)
        self.heirs = {}
        most = max(threads.get(address, 1) for address in self.addresses)
        self.owned = self._on_all_ranks("begin", [(self.sent_job, rank, self.addresses, most) for rank in range(count)])
        loads = []
        for rank in range(count):
            chosen = [one for one in zip(state.layout.packs, state.packs) if self._is_read(one[0], rank)]
            names_or_seed = [names for names, _ in chosen] or self.job.run.seed
            loads.append((state.step, names_or_seed, *(pack for _, pack in chosen)))
        self._on_all_ranks("load", loads)
        self.scheduler.needed = set(self.addresses)
        if before:
            seconds = time.perf_counter() - start
            self.say(f"workers    {count} share each batch from now on ({seconds:.1f} s)")

    def _is_read(self, names: Sequence[str], rank: int) -> bool:
        """Return whether a rank needs some of these arrays: all weights, and what it owns."""
        return names[0].startswith("weight.") or not self.owned[rank].keys().isdisjoint(names)

    def _copies_of(self, packs: Sequence[Sequence[str]], apart: bool = False) -> list[list[Any]]:
        """Return futures of copies of the ranks' arrays: for each pack one, or two as of `copied_apart`.

        The rows are copied when this returns, the second copies perhaps not made yet.
        """
        try:
            return self._submitted_copies(packs, apart)
        except WorkerLost:
            if not self._left():
                raise
            return self._submitted_copies(packs, apart)

    def _submitted_copies(self, packs: Sequence[Sequence[str]], apart: bool) -> list[list[Any]]:
        joined, places = list[tuple[Any, ...]](), list[str]()
        for names in packs:
            calls, size = list[Any](), Counter[str]()
            for rank, owned in enumerate(self.owned):
                if rows := sum(owned.get(name, 0) for name in names):
                    address = self.addresses[self.heirs.get(rank, rank)]
                    call = rank_program.rows_of, self.run_name, self.epoch, self.made, names, rank
                    calls.append(self.scheduler.submit("state.rows", *call, address=address))
                    size[address] += rows
            joined.append((rank_program.join_rows, *calls))
            places.append(size.most_common(1)[0][0])
        name, submit = "recovery.copy" if apart else "state.copy", self.scheduler.submit
        copies_of_packs = [[submit(name, *call, address=place)] for place, call in zip(places, joined)]
        workers = sorted(self.scheduler.addresses())
        if apart and len(workers) > 1:
            state = self.job.state
            sizes = [sum(math.prod(state[name].shape) for name in names) for names in packs]
            others = places_apart(list(zip(sizes, places)), workers)
            for copies, place, call in zip(copies_of_packs, others, joined):
                copies.append(submit(name, *call, address=place, moves=True))
        self.scheduler.wait_for([copies[0] for copies in copies_of_packs])
        return copies_of_packs

    def _call(self, rank: int, name: str, method: str, *arguments: Any) -> Any:
        """Return the future of a method of a rank's program, called in a task of this name."""
        call = self.run_name, self.epoch, method, *arguments
        return self.scheduler.submit(name, rank_program.call, *call, address=self.addresses[rank])

    def _on_all_ranks(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results of a method of each rank; once one fails, let those fail that wait for it."""
        futures = [self._call(rank, f"rank.{method}", method, *given) for rank, given in enumerate(arguments)]
        with self._aborting():
            return self.scheduler.fetch(futures)

    def _windows(self, arguments: Sequence[Sequence[Any]]) -> list[rank_program.Window]:
        """Return the results of a window of each rank that is still there; one that leaves ends it first."""
        calls = [partial(rank_program.call, self.run_name, self.epoch, "window", *given) for given in arguments]
        futures = self.scheduler.submit_together("rank.window", list(zip(self.addresses, calls)))
        with self._aborting():
            try:
                return self.scheduler.fetch(futures)
            except WorkerLost:
                if not self._left():
                    raise
                return self.scheduler.fetch([future for rank, future in enumerate(futures) if rank not in self.heirs])

    def _left(self) -> bool:
        """Note which rank has the rows of those that have left since the last call.

        Return whether there are such ranks, and all that are gone have left in good order.
        """
        scheduler, end = self.scheduler, time.monotonic() + NOTICE
        here = scheduler.threads_of_workers().keys() - scheduler.monitor.stuck.keys()
        gone = {rank for rank, address in enumerate(self.addresses) if address not in here} - self.heirs.keys()
        heir = next((rank for rank, address in enumerate(self.addresses) if address in here), -1)
        addresses = {self.addresses[rank] for rank in gone}
        if heir < 0 or addresses & scheduler.monitor.left.keys():
            return False
        if blocked := addresses & scheduler.monitor.stuck.keys():  # the others have left by themselves
            scheduler.call_on(leave, self.run_name, workers=blocked)
            for address in blocked:
                scheduler.apart.add(address)
        while gone and time.monotonic() < end:
            answers = scheduler.call_on(leaving, self.epoch, workers=[self.addresses[heir]])
            announced, lost = next(iter(answers.values()), (set(), "it is gone"))
            if gone <= announced:
                scheduler.needed -= addresses
                scheduler.fetch([self._call(heir, "rank.inherit", "inherit", rank) for rank in gone])
                self.heirs |= dict.fromkeys(gone, heir)
                return True
            if lost:
                break
            time.sleep(PAUSE)
        return False

    def _wait_for_ranks(self) -> None:
        """Wait while the worker of a rank takes no tasks; if it leaves, another rank has its rows.

        Errors   WorkerLost if one is gone that has not left in good order, or the run does without it
        """
        while not self.heirs and (missing := set(self.addresses) - self.scheduler.addresses()):
            if missing & self.scheduler.apart.now or (self.scheduler.look() and not self._left()):
                raise loss(self.scheduler.client, "a worker")
            time.sleep(PAUSE)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Let the tasks of ranks fail that wait for one that has failed."""
        try:
            yield
        except BaseException:
            self.given, self.copies, self.held = None, {}, []
            client = self.scheduler.client
            # The cluster is gone, which the first error says.
            with suppress(OSError, RuntimeError, ValueError), losses_as_errors(client):
                client.run(rank_program.abort, self.run_name, self.epoch, wait=False, on_error="ignore")
            raise


def _packs(job: Job, state: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the arrays of a state in packs: by kind, small arrays together."""
    for _, names in groupby(state, lambda name: name.partition(".")[0]):
        pack, size = list[str](), 0
        for name in names:
            nbytes = math.prod(state[name].shape) * job.precision.dtype.itemsize
            if pack and size + nbytes > PACK_BYTES:
                yield tuple(pack)
                pack, size = [], 0
            pack.append(name)
            size += nbytes
        yield tuple(pack)
