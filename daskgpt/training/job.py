"""What is to be trained, checked before anything is computed or written."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daskgpt.config.errors import nearest, refusal, require
from daskgpt.config.groups import groups_of_batch
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import (
    DataConfig,
    DataflowConfig,
    LocalConfig,
    OptimizerConfig,
    RunConfig,
    check_chunks,
    check_replicas,
)
from daskgpt.config.stopping import heeding_interrupts
from daskgpt.data.dataset import Dataset
from daskgpt.data.text import STANDARD_LIBRARY
from daskgpt.model.gpt2 import replaced_rows
from daskgpt.model.optimizer import OPTIMIZERS
from daskgpt.model.parameters import Tensor, parameter_count, tensors, value_count
from daskgpt.model.precision import FLOAT32, Precision, settle
from daskgpt.schedulers.connect import LOCAL_SCHEDULERS, chosen_address, resolved_address
from daskgpt.schedulers.machine import memory_limit
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.horizon import Horizon
from daskgpt.training.metrics import chosen_sinks

OUTER = "outer"  # the momentum of the outer step


@dataclass(frozen=True)
class Job:
    """Everything that steps need, checked before anything is computed or written.

    dataset   what a run trains on; None where tokens come from elsewhere, as in a benchmark
    horizon   how many steps it has, which is estimated anew while it runs where it is told in minutes
    replaced  the layers that are not GPT-2's own, where the job was made
    """

    config: GPT2Config
    data: DataConfig
    optimizer: OptimizerConfig
    dataflow: DataflowConfig
    run: RunConfig
    dataset: Dataset | None = None
    local: LocalConfig = field(default_factory=LocalConfig)
    horizon: Horizon = field(init=False, repr=False, compare=False)
    replaced: str = field(init=False, default_factory=replaced_rows)

    def __post_init__(self) -> None:
        object.__setattr__(self, "horizon", Horizon(self.run, math.prod(self.batch_shape)))
        check_replicas(self.data, self.local, self.dataflow.barrier)
        together = self.local.replicas == 1
        shape = self.micro_shape if together else self.replica_shape
        check_chunks(*shape, self.dataflow, "batch_size" if together else "batch_size / replicas")
        require(
            self.data.sequence_length <= self.config.positions,
            "train",
            "a sequence must not be longer than the model's positions",
            {"sequence_length": self.data.sequence_length, "positions": self.config.positions},
            "Shorten the sequence." if self.run.init else "Shorten the sequence or give more --positions.",
        )
        require(
            self.dataflow.precision != "float64",
            "train",
            "a run must compute in float32 or bfloat16",
            {"precision": self.dataflow.precision},
            "float64 is for daskgpt.verify.",
        )
        rule = "steps are not left out where replicas make steps of their own"
        got = {"skip_outliers": self.optimizer.skip_outliers, "local_steps": self.local.local_steps}
        both = self.optimizer.skip_outliers and self.local.local_steps
        require(not both, "train", rule, got, "Leave one of them out; --clip works with both.")
        if self.dataset is not None:
            self._check_vocabulary(self.dataset)
        name = self.optimizer.optimizer
        advice = nearest(name, list(OPTIMIZERS))
        require(name in OPTIMIZERS, "train", "the optimizer must be known", {"optimizer": name}, advice)
        chosen_sinks(self.run.log, self.run.out)

    def _check_vocabulary(self, dataset: Dataset) -> None:
        require(
            dataset.vocabulary <= self.config.vocabulary,
            "train",
            "the model must know every token id of the encoding",
            {
                "encoding": dataset.encoding_name,
                "ids": dataset.vocabulary,
                "vocabulary": self.config.vocabulary,
            },
            "Start from another model." if self.run.init else "Leave --vocabulary to the encoding.",
        )

    @property
    def tokens(self) -> Dataset:
        """What it trains on.

        Errors   RuntimeError for a job of steps on tokens from elsewhere
        """
        if self.dataset is None:
            raise refusal(RuntimeError, "Job", "training needs a dataset", "dataset=None", "Make the job with one.")
        return self.dataset

    def resolved(self, scheduler: Scheduler, chunk: tuple[int, int], grain: str) -> dict[str, Any]:
        """Every configuration with nothing left to default or detection, by name; paths from the root.

        chunk, grain   what they are once chosen
        """
        batch_chunk, sequence_chunk = chunk
        dataflow = replace(
            self.dataflow,
            batch_chunk=batch_chunk,
            sequence_chunk=sequence_chunk,
            scheduler=resolved_address(self.dataflow.scheduler),
            grain=grain,
            precision=self.precision.name,
            threads=scheduler.threads,
        )
        data, run = self.data, self.run
        source = data.data if data.data == STANDARD_LIBRARY else from_root(data.data)
        return {
            "model": self.config,
            "data": replace(
                data, data=source, encoding=self.tokens.encoding_name, order=self.order, groups=self.groups
            ),
            "optimizer": self.optimizer,
            "local": self.local,
            "dataflow": dataflow,
            "run": replace(run, init=from_root(run.init), out=from_root(run.out), steps=self.steps),
        }

    @property
    def steps(self) -> int:
        """How many steps the run has, as known now."""
        return self.horizon.steps

    @property
    def sinks(self) -> tuple[str, ...]:
        """Where the metrics go: rows of `logs.SINKS`."""
        return chosen_sinks(self.run.log, self.run.out)

    @property
    def order(self) -> str:
        """In which order steps take sequences, auto resolved."""
        return self.tokens.order if self.data.order == "auto" else self.data.order

    @property
    def scheduler(self) -> str:
        """Name or address of the scheduler, auto resolved."""
        return chosen_address(self.dataflow.scheduler)

    @property
    def precision(self) -> Precision:
        """What to compute with, auto resolved."""
        return settle(self.dataflow.precision, self.config.channels)[0]

    @property
    def groups(self) -> int:
        """Into how many groups of sequences sums over a batch are divided; a replica's, where there are several."""
        return groups_of_batch(*self.replica_shape, self.data.groups)

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.data.sequences, self.data.sequence_length

    @property
    def micro_shape(self) -> tuple[int, int]:
        """Of a micro-batch; the batch's where there is one."""
        return self.data.batch_size, self.data.sequence_length

    @property
    def replica_shape(self) -> tuple[int, int]:
        """Of the part of a batch that one replica works on; the batch's where there is one."""
        return self.data.sequences // self.local.replicas, self.data.sequence_length

    @property
    def moments(self) -> dict[str, Tensor]:
        """What passes from step to step beside the weights, "MOMENT.NAME" -> whose it is: the optimizer's moments.

        With local steps the momentum of the outer step, and moments of each replica, by its number.
        """
        known = tensors(self.config)
        own = OPTIMIZERS[self.optimizer.optimizer].state(known)
        if not self.local.local_steps:
            return own
        found = {f"{OUTER}.{name}": tensor for name, tensor in known.items()}
        for replica in range(self.local.replicas):
            found |= {of_replica(name, replica): tensor for name, tensor in own.items()}
        return found

    def round_end(self, step: int) -> int:
        """How many steps will have been made when the replicas meet after this step; one more where there are none."""
        length = self.local.local_steps or 1
        return min((step // length + 1) * length, self.steps)

    def round_begin(self, step: int) -> int:
        """How many steps had been made when the replicas met last before this step."""
        length = self.local.local_steps or 1
        return step // length * length

    def meets(self, done: int) -> bool:
        """Whether after so many steps there is one state of the run: not while replicas are on their own."""
        return self.round_end(max(done - 1, 0)) == done

    def begins_round(self, done: int) -> bool:
        """Whether the replicas begin a round after so many steps: where they meet, and at the beginning."""
        return not done or self.meets(done)


def require_memory(job: Job) -> None:
    """Refuse what cannot fit into the memory of this machine, before anything is built.

    Only what is certain counts: weights and moments, and one activation a block of a micro-batch. `--plan` knows more.
    A cluster has memory of its own.

    Errors   ValueError
    """
    limit, whose = memory_limit()
    if job.scheduler not in LOCAL_SCHEDULERS or not limit:
        return
    kinds = 1 + len({name.partition(".")[0] for name in job.moments})
    held = 4 * kinds * value_count(job.config)
    kept = 4 * math.prod(job.micro_shape) * job.config.channels * (job.config.blocks + 1)
    rule = f"weights, moments and activations must fit into the {limit / 1e9:,.1f} GB of {whose}"
    got = f"at least {held / 1e9:,.1f} GB of weights and moments, {kept / 1e9:,.1f} GB of activations"
    require(held + kept <= limit, "train", rule, got, "Make the model or the batch smaller; --plan says by how much.")


def from_root(path: str) -> str:
    """A path that means the same from every folder; none stays none."""
    return str(Path(path).expanduser().resolve()) if path else ""


def of_replica(name: str, replica: int) -> str:
    """What an array of a replica is called in the state of a run: m3.wte.weight."""
    kind, _, tensor = name.partition(".")
    return f"{kind}{replica}.{tensor}"


def compile_kernels(precision: Precision = FLOAT32) -> None:
    """Compile what Numba has not cached yet, and say so: the first start on a machine takes longer."""
    if not precision.is_compiled():
        print("compiling kernels (first start on this machine, about half a minute) ...", file=sys.stderr, flush=True)
    with heeding_interrupts() as check:
        precision.compile(after_each=check)


def facts(job: Job) -> dict[str, str]:
    """What is computed, by name: model, batch and precision."""
    c, (batch_size, length) = job.config, job.batch_shape
    return {
        "model": f"{parameter_count(c):,} parameters: {c.blocks} blocks, {c.heads} heads, {c.channels} channels, "
        f"vocabulary {c.vocabulary}, positions {c.positions}",
        "batch": f"{batch_size} x {length} tokens{grouped(job)}{divided(job)}",
        **({"replicas": dealt(job)} if job.local.local_steps else {}),
        "precision": f"{job.precision.name}: {settle(job.dataflow.precision, c.channels)[1]}",
    }


def grouped(job: Job) -> str:
    """What is to be said of the groups of a batch: nothing of a single one."""
    return f", summed in {job.groups} groups of {job.replica_shape[0] // job.groups}" if job.groups > 1 else ""


def divided(job: Job) -> str:
    """What is to be said of micro-batches: nothing of a single one."""
    return f", {job.data.accumulate} micro-batches of {job.data.batch_size}" if job.data.accumulate > 1 else ""


def dealt(job: Job) -> str:
    """What is to be said of local steps."""
    local, sequences = job.local, job.replica_shape[0]
    who = "1 replica makes" if local.replicas == 1 else f"{local.replicas} replicas, {sequences} sequences each, make"
    nesterov = f"Nesterov step ({local.outer_learning_rate:g}, momentum {local.outer_momentum:g})"
    return f"{who} {local.local_steps} local steps, then a {nesterov}"


def describe(job: Job, scheduler: Scheduler, chunks: str) -> str:
    """What will be run, for the terminal.

    chunks   how many of which size, and why
    """
    known = facts(job)
    lines = {
        "model": known["model"],
        "data": job.tokens.description,
        "batch": known["batch"],
        **{name: text for name, text in known.items() if name == "replicas"},
        "chunks": chunks,
        "precision": known["precision"],
        "scheduler": getattr(scheduler, "description", scheduler),
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())
