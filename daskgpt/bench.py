"""Time training steps: `python -m daskgpt.bench --help`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.flags import Parser, add_flags, from_flags, given_flags, run_command
from daskgpt.config.model import PRESETS, GPT2Config, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments import machine, scaling
from daskgpt.instruments.compare.llmc_program import compare_llmc
from daskgpt.instruments.compare.messages import TorchOptions
from daskgpt.instruments.compare.torch_ddp import WORKERS, Programs, compare_ddp, compare_ddp_apart
from daskgpt.instruments.compare.torch_process import compare_torch, require_torch
from daskgpt.instruments.compare.turns import PairedTurns
from daskgpt.instruments.measure import Measurement, Steps, measure
from daskgpt.instruments.plan import check_workers, predict
from daskgpt.instruments.random_tokens import BenchConfig, job_of
from daskgpt.instruments.records import Figure, append_records, check_records, measured
from daskgpt.model.parameters import parameter_count
from daskgpt.schedulers.addresses import chosen_address, open_scheduler
from daskgpt.schedulers.local import usable_cores
from daskgpt.training.job import Job, compile_kernels
from daskgpt.training.job import facts as facts_of

DESCRIPTION = """\
Time training steps on random tokens.

step        milliseconds from a batch to its loss with everything updated: median, least and largest of the timed steps
forward, backward, update
            milliseconds a step in which kernels of that pass ran, divided by the number of threads. They come from
            steps of their own, in which the start and end of each kernel call is recorded. The sums that make a weight
            gradient count as backward where they are tasks, and as update where they are one task with AdamW (the
            schedulers sync and threads, which update in place)
overhead    1 - busy / (threads * wall): the share of the threads' time in the recorded steps in which no kernel ran
arithmetic  operations a second of the matrix products, 6 N B T + 6 L C B T (T + 1) a step (N values in the matrices
            of products, each multiplied and added in the forward pass and twice in the backward one; causal attention
            meets (T + 1) / 2 tokens on average), and their share of the rate that NumPy's BLAS reaches in this run on
            large float32 matrices and as many threads
memory      most bytes that were in memory in the timed steps: this process, and the worker processes of a cluster

--against torch runs the same model, tokens and optimizer in PyTorch, in a process of its own, the two taking turns.
--against torch-ddp takes turns of three: a cluster of workers of one thread each (--scheduler, or as many processes
here as --threads says, 2 otherwise), as many threads here, and as many processes of PyTorch here, each with an equal
part of the batch, in DistributedDataParallel over gloo; and says where the workers' time goes. With --apart one of
them is in memory at a time: each is started for each of its turns, takes --warmup steps, and then those that count.
--scaling times 1, 2, 4 ... threads (up to --threads, or to the cores), each in a process of its own on as many cores:
speedup is the time on one thread over the time on so many, efficiency speedup over threads. Chunks and grain are
chosen anew for each number of threads unless they are given.
--generation times how the model writes, a token at a time, in float32 and bfloat16: one text after 10 and after 900
tokens, and eight at once; how many bytes of weights, keys and values a step reads, and which share of the rate of a
copy on as many threads (bytes read and written) that is; in --steps turns of 16 tokens. With --against transformers
Hugging Face's GPT-2 takes turns with it, in a process of its own, the same weights in float32, its cache on.
--record FILE adds what was measured to a file, a line of JSON with command, date, machine, versions, and every turn.
--against llm.c PATH runs a compiled train_gpt2 of llm.c between two halves of ours; its batch is 4 x 64 tokens.
"""


@dataclass(frozen=True)
class Chunks:
    """Sequences and tokens in a chunk, and how many there are and why, for people."""

    size: tuple[int, int]
    told: str


def parser() -> Parser:
    """All flags."""
    flags = Parser(prog="daskgpt.bench", description=DESCRIPTION)
    flags.add_argument("--preset", default="tiny", help=f"size of the model: {', '.join(PRESETS)} (default: tiny)")
    flags.add_argument("--json", action="store_true", help="print one line of JSON instead")
    flags.add_argument("--record", metavar="FILE", help="add the measurement to a file, a line of JSON each")
    flags.add_argument(
        "--plan",
        action="store_true",
        help="print tasks and memory of a step and whether they fit here, and run nothing",
    )
    flags.add_argument(
        "--workers",
        type=int,
        help="with --plan: of a step that so many workers share, what each sends, and what one runs and holds",
    )
    flags.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar=("NAME", "PATH"),
        help="compare with torch, torch-ddp, or llm.c PATH; with --generation, with transformers",
    )
    flags.add_argument("--scaling", action="store_true", help="time 1, 2, 4 ... threads: speedup and efficiency")
    flags.add_argument("--generation", action="store_true", help="time how the model writes, a token at a time")
    flags.add_argument("--apart", action="store_true", help="with --against torch-ddp: one program in memory at a time")
    flags.add_argument("--torch-compile", action="store_true", help="with torch or torch-ddp: torch.compile the model")
    flags.add_argument("--torch-bf16", action="store_true", help="with torch or torch-ddp: bfloat16 autocast")
    add_flags(flags, GPT2Config, title="Numbers of the model that override the preset", of_preset=True)
    for config in (BenchConfig, DataflowConfig):
        add_flags(flags, config)
    return flags


def main(arguments: list[str]) -> int:
    """Check everything, run what is asked for, print it."""
    values = parser().parse_args(arguments)
    asked = from_flags(BenchConfig, values)
    config = preset(values.preset, **given_flags(GPT2Config, values))
    rule, got = "--record must come without --plan", {"plan": values.plan, "record": values.record}
    require(not (values.plan and values.record), "bench", rule, got, "A plan measures nothing: leave one out.")
    if values.record:
        check_records(values.record)
    take = Taking(values.record, arguments)
    if values.generation:
        return print_generation(config, asked, from_flags(DataflowConfig, values).threads, values, take)
    opponent = opponent_of(values.against)
    job = job_of(config, asked, dataflow_of(from_flags(DataflowConfig, values), opponent[0]))
    options = TorchOptions(compiled=values.torch_compile, bf16=values.torch_bf16)
    named = opponent[0] or "none"
    rule = "--torch-compile and --torch-bf16 must come with --against torch or torch-ddp"
    require(named.startswith("torch") or options == TorchOptions(), "bench", rule, {"against": named}, "Add it.")
    rule = "--apart must come with --against torch-ddp"
    require(not values.apart or named == "torch-ddp", "bench", rule, {"against": named}, "Add it.")
    rule, got = "--scaling must come without --plan and --against", {"plan": values.plan, "against": named}
    require(not (values.scaling and (values.plan or values.against)), "bench", rule, got, "Leave one out.")
    check_workers(values.workers, plan=values.plan)
    if values.plan:
        print(predict(job, values.workers or 0))
        return 0
    if values.scaling:
        print_scaling(job, asked, values.json, {"preset": values.preset}, take)
        return 0
    with quiet(values.json):
        others = machine.busy_cores()
        if others and others > machine.BUSY:
            print(f"note: other programs keep {others:.1f} cores busy; what is measured is a share of the machine")
        found, chunks = run(job, asked, opponent, options, apart=values.apart)
    facts = {"preset": values.preset, "others_cores": others} | setup(job, chunks)
    take(found.figures(), facts | turns_of(found), getattr(found, "name", ""))
    if isinstance(found, PairedTurns | Programs):
        print(json.dumps(found.record() | facts) if values.json else found.describe())
    else:
        print(json.dumps(record(job, found) | facts) if values.json else describe(job, found, chunks))
    return 0


@dataclass(frozen=True)
class Taking:
    """Where `--record` puts what a command line has measured; nowhere, where it is not given."""

    path: str | None
    arguments: list[str]

    def __call__(self, figures: dict[str, Figure], settings: dict[str, Any], against: str = "") -> None:
        """Errors   OSError where it cannot be written"""
        if self.path:
            known = {name: value for name, value in settings.items() if name not in ("cpu", "versions")}
            append_records(self.path, [measured("daskgpt.bench", self.arguments, figures, known, against)])


def turns_of(found: Measurement | PairedTurns | Programs) -> dict[str, Any]:
    """How many turns other programs disturbed, and how many were left out for that."""
    if isinstance(found, Measurement):
        return {"tasks": found.tasks, "grain": found.grain, "threads": found.threads}
    left_out = found.tried - len(found.pairs if isinstance(found, PairedTurns) else found.turns)
    return {"disturbed_turns": found.disturbed, "left_out_turns": left_out}


def print_generation(config: GPT2Config, asked: BenchConfig, threads: int, values: Namespace, take: Taking) -> int:
    """Check, run and print `--generation`."""
    from daskgpt.instruments.compare.transformers_process import require_transformers
    from daskgpt.instruments.generating import EARLY, TOKENS, measure_generation

    against = " ".join(values.against)
    rule, got = "--generation must come alone, or with --against transformers", {"against": against or "none"}
    alone = not (values.plan or values.scaling) and against in ("", "transformers")
    require(alone, "bench", rule, got | {"plan": values.plan, "scaling": values.scaling}, "Leave the others out.")
    rule, least = "a model that writes must have enough positions", EARLY + TOKENS
    require(config.positions >= least, "bench", rule, {"positions": config.positions}, f"Give {least} or more.")
    if against:
        require_transformers()
    with quiet(values.json):
        compile_kernels()
        found = measure_generation(config, threads, asked.seed, asked.warmup, asked.steps, bool(against))
    facts = {
        "preset": values.preset,
        "cpu": machine.processor(),
        "versions": machine.versions("numpy", "numba", "dask"),
    }
    settings = facts | {"threads": found.threads, "disturbed_turns": found.others}
    take(found.figures(), settings, found.theirs[0] if found.theirs else "")
    print(json.dumps(found.record() | facts) if values.json else found.describe())
    return 0


def print_scaling(job: Job, asked: BenchConfig, as_json: bool, facts: dict[str, Any], take: Taking) -> None:
    """Run and print `--scaling`."""
    runs = scaling.orders(job.config, asked, job.dataflow)
    with quiet(as_json):
        print(f"model        {parameter_count(job.config):,} parameters")
        print(f"batch        {facts_of(job)['batch']}")
        print(f"machine      {machine.processor()}, {usable_cores()} cores")
        compile_kernels(job.precision)
        found = scaling.scale(runs, lambda text: print(text, file=sys.stderr, flush=True))
        others = max((one.others_cores or 0.0 for one in found), default=0.0)
        if others > machine.BUSY:
            print(f"note: other programs kept {others:.1f} cores busy; what is measured is a share of the machine")
    batch = {"batch_size": asked.batch_size, "sequence_length": asked.sequence_length}
    take(scaling.figures(found), facts | batch | {"precision": job.precision.name, "others_cores": others})
    if as_json:
        where = {"cpu": machine.processor(), "cores": usable_cores(), "precision": job.precision.name}
        print(json.dumps(scaling.record(found) | facts | where))
    else:
        print(scaling.describe(found))


def opponent_of(words: list[str]) -> tuple[str, Path | None]:
    """The program to compare with, "" for none, and its path.

    Errors   ValueError unless it is nothing, torch, torch-ddp, or llm.c with a path; RuntimeError for PyTorch that is
             not installed
    """
    if not words:
        return "", None
    known = len(words) == (2 if words[0] == "llm.c" else 1) and words[0] in ("torch", "torch-ddp", "llm.c")
    rule, got = "--against must be torch, torch-ddp, or llm.c and the path of its program", {"against": " ".join(words)}
    require(known, "bench", rule, got, "Try --against torch.")
    if words[0] != "llm.c":
        require_torch(words[0])
    return words[0], Path(words[1]) if len(words) == 2 else None


def dataflow_of(dataflow: DataflowConfig, opponent: str) -> DataflowConfig:
    """Beside DistributedDataParallel a cluster runs: the one that is named, else one of this machine.

    Errors   ValueError for a scheduler that has no workers
    """
    if opponent != "torch-ddp":
        return dataflow
    address = chosen_address(dataflow.scheduler)
    if dataflow.scheduler == "auto" and address == "threads":
        address = "local"
    rule, got = "--against torch-ddp must run on a cluster", {"scheduler": address}
    require(address not in ("sync", "threads"), "bench", rule, got, "Leave --scheduler out, or name a cluster.")
    return replace(dataflow, scheduler=address, threads=dataflow.threads or WORKERS)


def run(
    job: Job, asked: BenchConfig, opponent: tuple[str, Path | None], options: TorchOptions, *, apart: bool
) -> tuple[Measurement | PairedTurns | Programs, Chunks]:
    """The measurement of a job, alone or against somebody, and the chunks of its steps."""
    name, path = opponent
    turns = asked.warmup, asked.steps, asked.recorded
    compile_kernels(job.precision)
    if apart:
        compared, steps = compare_ddp_apart(job, asked.seed, options, turns)
        return compared, Chunks(steps.steps.chunk, steps.steps.described_chunks)
    with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
        found: Measurement | PairedTurns | Programs
        if name == "torch-ddp":
            found, steps = compare_ddp(job, scheduler, asked.seed, options, turns)
            return found, Chunks(steps.steps.chunk, steps.steps.described_chunks)
        steps = Steps(job, scheduler, asked.seed)
        if name == "torch":
            found = compare_torch(steps, options, asked.warmup, asked.steps)
        elif path is not None:
            found = compare_llmc(steps, path, asked.warmup, asked.steps)
        else:
            found = measure(steps, asked.warmup, asked.steps, asked.recorded)
        return found, Chunks(steps.steps.chunk, steps.steps.described_chunks)


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Send what is printed on the way to standard error, so that standard output has one line."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def setup(job: Job, chunks: Chunks) -> dict[str, Any]:
    """What was run where, for a record."""
    (batch_size, length), (batch_chunk, sequence_chunk) = job.batch_shape, chunks.size
    return {
        "batch_size": batch_size,
        "sequence_length": length,
        "groups": job.groups,
        "batch_chunk": batch_chunk,
        "sequence_chunk": sequence_chunk,
        "scheduler": job.scheduler,
        "precision": job.precision.name,
        "cpu": machine.processor(),
        "versions": machine.versions("numpy", "numba", "dask", "distributed"),
    }


def record(job: Job, found: Measurement) -> dict[str, Any]:
    """The numbers of a measurement, for a machine to read."""
    step = found.step
    return {
        **step.fields("step_ms", 1e3, 3),
        **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in found.busy.items()},
        "tokens_per_s": round(job.batch_shape[0] * job.batch_shape[1] / step.median, 1),
        "gflops": round(found.rate / 1e9, 3),
        "matmul_gflops": round(found.matmul_rate / 1e9, 3),
        "matmul_share": round(found.rate / found.matmul_rate, 4),
        "tasks": found.tasks,
        "grain": found.grain,
        "overhead": round(found.idle, 4),
        "peak_gb": round(found.peak / 1e9, 4),
        "threads": found.threads,
    }


def describe(job: Job, found: Measurement, chunks: Chunks) -> str:
    """The same for a person."""
    batch_size, length = job.batch_shape
    step, tokens = found.step, batch_size * length
    precision = job.precision.name
    per = "thread" if found.threads == 1 else f"{found.threads} threads"
    lines = [
        ("model", f"{parameter_count(job.config):,} parameters"),
        ("batch", facts_of(job)["batch"]),
        ("chunks", chunks.told),
        (
            "tasks",
            f"{found.tasks:,} a step (grain {found.grain}), {job.scheduler}, {per}, {precision}",
        ),
        ("machine", machine.processor()),
        ("step", f"{_ms(step.median)}   {step.least * 1e3:,.1f} .. {step.largest * 1e3:,.1f}"),
        *((f"  {name}", _ms(seconds)) for name, seconds in found.busy.items()),
        ("overhead", f"{found.idle:10.1%}   of the threads' time without a kernel"),
        ("tokens", f"{tokens / step.median:10,.0f}   a second"),
        (
            "arithmetic",
            f"{found.rate / 1e9:10,.1f} GFLOP/s, {found.rate / found.matmul_rate:.0%} of the float32 matrix "
            f"product's {found.matmul_rate / 1e9:,.1f}",
        ),
        ("memory", f"{found.peak / 1e9:10.3f} GB at most"),
    ]
    return "\n".join(f"{name:12} {text}" for name, text in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10,.1f} ms"


if __name__ == "__main__":
    run_command(main)
