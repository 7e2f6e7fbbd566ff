"""What is to be trained, checked before anything is computed or written."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig, chunk_sizes
from daskgpt.data.dataset import Dataset
from daskgpt.data.text import STANDARD_LIBRARY
from daskgpt.graph.recording import Runs
from daskgpt.kernels.bfloat16 import outruns_float32, unit
from daskgpt.kernels.compilation import all_cached, compile_all
from daskgpt.model.parameters import parameter_count
from daskgpt.schedulers.addresses import resolved_address

LEAST_CHANNELS = 256  # from which on faster products gain more than rounding and packing cost


@dataclass(frozen=True)
class Job:
    """Everything a run needs, checked before anything is computed or written."""

    config: GPT2Config
    dataset: Dataset
    data: DataConfig
    optimizer: OptimizerConfig
    dataflow: DataflowConfig
    run: RunConfig
    chunk: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", chunk_sizes(self.data, self.dataflow))
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
        require(
            self.dataset.vocabulary <= self.config.vocabulary,
            "train",
            "the model must know every token id of the encoding",
            {
                "encoding": self.dataset.encoding_name,
                "ids": self.dataset.vocabulary,
                "vocabulary": self.config.vocabulary,
            },
            "Start from another model." if self.run.init else "Leave --vocabulary to the encoding.",
        )

    def resolved(self, scheduler: Runs, grain: str) -> dict[str, Any]:
        """Every configuration with nothing left to default or detection, by name; paths from the root.

        grain   what it is once chosen
        """
        batch_chunk, sequence_chunk = self.chunk
        dataflow = replace(
            self.dataflow,
            batch_chunk=batch_chunk,
            sequence_chunk=sequence_chunk,
            scheduler=resolved_address(self.dataflow.scheduler),
            grain=grain,
            precision=self.precision,
            threads=scheduler.threads,
        )
        data, run = self.data, self.run
        source = data.data if data.data == STANDARD_LIBRARY else _from_root(data.data)
        return {
            "model": self.config,
            "data": replace(data, data=source, encoding=self.dataset.encoding_name),
            "optimizer": self.optimizer,
            "dataflow": dataflow,
            "run": replace(run, init=_from_root(run.init), out=_from_root(run.out)),
        }

    @property
    def precision(self) -> str:
        """The operands of matrix products, with auto resolved."""
        return choose_precision(self.dataflow.precision, self.config.channels)[0]

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.data.batch_size, self.data.sequence_length


def _from_root(path: str) -> str:
    """A path that means the same from every folder; none stays none."""
    return str(Path(path).expanduser().resolve()) if path else ""


def compile_kernels(precision: str = "float32") -> None:
    """Compile what Numba has not cached yet, and say so: the first start on a machine takes longer."""
    bfloat16 = precision == "bfloat16"
    if not all_cached(np.float32, bfloat16):
        print("compiling kernels (first start on this machine, about half a minute) ...", file=sys.stderr, flush=True)
    compile_all(np.float32, bfloat16)


def choose_precision(wanted: str, channels: int) -> tuple[str, str]:
    """The precision to compute with, and why.

    Errors   ValueError or RuntimeError where DASKGPT_MATMUL names a unit that is unknown or missing
    """
    if wanted == "float32":
        return wanted, "products in float32"
    name = unit().name.lower()
    if wanted == "bfloat16":
        return wanted, f"operands of products rounded to bfloat16, multiplied by {name}, sums in float32"
    if not outruns_float32(unit()):
        return "float32", f"auto: products of bfloat16 ({name}) would not be faster on this processor"
    if channels < LEAST_CHANNELS:
        return "float32", f"auto: with {channels} channels (below {LEAST_CHANNELS}) bfloat16 would gain little"
    return "bfloat16", f"auto: {name} multiplies it faster than float32"


def facts(job: Job) -> dict[str, str]:
    """What is computed, by name: model, batch and precision."""
    c, (b, t), (batch_size, length) = job.config, job.chunk, job.batch_shape
    return {
        "model": f"{parameter_count(c):,} parameters: {c.blocks} blocks, {c.heads} heads, {c.channels} channels, "
        f"vocabulary {c.vocabulary}, positions {c.positions}",
        "batch": f"{batch_size} x {length} tokens, {batch_size * length // (b * t)} chunks of {b} x {t}",
        "precision": ": ".join(choose_precision(job.dataflow.precision, c.channels)),
    }


def describe(job: Job, scheduler: Runs) -> str:
    """What will be run, for the terminal."""
    known = facts(job)
    lines = {
        "model": known["model"],
        "data": job.dataset.description,
        "batch": known["batch"],
        "precision": known["precision"],
        "scheduler": getattr(scheduler, "description", scheduler),
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())
