"""What a step will take, without running it: `--plan`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskgpt.config.errors import require
from daskgpt.graph.messages import Rank
from daskgpt.instruments import machine
from daskgpt.instruments.traffic import Load, describe_loads, loads
from daskgpt.model.parameters import tensors, value_count
from daskgpt.schedulers.local import local_scheduler, usable_cores
from daskgpt.schedulers.machine import memory_limit
from daskgpt.training.autotune import ChunkChoice, GrainChoice, described
from daskgpt.training.diloco import SOME_STEPS, replica_step
from daskgpt.training.job import Job, facts
from daskgpt.training.job_steps import JobSteps, training_step
from daskgpt.training.stand_ins import CLASSES, Trial, rounded

ASSUMED = "block"  # the grain, while only a measured step can tell


@dataclass(frozen=True)
class Prediction:
    """A step before it runs.

    made       bytes of all arrays of a class that the step holds or makes
    at_peak    bytes of each class when most bytes are held
    loads      what each worker sends; empty where nobody has said how many there are
    """

    grain: str
    tasks: int
    made: Mapping[str, int]
    at_peak: Mapping[str, int]
    largest_task: str
    largest_bytes: int
    loads: Sequence[Load] = ()

    @property
    def peak(self) -> int:
        """Bytes of all arrays when there are most of them."""
        return sum(self.at_peak.values())


def predict(job: Job, workers: int = 0) -> Prediction:
    """Tasks and memory of one step, in the order in which Dask runs its tasks one by one; no kernel is called.

    Counted are the arrays between kernels, the parameters and the optimizer's moments; not the batch, a kernel's
    scratch, the interpreter and its libraries. Chunks and grain that are auto stand for what `known_chunks` and
    `known_grain` say.

    workers   of a cluster, which share the batch: tasks and memory are then those of the first one
    """
    if job.local.local_steps:
        return _predict_local(job)
    ranks = min(workers, job.groups)
    grain = known_grain(job)[0]
    if ranks > 1:
        nobody: Any = None  # sends anything
        rank = Rank(0, ranks, job.groups, *job.batch_shape, nobody)
        step = JobSteps(job, local_scheduler("sync", 1), lambda line: None, rank).step
        step.set_grain(grain)
    else:
        step = training_step(job, known_chunks(job)[0], grain, in_place_of(job))
    trial = Trial(step)
    together = Trial(step, job.dataflow.window) if job.dataflow.barrier == "none" and step.in_place else trial
    largest = max(trial.results, key=lambda key: trial.results[key])
    return Prediction(
        grain=grain,
        tasks=len(trial.results),
        made=trial.account.made,
        at_peak=together.account.at_peak,
        largest_task=step.runnable.title(largest),
        largest_bytes=trial.results[largest],
        loads=loads(step) if ranks > 1 else (),
    )


def _predict_local(job: Job) -> Prediction:
    """The same of local steps, in the middle of a round or where the replicas meet, whichever takes more.

    As many replicas as there are threads work at once.
    """
    step = replica_step(job, known_chunks(job)[0])
    own = Trial(step).account
    replicas, at_once = job.local.replicas, min(job.local.replicas, threads_of(job))
    model = own.made["parameters"]
    momentum = value_count(job.config) * job.precision.dtype.itemsize
    moments = own.made["optimizer"] * replicas
    apart = {
        "parameters": model * (1 + replicas),
        "optimizer": momentum + moments,
        **{kind: own.at_peak[kind] * at_once for kind in ("gradients", "activations")},
    }
    meeting = {"parameters": model * (2 + replicas), "optimizer": 2 * momentum + moments}
    peak = max(apart, meeting, key=lambda held: sum(held.values()))
    shards = min(replicas, len(tensors(job.config)))
    return Prediction(
        grain=job.dataflow.grain,
        tasks=replicas * (3 + shards) + 3 * shards,
        made={**apart, **{kind: own.made[kind] * at_once for kind in ("gradients", "activations")}},
        at_peak={kind: peak.get(kind, 0) for kind in CLASSES},
        largest_task="inner.steps",
        largest_bytes=model + own.made["optimizer"],
    )


def check_workers(workers: int | None, *, plan: bool) -> None:
    """Errors   ValueError for workers without a plan, or fewer than one"""
    if workers is not None:
        require(plan, "plan", "--workers must come with --plan", {"workers": workers}, "Add --plan.")
        require(workers >= 1, "plan", "--workers must be at least 1", {"workers": workers}, "Give 1 or more.")


def planned(job: Job, workers: int | None) -> str:
    """What `--plan` prints; workers: of a cluster that share the step, each of one thread; None for no such
    step.
    """
    if workers is None:
        return describe_prediction(job, predict(job))
    rule, got = "--workers must come without --local-steps", {"local_steps": job.local.local_steps}
    require(not job.local.local_steps, "plan", rule, got, "Leave one out: replicas send what the weights take.")
    job = replace(job, dataflow=replace(job.dataflow, scheduler="local", threads=workers))
    return describe_prediction(job, predict(job, workers))


def in_place_of(job: Job) -> bool:
    """Whether the job's steps will write over the state."""
    return job.scheduler in ("sync", "threads") or job.dataflow.engine == "ranks"


def describe_prediction(job: Job, found: Prediction) -> str:
    """What `--plan` prints: what would be run, a table of its tasks and memory, and whether that fits here."""
    known = facts(job)
    data = job.dataset
    encoding = [_line("encoding", f"{data.encoding_name}, {data.vocabulary:,} ids")] if data else []
    return "\n".join(
        (
            _line("model", known["model"]),
            _line("batch", known["batch"]),
            *(_line("replicas", known["replicas"]) for _ in range(bool(job.local.local_steps))),
            _line("chunks", known_chunks(job)[1]),
            *encoding,
            _line("precision", known["precision"]),
            *_tasks_of(job, found),
            f"{'':12} {'held or made':>14} {'at the peak':>14}",
            *(f"{kind:12} {_mb(found.made[kind]):>14} {_mb(found.at_peak[kind]):>14}" for kind in CLASSES),
            f"{'peak':12} {'':14} {_mb(found.peak):>14}   without scratch of kernels",
            _line("largest task", f"{_mb(found.largest_bytes)} of results, {found.largest_task}"),
            _line("memory", fits(job, found.peak * max(len(found.loads), 1))),
            *([describe_loads(found.loads)] if found.loads else []),
            "nothing was run",
        )
    )


def _tasks_of(job: Job, found: Prediction) -> list[str]:
    """Lines on the tasks of a step, or of local steps."""
    if not job.local.local_steps:
        whose = f" of each of {len(found.loads)} workers" if found.loads else ""
        return [_line("grain", known_grain(job)[1]), _line("tasks", f"{found.tasks:,} a step{whose}")]
    text = f"{SOME_STEPS}, with 3 small ones; {found.tasks:,} where they meet, after {job.local.local_steps} steps"
    return [_line("tasks", text)]


def known_chunks(job: Job) -> tuple[tuple[int, int], str]:
    """The chunks that a plan counts with, and what is to be said of them."""
    dataflow = job.dataflow
    threads = 1 if job.local.local_steps else threads_of(job)
    shape = job.replica_shape if job.local.local_steps else job.micro_shape
    choice = ChunkChoice(job.config, shape, dataflow, job.precision, threads)
    told = described(shape, choice.first)
    if not choice.reason:
        return choice.first, told
    known = job.scheduler in ("sync", "threads", "local") or bool(job.local.local_steps)
    assumed = "" if known else ", which are assumed: a run asks the cluster"
    return choice.first, f"{told} ({choice.reason}{assumed})"


def threads_of(job: Job) -> int:
    """Of the scheduler that will run the job; as many as here for a cluster that nobody has asked yet."""
    return 1 if job.scheduler == "sync" else job.dataflow.threads or usable_cores()


def known_grain(job: Job) -> tuple[str, str]:
    """The grain that a plan counts with, and what is to be said of it: only a measured step can settle auto."""
    grain, barrier = job.dataflow.grain, job.dataflow.barrier
    choice = GrainChoice(grain, barrier, in_place_of(job))
    if grain != "auto":
        return grain, grain
    if choice.open:
        return ASSUMED, f"{ASSUMED} is assumed (auto: a run settles it in its first step, from measured kernel times)"
    if barrier == "layer":
        why = "with barrier layer a task is one kernel"
    else:
        why = "Dask's scheduler takes some milliseconds for each task"
    return choice.first, f"{choice.first} (auto: {why})"


def fits(job: Job, peak: int) -> str:
    """One sentence: whether the peak and the processes that hold it fit the memory that there is here."""
    limit, whose = memory_limit()
    if not limit:
        return f"{rounded(peak)} are needed; this system does not say how much there is."
    scheduler, threads = job.scheduler, job.dataflow.threads or usable_cores()
    if scheduler not in ("sync", "threads", "local"):
        return f"{rounded(peak)} are needed by the cluster's workers together; {whose} has {rounded(limit)}."
    processes = 1 + threads if scheduler == "local" else 1
    libraries = processes * machine.resident_memory()  # of this process, which has loaded them and holds no step
    needed = f"{rounded(peak)} and {rounded(libraries)} for interpreter and libraries"
    if processes > 1:
        needed += f" of {processes} processes"
    if peak + libraries <= limit:
        return f"fits: {needed}, of the {rounded(limit)} that {whose} has."
    return (
        f"DOES NOT FIT: {needed} are more than the {rounded(limit)} that {whose} has. "
        "Try a smaller --batch-size or --sequence-length."
    )


def _line(name: str, text: str) -> str:
    """A name and what there is to say, in lines of 80 columns."""
    together = re.sub(r"(\d) ([GM]B)", "\\1\u00a0\\2", f"{name:13} {text}")  # a number stays with its unit
    return textwrap.fill(together, 80, subsequent_indent=" " * 14, break_on_hyphens=False).replace("\u00a0", " ")


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
