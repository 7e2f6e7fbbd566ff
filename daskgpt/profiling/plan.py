"""Tasks, memory and messages of a step, found without running it: `daskgpt.plan`, and --plan of the commands."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from daskgpt.config.errors import number_of, text_table, whole_number
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig
from daskgpt.formats.encoding import title_of
from daskgpt.graph.calls import MESSAGE, Exchange, call_of
from daskgpt.model.step import CompiledStep
from daskgpt.profiling.measure import job_from
from daskgpt.profiling.simulate import Forecast, engines_of, forecast
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import active_client
from daskgpt.training.autotune import CLASSES, Trial, most_bytes, rounded
from daskgpt.training.engine import LocalEngine, TaskEngine
from daskgpt.training.job import Job, facts

ASSUMED, ASSUMING = "block", "assumed: a run measures its kernels"  # the grain, while only a measured step can tell


@dataclass(frozen=True, repr=False)
class Plan:
    """A step before it runs; `str` is what `daskgpt.train --plan` prints.

    job        what would be trained
    tasks      their number; of several workers, all but `sent` is of one with the largest share
    made       bytes of all arrays of a class that the step holds or makes
    at_peak    bytes of each class when most bytes are held
    sent       bytes that each worker sends, by kind; empty without a number of workers
    chunks     their number and size, and `grain` of tasks; `why` a run would take this grain
    forecast   the predicted time; None if it is unknown, with the reason in `unknown`
    """

    job: Job
    chunks: str
    grain: str
    why: str
    tasks: int
    made: Mapping[str, int]
    at_peak: Mapping[str, int]
    sent: Sequence[Counter[str]]
    forecast: Forecast | None = None
    unknown: str = ""
    libraries: int = 0

    @property
    def peak(self) -> int:
        """Bytes of all arrays when there are most of them."""
        return sum(self.at_peak.values())

    def __repr__(self) -> str:
        job, texts, data = self.job, facts(self.job), self.job.dataset
        shares, ranks = max(len(self.sent), 1), job.scheduler == "local" and job.dataflow.engine == "ranks"
        idle = (job.dataflow.threads - shares) * ranks  # workers
        above = {
            "model": texts["model"],
            "batch": texts["batch"],
            "chunks": self.chunks,
            "encoding": f"{title_of(data.encoding_name)}, {data.vocabulary:,} ids" if data else "",
            "precision": texts["precision"],
            "grain": f"{self.grain} ({self.why})" if self.why else self.grain,
            "tasks": f"{self.tasks:,} a step" + f" of the fullest of {len(self.sent)} workers" * bool(self.sent),
            "idle": f"{number_of(idle, 'worker')} without a group, not counted below (--groups)" if idle else "",
        }
        memory = [["", "held or made", "at the peak"]]
        memory += [[kind, _mb(self.made[kind]), _mb(self.at_peak[kind])] for kind in CLASSES]
        memory.append(["all, without scratch of kernels", "", _mb(self.peak)])
        below = {
            "memory": fits(job, self.peak * max(len(self.sent), 1), self.libraries),
            "messages": described_messages(self.sent),
        }
        time = self.forecast.rows() if self.forecast else {"time": self.unknown}
        return "\n".join([lines_of(above), text_table(memory), lines_of(below | time), "no step was run"])


def plan(
    config: ModelConfig,
    data: DataConfig | Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    dataflow: DataflowConfig | Mapping[str, Any] | None = None,
    *,
    threads: int = 0,
    workers: int = 0,
) -> Plan:
    """Return what a step will take, without running it, as `python -m daskgpt.train --plan` prints it.

    threads   of this process (0 for those of dataflow), or of each worker (0 for one); also more than there are here
    workers   of a cluster on one machine that share the step; 0 for the scheduler that dataflow names, or for the
              workers of the active Client where neither scheduler nor threads are given

    Kernel times are those of `daskgpt bench --calibrate` on this machine. Without them, kernels are timed now, which
    takes some seconds.

    Errors    ValueError where the configurations do not fit each other

    >>> import daskgpt
    >>> found = daskgpt.plan(daskgpt.preset("tiny"), {"batch_size": 4}, dataflow={"grain": "block"})
    >>> found.grain, found.peak > 3 * 834_432 * 4, found.forecast.seconds > 0
    ('block', True, True)
    """
    job = job_from(config, data=data, optimizer=optimizer, dataflow=dataflow)
    dials = job.dataflow
    if dials.scheduler == "auto" and not (threads or workers) and (client := active_client()) is not None:
        counts = client.nthreads().values()
        workers, threads = len(counts), min(counts, default=0)
    dials = replace(dials, scheduler="threads") if threads and dials.scheduler == "auto" else dials
    job = replace(job, dataflow=replace(dials, threads=threads or dials.threads))
    return predict(job, whole_number(workers, "plan", "workers"), timed=True)


def predict(job: Job, workers: int = 0, *, timed: bool = False) -> Plan:
    """Return tasks and memory of one step, in the order in which Dask runs its tasks one by one; no kernel is called.

    Counted are the arrays between kernels, the parameters and the optimizer's moments; not the batch, a kernel's
    scratch, the interpreter and its libraries. Chunks and grain that are auto are those of a run's first step, or those
    that a run would settle by the predicted times.

    workers   of a cluster, which share the batch: tasks and memory are then those of one with the largest share; 0 for
              those of the scheduler local, else for one process
    timed     whether to predict the time of a step
    """
    predicted, unknown = None, ""
    libraries = machine.resident_memory()  # before kernels are timed here
    if not workers and job.scheduler == "local" and job.dataflow.engine == "ranks":
        workers = job.dataflow.threads or usable_cores()
        job = replace(job, dataflow=replace(job.dataflow, threads=1))
    engines = planned(job, workers)
    local = [engine for engine in engines if isinstance(engine, LocalEngine)]
    if timed and local and (workers or job.scheduler in ("sync", "threads")):
        try:
            predicted = forecast(job, local)
        except MemoryError as error:
            unknown = str(error)
    if workers:
        job = replace(job, dataflow=replace(job.dataflow, scheduler="local", threads=workers))
    steps, auto = list(map(planned_step, engines)), "auto" * (job.dataflow.grain == "auto")
    # Shares of a batch differ where its groups cannot be divided evenly.
    engine, step = max(zip(engines, steps), key=lambda one: most_bytes(one[1]))
    trial = Trial(step)
    together = Trial(step, job.dataflow.window) if job.dataflow.barrier == "none" and step.dials.in_place else trial
    return Plan(
        job=job,
        chunks=engine.chunks.described(step.dials.chunk),
        grain=step.dials.grain,
        why=f"{auto}, {ASSUMING}" if engine.choice.undecided else auto,
        tasks=step.tasks,
        made=trial.made,
        at_peak=together.at_peak,
        sent=bytes_sent(steps) if len(steps) > 1 else (),
        forecast=predicted,
        unknown=unknown,
        libraries=libraries,
    )


def planned(job: Job, workers: int = 0) -> list[LocalEngine | TaskEngine]:
    """Return the engine that would run a job, or that of each rank."""
    if job.dataflow.engine == "ranks" or (job.scheduler in ("sync", "threads") and not workers):
        return [*engines_of(job, workers)]
    threads = workers or job.dataflow.threads or usable_cores()
    scheduler: Any = SimpleNamespace(threads=threads, in_place=False)
    return [TaskEngine(job, scheduler)]


def planned_step(engine: LocalEngine | TaskEngine) -> CompiledStep:
    """Return the step of an engine, with the grain that a plan counts with while only a measured step can tell."""
    return engine.step.with_dials(grain=ASSUMED) if engine.choice.undecided else engine.step


def fits(job: Job, peak: int, libraries: int) -> str:
    """Return one sentence: whether the peak and the processes that hold it fit the memory that there is here.

    libraries   bytes of one such process without any array
    """
    limit, whose = machine.memory_limit()
    if job.scheduler not in ("sync", "threads", "local"):
        return f"{rounded(peak)} are needed by the cluster's workers together; {whose} has {rounded(limit)}."
    processes = 1 + (job.dataflow.threads or usable_cores()) if job.scheduler == "local" else 1
    libraries *= processes
    needed = f"{rounded(peak)} and {rounded(libraries)} for interpreter and libraries"
    needed += f" of {processes} processes" if processes > 1 else ""
    if peak + libraries <= limit:
        return f"fits: {needed}, of the {rounded(limit)} that {whose} has."
    advice = "Try a smaller --batch-size or --sequence-length."
    return f"DOES NOT FIT: {needed} are more than the {rounded(limit)} that {whose} has. {advice}"


def lines_of(texts: Mapping[str, str]) -> str:
    """Return names and texts, those that are not empty, in lines of 80 columns."""
    look: dict[str, Any] = {"width": 80, "subsequent_indent": " " * 14, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{name:13} {text}", **look) for name, text in texts.items() if text)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def bytes_sent(steps: Sequence[CompiledStep]) -> list[Counter[str]]:
    """Return the bytes that each worker sends in a step, by kind, from the steps of all workers.

    totals    of gradients, to the owner of these rows
    weights   that it has updated, to all others
    gather    activations that are summed by the owner of the table that they belong to

    Not counted are losses, the squares that make the norm of a gradient, and Dask's messages.
    """
    workers = [Counter[str]() for _ in steps]
    for sent, step in zip(workers, steps):
        for call in map(call_of, step.kernels.graph.values()):
            if isinstance(call, Exchange) and call.peer >= 0 and call.returns != MESSAGE and call.size:
                kind, _ = cast(tuple[str, int], call.channel)
                sent[kind] += call.size
    return workers


def described_messages(workers: Sequence[Counter[str]]) -> str:
    """Return what workers send, from the least to the most."""
    if not workers:
        return ""
    kinds, sizes = sum(workers, Counter[str]()), [sent.total() for sent in workers]
    ends = " .. ".join(dict.fromkeys(map(_mb, (min(sizes), max(sizes)))))
    together = ", ".join(f"{kind} {_mb(size)}" for kind, size in kinds.items())
    return f"a worker sends {ends}; together {_mb(kinds.total())} ({together})"
