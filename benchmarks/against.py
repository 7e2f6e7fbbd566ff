"""Compare with other programs: `python benchmarks/against.py torch --preset gpt2 --batch-size 4`."""

from __future__ import annotations

from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compare.llmc_program import compare_llmc, require_program
from compare.pipes import TorchOptions
from compare.processes import TorchSide, TransformersSide, require_installed
from compare.programs import Apart, OnWorkers, Programs, WorkerTime, check_losses, require_published, warm_up
from compare.turns import take_turns, undisturbed
from generation import EARLY, TOKENS, Writing, measure_generation, random_prompts
from records import Figure, add_record_flag, check_record, record

from daskgpt.config.errors import require
from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.model import PRESETS, ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.generation.decoder import Weights
from daskgpt.model.parameters import initial_parameters
from daskgpt.profiling.measure import BenchConfig, Spread, TimedEngine, job_of
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import chosen_address, open_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job, compile_kernels

DESCRIPTION = """\
Let other programs compute the same model, in turns with daskgpt; --steps is the number of turns.

torch         training in PyTorch, in a process of its own: same model, tokens and optimizer
torch-ddp     turns of three: a cluster of workers of one thread each (--scheduler, or as many processes here as
              --threads says, 2 otherwise), as many threads here, and as many processes of PyTorch here, each with an
              equal part of the batch, in DistributedDataParallel over gloo; and where the workers' time goes. With
              --apart one of them is in memory at a time: each is started for each of its turns, takes --warmup steps,
              and then those that count.
llm.c PATH    a compiled train_gpt2 of llm.c between two halves of ours; its batch is 4 x 64 tokens
transformers  Hugging Face's program beside `generation.py`: the same weights in float32, its cache on
"""
NEEDS = {"torch": ["torch"], "torch-ddp": ["torch"], "transformers": ["transformers", "torch"], "llm.c": []}
WORKERS = 2  # of a local cluster, unless --threads says otherwise
STEPS_APART = 4  # of a turn of programs that are opened for it
THREE = {"ratio": ("cluster", "theirs"), "throughput_of_threads": ("threads", "cluster")}


def parser() -> Parser:
    flags = Parser(prog="against", description=DESCRIPTION)
    flags.add_argument("program", choices=NEEDS, help="what to compare with")
    flags.add_argument("path", type=Path, nargs="?", help="of llm.c's program")
    flags.add_argument("--preset", default="tiny", help=f"size of the model: {', '.join(PRESETS)} (default: tiny)")
    flags.add_argument("--apart", action="store_true", help="torch-ddp: one program in memory at a time")
    flags.add_argument("--torch-compile", action="store_true", help="torch and torch-ddp: torch.compile the model")
    flags.add_argument("--torch-bf16", action="store_true", help="torch and torch-ddp: bfloat16 autocast")
    add_record_flag(flags)
    add_flags(flags, ModelConfig)
    for config in (BenchConfig, DataflowConfig):
        add_flags(flags, config)
    return flags


def main(arguments: list[str]) -> int:
    """Check everything, compare, print, record."""
    values = parser().parse_args(arguments)
    checked(values)
    timing, dataflow = from_flags(BenchConfig, values), from_flags(DataflowConfig, values)
    config = from_flags(ModelConfig, values)
    if values.program == "transformers":
        figures, other, settings, text = compare_generation(config, timing, dataflow.threads)
    else:
        job = job_of(config, timing, on_cluster(dataflow) if values.program == "torch-ddp" else dataflow)
        compile_kernels(job.precision, job.uses)
        figures, other, settings, text = compare_steps(values, job, timing)
    what, settings = f"{values.preset} beside {values.program}", {"preset": values.preset} | settings
    record(values.record, "benchmarks/against.py", arguments, figures, what, other, **settings)
    print(text)
    return 0


def checked(values: Namespace) -> None:
    """Errors   ValueError for flags that do not fit the program, RuntimeError if it is not installed"""
    name = values.program
    for flag, programs in {"apart": ("torch-ddp",), "torch_compile": ("torch", "torch-ddp")}.items():
        used = values.torch_compile or values.torch_bf16 if flag == "torch_compile" else values.apart
        rule = f"--{flag.replace('_compile', '-compile and --torch-bf16')} must come with {' or '.join(programs)}"
        require(not used or name in programs, "against", rule, {"program": name}, "Leave it out.")
    rule, got = "llm.c, and nothing else, must come with the path of its program", {"program": name}
    require((values.path is None) == (name != "llm.c"), "against", rule, got | {"path": values.path}, "Try torch.")
    if values.path is not None:
        require_program(values.path)
    require_installed(name, *NEEDS[name])
    if values.record:
        check_record(values.record)


Found = tuple[dict[str, Figure], str, dict[str, Any], str]


def compare_steps(values: Namespace, job: Job, timing: BenchConfig) -> Found:
    """Return figures, the other program, settings and text of a comparison of training steps."""
    options = TorchOptions(compiled=values.torch_compile, bf16=values.torch_bf16)
    if values.apart:
        programs, steps = compare_ddp_apart(job, timing, options)
    else:
        with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
            if values.program == "torch-ddp":
                programs, steps = compare_ddp(job, scheduler, timing, options)
            else:
                steps = TimedEngine(job, scheduler, timing.seed)
                if values.program == "torch":
                    programs = compare_torch(steps, options, timing)
                else:
                    programs = compare_llmc(steps, values.path, timing.warmup, timing.steps)
    return programs.figures(), programs.other, steps.settings | programs.counts, programs.describe()


def compare_torch(steps: TimedEngine, options: TorchOptions, timing: BenchConfig) -> Programs:
    """Compare our steps and PyTorch's in turns, once their first losses have been found to agree.

    Errors   RuntimeError if its process fails, or the losses differ
    """
    require_published(steps.job)
    with TorchSide(steps.job, steps.seed, steps.scheduler.threads, options) as torch:
        sides = (steps, torch)
        for side in sides:
            side.run(1)
        first = steps.losses[0], torch.losses[0]
        check_losses(first, "bfloat16" if options.bf16 else steps.job.precision.name)
        turns = take_turns(sides, timing.steps, warm_up(sides, timing.warmup))
        used, peaks = undisturbed(turns, timing.steps), (steps.peak(), torch.peak())
        return Programs(("ours", "theirs"), options.describe(torch.version), used, len(turns), peaks, first)


def compare_ddp(
    job: Job, scheduler: Scheduler, timing: BenchConfig, options: TorchOptions
) -> tuple[Programs, TimedEngine]:
    """Compare steps on a cluster, on threads and of PyTorch's processes in turns, once their first losses agree.

    scheduler   of workers with one thread each

    Errors   RuntimeError if a process fails, or the losses differ; ValueError for a batch without equal parts, or
             workers with more threads than one
    """
    workers = checked_workers(job, scheduler)
    with (
        open_scheduler("threads", workers) as here,
        TorchSide(job, timing.seed, 1, options, workers) as torch,
    ):
        cluster = OnWorkers(job, scheduler, timing.seed)
        sides = (cluster, TimedEngine(on_threads(job, workers), here, timing.seed), torch)
        for side in sides:
            side.run(1)
        check_first(sides, job, options)
        turns = take_turns(sides, timing.steps, warm_up(sides, timing.warmup))
        name = options.describe(torch.version, f"{workers} processes")
        return three(name, turns, timing, sides, cluster), cluster


def compare_ddp_apart(job: Job, timing: BenchConfig, options: TorchOptions) -> tuple[Programs, TimedEngine]:
    """Compare the same with one program in memory at a time. Errors as of `compare_ddp`."""
    dataflow = job.dataflow
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        workers = checked_workers(job, scheduler)

    @contextmanager
    def with_cluster():
        with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
            yield OnWorkers(job, scheduler, timing.seed)

    @contextmanager
    def with_threads():
        with open_scheduler("threads", workers) as here:
            yield TimedEngine(on_threads(job, workers), here, timing.seed)

    def with_torch():
        return TorchSide(job, timing.seed, 1, options, workers)

    sides = tuple(Apart(opened, timing.warmup) for opened in (with_cluster, with_threads, with_torch))
    turns = take_turns(sides, timing.steps, STEPS_APART)
    check_first(sides, job, options)
    with with_cluster() as cluster:
        cluster.run(timing.warmup)
        name = options.describe(version("torch"), f"{workers} processes")
        return three(name, turns, timing, sides, cluster), cluster


def three(name: str, turns: list[Any], timing: BenchConfig, sides: tuple[Any, ...], cluster: TimedEngine) -> Programs:
    """Return what turns of a cluster, threads and PyTorch's processes have shown."""
    used, names = undisturbed(turns, timing.steps), ("cluster", "threads", "theirs")
    peaks, losses = tuple(side.peak() for side in sides), tuple(side.losses[0] for side in sides)
    return Programs(names, name, used, len(turns), peaks, losses, THREE, WorkerTime.of(cluster, timing.recorded))


def on_cluster(dataflow: DataflowConfig) -> DataflowConfig:
    """The cluster that is named, else one of this machine.

    Errors   ValueError for a scheduler that has no workers
    """
    address = chosen_address(dataflow.scheduler)
    if dataflow.scheduler == "auto" and address == "threads":
        address = "local"
    rule, got = "torch-ddp must run beside a cluster", {"scheduler": address}
    require(address not in ("sync", "threads"), "against", rule, got, "Leave --scheduler out, or name a cluster.")
    return replace(dataflow, scheduler=address, threads=dataflow.threads or WORKERS)


def on_threads(job: Job, threads: int) -> Job:
    """Return the same job in this process."""
    return replace(job, dataflow=replace(job.dataflow, scheduler="threads", threads=threads))


def checked_workers(job: Job, scheduler: Scheduler) -> int:
    """Return how many workers there are. Errors as of `compare_ddp`."""
    require_published(job)
    workers, threads = len(scheduler.addresses()), scheduler.threads
    rule, got = "the workers must have one thread each, as PyTorch's processes", {"workers": workers}
    require(threads == workers, "against", rule, got | {"threads": threads}, "Start them with --nthreads 1.")
    return workers


def check_first(sides: tuple[Any, ...], job: Job, options: TorchOptions) -> None:
    """Errors   RuntimeError if the first losses on the cluster and of PyTorch differ"""
    check_losses((sides[0].losses[0], sides[-1].losses[0]), "bfloat16" if options.bf16 else job.precision.name)


def compare_generation(config: ModelConfig, timing: BenchConfig, threads: int) -> Found:
    """Return figures, the other program, settings and text of a comparison of how models write.

    Errors   RuntimeError if transformers writes another text
    """
    threads = threads or usable_cores()
    compile_kernels()
    (prompt,) = random_prompts(config, 1, EARLY, timing.seed)
    weights = Weights(config, initial_parameters(config, timing.seed), "float32")
    beside = Writing(weights, 1, EARLY, threads, timing.seed, whole=True)
    with TransformersSide(config, timing.seed, threads, prompt) as theirs:
        for side in (beside, theirs):
            side.run(TOKENS)
        check_first_token(beside.written[0], theirs.written)
        measured, turns = measure_generation(config, timing, threads, [beside, theirs])
    columns = [Spread.of(turn.means[number] for turn in turns) for number in (-2, -1)]
    rate = Figure.of(Spread.of(their / our for our, their in zip(*(column.values for column in columns))), "")
    figures = measured.figures | {"theirs": Figure.of(columns[1], "ms", 1e3), "rate_float32": rate}
    text = f"{measured.describe()}\ntokens/s, daskgpt / theirs    float32   {rate.text(2)}"
    text += f"\n{theirs.name}: {figures['theirs'].text(1)} a token, prompt included"
    return figures, theirs.name, measured.settings, text


def check_first_token(ours: list[int], theirs: list[int]) -> None:
    """Errors   RuntimeError unless both programs begin with the same token; later ones may be near ties"""
    rule, got = "both programs must write the same first token", {"daskgpt": ours[0], "transformers": theirs[0]}
    require(ours[0] == theirs[0], "against", rule, got, "One of them computes another model.", RuntimeError)


if __name__ == "__main__":
    run_command(main)
