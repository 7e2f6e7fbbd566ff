"""A job: model, data, optimizer, schedule and length of a run, checked before anything is computed or written."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from daskgpt.config.errors import number_of, refusal, require, require_divisor
from daskgpt.config.files import expanded
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.settings import digests_of_modules
from daskgpt.config.stopping import heeding_interrupts
from daskgpt.data.dataset import Dataset
from daskgpt.data.source import STANDARD_LIBRARY
from daskgpt.graph.sum_order import groups_of_batch
from daskgpt.kernels.compilation import CACHE, all_cached, compile_all
from daskgpt.model.layers import CHOICES, chosen
from daskgpt.model.optimizer import optimizer_of
from daskgpt.model.parameters import Tensor, parameter_count, trained_tensors, value_count
from daskgpt.model.precision import FLOAT32, Precision, precision_of, products_of
from daskgpt.model.step import as_weights
from daskgpt.schedulers.machine import memory_limit, usable_cores
from daskgpt.schedulers.opening import LOCAL_SCHEDULERS, chosen_address
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import PACKAGED

Say = Callable[[str], None]  # prints a line
LENGTHS = ("steps", "epochs", "tokens")  # settings that decide the number of steps
COMPILING = threading.RLock()  # held by the run that compiles kernels; others of this process find them compiled


def require_one_length(given: Mapping[str, Any]) -> None:
    """Check that the length of a run is given in one way at most. Errors   ValueError"""
    lengths = {name: given[name] for name in LENGTHS if given.get(name)}
    advice = f"Leave out {' or '.join(f'--{name}' for name in lengths)}."
    require(len(lengths) < 2, "train", "a run must have one length", lengths, advice)


@dataclass(frozen=True)
class Job:
    """All settings of a run, checked against each other.

    dataset   the tokens to train on; None if they come from elsewhere, as in a benchmark
    modules   digests of modules from outside of the package whose rows the configuration names

    Errors    ValueError if settings do not fit each other
    """

    config: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    dataflow: DataflowConfig
    run: RunConfig
    dataset: Dataset | None = None
    modules: Mapping[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        require_one_length({"epochs": self.run.epochs, "tokens": self.run.tokens})
        for chunk, whole in (("batch_chunk", "batch_size"), ("sequence_chunk", "sequence_length")):
            if part := getattr(self.dataflow, chunk):
                require_divisor("DataflowConfig", chunk, part, whole, getattr(self.data, whole))
        got = {"sequence_length": self.data.sequence_length, "positions": self.config.positions}
        rule = "a sequence must not be longer than the model's positions"
        advice = "Shorten the sequence." if self.run.init else "Shorten the sequence or give more --positions."
        require(got["sequence_length"] <= got["positions"], "train", rule, got, advice)
        optimizer_of(self.optimizer.optimizer)
        for name in CHOICES:
            chosen(self.config, name)
        object.__setattr__(self, "modules", self.modules_here())
        chosen_address(self.dataflow.scheduler)

    def modules_here(self) -> dict[str, str]:
        """Return `modules` as they are in this process."""
        return digests_of_modules([self.optimizer.optimizer, *(getattr(self.config, name) for name in CHOICES)])

    @property
    def tokens(self) -> Dataset:
        """The dataset. Errors   RuntimeError for a job without one"""
        if self.dataset is None:
            raise refusal(RuntimeError, "Job", "training needs a dataset", "dataset=None", "Make the job with one.")
        return self.dataset

    @property
    def steps(self) -> int:
        """Number of steps of the run. Without the data, a length in epochs counts as `run.steps`."""
        length = self.data.sequence_length
        epoch = self.dataset.epoch(length) * length if self.dataset else 0
        # As a decimal: of the float 0.07, 100 sequences would be a little more than 7.
        tokens = self.run.tokens or math.ceil(Fraction(str(self.run.epochs)) * epoch)
        return -(-tokens // math.prod(self.batch_shape)) if tokens else self.run.steps

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return the fields of every configuration by its name, with absolute paths. What is left on `auto` are dials:
        another machine resolves them in its own way.
        """
        data, run, encoding = self.data, self.run, self.tokens.encoding_name
        sources = {"data": data.data, "validation_data": data.validation_data}
        places = {name: path if path == STANDARD_LIBRARY else from_root(path) for name, path in sources.items()}
        init = run.init if run.init in PACKAGED else from_root(run.init)
        return {
            "model": asdict(self.config),
            "data": asdict(data) | places | {"encoding": encoding, "order": self.order, "groups": self.groups},
            "optimizer": asdict(self.optimizer),
            "dataflow": asdict(self.dataflow) | {"precision": self.precision.name},
            "run": asdict(run) | {"init": init, "out": from_root(run.out), "steps": self.steps},
        }

    @property
    def order(self) -> str:
        """The order in which steps take sequences; `auto` is resolved."""
        return self.tokens.order if self.data.order == "auto" else self.data.order

    @property
    def scheduler(self) -> str:
        """The name or address of the scheduler; `auto` is resolved."""
        return chosen_address(self.dataflow.scheduler)

    @property
    def precision(self) -> Precision:
        """The precision of products."""
        return precision_of(self.dataflow.precision)

    @property
    def uses(self) -> frozenset[str]:
        """Uses of kernels that not every run has, see `Kernel`."""
        return self.config.uses | {self.optimizer.optimizer, "dropout" if self.optimizer.dropout else ""}

    @property
    def groups(self) -> int:
        """The number of groups of sequences by which a batch is summed."""
        return groups_of_batch(*self.batch_shape, self.data.groups)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Sequences of a step, and tokens of a sequence."""
        return self.data.sequences, self.data.sequence_length

    @property
    def micro_shape(self) -> tuple[int, int]:
        """Shape of a micro-batch (of the batch, without accumulation)."""
        return self.data.batch_size, self.data.sequence_length

    @property
    def moments(self) -> dict[str, Tensor]:
        """The arrays of the state beside the weights: "MOMENT.NAME" -> tensor of the model."""
        return optimizer_of(self.optimizer.optimizer).state(trained_tensors(self.config))

    @property
    def state(self) -> dict[str, Tensor]:
        """The arrays that steps change: "weight.NAME" and "MOMENT.NAME" -> tensor of the model."""
        return as_weights(trained_tensors(self.config)) | self.moments


def require_memory(job: Job, workers: Sequence[int] = ()) -> None:
    """Refuse a job that cannot fit into the memory of this machine or of a cluster's workers, before it is built.

    Only certain needs count: weights and moments, and one activation a block of a micro-batch. `--plan` counts more.

    workers   bytes that each worker of a cluster may use, 0 for no limit; each has all weights, and a share of the rest

    Errors    ValueError
    """
    (limit, whose), ranks = memory_limit(), 1
    if workers:
        ranks = min(len(workers), job.groups)
        limit, whose = 0 if 0 in workers else max(workers), f"a worker ({ranks} share the batch)"
    elif job.scheduler not in LOCAL_SCHEDULERS:
        limit = 0
    if not limit:
        return
    kinds = len({name.partition(".")[0] for name in job.moments})
    held = 4 * value_count(job.config) + 4 * value_count(job.config, trained=True) * kinds / ranks
    kept = 4 * math.prod(job.micro_shape) / ranks * job.config.channels * (job.config.blocks + 1)
    digits = 1 if limit >= 1e9 else 3
    rule = f"weights, moments and activations must fit into the {limit / 1e9:,.{digits}f} GB of {whose}"
    got = f"at least {held / 1e9:,.{digits}f} GB of weights and moments, {kept / 1e9:,.{digits}f} GB of activations"
    advice = "Make the model or the batch smaller."
    if workers:
        advice = "Start workers with more memory (--memory-limit), or make the model or the batch smaller."
    require(held + kept <= limit, "train", rule, got, advice)


def from_root(path: str) -> str:
    """Return an absolute path; an empty one stays empty."""
    return str(expanded(path).resolve()) if path else ""


def compile_kernels(precision: Precision = FLOAT32, uses: Container[str] | None = None) -> None:
    """Compile the kernels that Numba has not cached yet, on all cores, and print that the first start takes longer."""
    start = time.perf_counter()
    wanted = precision.dtype, precision.packed, uses
    if not all_cached(*wanted):
        when = "first start on this machine, " if not CACHE.problem else ""
        print(f"compiling kernels ({when}10 to 30 seconds) ...", file=sys.stderr, flush=True)
    with COMPILING, heeding_interrupts() as check:
        compile_all(*wanted, after_each=check, processes=usable_cores())
    if message := CACHE.told(time.perf_counter() - start):
        print(message, file=sys.stderr, flush=True)


def facts(job: Job) -> dict[str, str]:
    """Return descriptions of model, batch and precision, for people."""
    c, data = job.config, job.data
    batch_size, length = job.batch_shape
    batch = f"{batch_size} x {length} tokens"
    batch += f", summed in {job.groups} groups of {batch_size // job.groups}" if job.groups > 1 else ""
    batch += f", {data.accumulate} micro-batches of {data.batch_size}" if data.accumulate > 1 else ""
    trained = f", {value_count(c, trained=True):,} of them trained" if c.lora else ""
    sizes = ", ".join([number_of(c.blocks, "block"), number_of(c.heads, "head"), number_of(c.channels, "channel")])
    return {
        "model": f"{parameter_count(c):,} parameters{trained}: {sizes}, "
        f"vocabulary {c.vocabulary}, positions {c.positions}" + (f", {c.beyond_gpt2()}" if c.beyond_gpt2() else ""),
        "batch": batch,
        "precision": f"{job.precision.name}: {products_of(job.precision)}",
    }


def describe(job: Job, scheduler: Scheduler, chunks: str) -> str:
    """Return the header of a run.

    chunks   number, size and origin of the chunks
    """
    rows = facts(job) | {"data": job.tokens.description, "chunks": chunks, "scheduler": scheduler.description}
    order = ("scheduler", "model", "data", "batch", "chunks", "precision")
    return "\n".join(f"{name:10} {rows[name]}" for name in order)
