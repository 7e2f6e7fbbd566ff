"""Train GPT-2: `python -m daskgpt.train --help`."""

from __future__ import annotations

import math
import shlex
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from daskgpt.config.errors import number_of, require, require_known, whole_number
from daskgpt.config.flags import Parser, add_flags, called, from_flags, given_flags, run_command
from daskgpt.config.model import PRESETS, ModelConfig, preset
from daskgpt.config.run import RECIPES, DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.stopping import STOPPED
from daskgpt.data.source import STANDARD_LIBRARY
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation.sampler import readable, sample, shown
from daskgpt.profiling.plan import predict
from daskgpt.profiling.recorder import TimelineCallback, TimelineConfig
from daskgpt.schedulers.opening import resume_flags
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import BEST, step_of
from daskgpt.training.engine import State
from daskgpt.training.job import LENGTHS, Job, require_one_length
from daskgpt.training.run_folder import new_folder
from daskgpt.training.start import (
    SECTIONS,
    NoStepsLeft,
    Start,
    WarmStart,
    changeable,
    may_not_change,
    new_run,
    resumed_run,
)
from daskgpt.training.trainer import Callback, Observers, Result, train

DEFAULT = "tiny"  # the preset
EPILOG = (
    f"Exit codes: 0 = all steps are done; {STOPPED} = stopped by Ctrl-C, SIGTERM or SIGHUP after a step and a "
    "checkpoint, or the cluster was lost and there is a checkpoint (--resume continues); 130 = stopped at once by a "
    "second Ctrl-C, or by one before the first step; 141 = the reader of the output has ended (`| head`); 2 = an error."
)


def parser() -> Parser:
    """Return the parser of all flags of a run."""
    flags = Parser(prog="daskgpt.train", description="Train a language model as a Dask dataflow.", epilog=EPILOG)
    recipes = "speedrun (tiny to 1.88 nats per character of tinyshakespeare), finetune (further training of --init)"
    sizes = ", ".join(PRESETS)
    flags.add_argument("--preset", help=f"size of the model: {sizes} (default: {DEFAULT}); or a recipe: {recipes}")
    flags.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a run in its folder from its newest good checkpoint; settings stay, except those that are given "
        f"again: {', '.join(changeable())}; --data may name another place of the same data. A cluster's address does "
        "not stay: give --scheduler again",
    )
    text = "print tasks, memory and predicted time of a step, and whether it fits in memory, without running it"
    flags.add_argument("--plan", action="store_true", help=text)
    text = "with --plan: number of workers of --threads threads (default 1) that share the step; prints what each "
    flags.add_argument("--workers", type=int, help=f"{text}sends, runs and holds")
    for config in (*SECTIONS.values(), TimelineConfig):
        add_flags(flags, config)
    return flags


def parsed(arguments: list[str]) -> Namespace:
    """Return the values of a command line, with the settings of the recipe that it names.

    The recipe decides the length of the run only if no flag does. `shorten` says whether it decides the length of
    sequences, which may then be shortened to the positions of a model; `asked` has the flags of the data alone.

    Errors   ValueError for an unknown preset, or if a recipe without a size has no model to start from
    """
    values = parser().parse_args(arguments)
    values.shorten, values.asked = not hasattr(values, "sequence_length"), given_flags(DataConfig, values)
    if values.preset is not None:
        require_known(values.preset, [*PRESETS, *RECIPES], "train", "preset")
    recipe = RECIPES.get("" if values.resume else values.preset)
    if recipe is None:
        return values
    got = {"preset": values.preset, "init": getattr(values, "init", "")}
    values.preset = recipe.get("preset")
    rule = "the recipe must have a model to start from"
    require(bool(values.preset or got["init"]), "train", rule, got, "Add --init with a folder or file of one.")
    left_out = LENGTHS if any(hasattr(values, name) for name in LENGTHS) else ()
    for name, value in recipe.items():
        if not hasattr(values, name) and name not in left_out:
            setattr(values, name, value)
    return values


def main(arguments: list[str]) -> int:
    """Check everything, then train, then report."""
    begin = time.perf_counter()
    values = parsed(arguments)
    shown: TimelineConfig = from_flags(TimelineConfig, values)
    got = {"workers": values.workers}
    require(values.plan or values.workers is None, "plan", "--workers must come with --plan", got, "Add --plan.")
    if values.workers is not None:
        whole_number(values.workers, "plan", "workers", 1)
    given = given_flags(TimelineConfig, values)
    rule, advice = "--plan must come without a timeline", "It runs no step: leave it out."
    require(not (values.plan and shown.timeline), "plan", rule, given, advice)
    rule, advice = "--timeline-steps must come with a timeline", "Add --timeline."
    require(bool(shown.timeline) or not given, "timeline", rule, given, advice)
    callbacks: list[Callback] = [TimelineCallback(shown)] if shown.timeline else []
    if values.resume:
        if values.preset:
            raise may_not_change(values.resume, "preset", values.preset)
        changes = {name: given_flags(kind, values) for name, kind in SECTIONS.items()}
        try:
            job, start = resumed_run(values.resume, changes, connects=not values.plan)
        except NoStepsLeft as complete:  # a script that starts a run again until it ends with 0 must come to an end
            print(f"nothing to do: {complete}")
            return 0
    else:
        job, start = run_of(values)
    if values.plan:
        plan = predict(job, values.workers or 0, timed=True)
        print(replace(plan, libraries=plan.libraries - start.loaded_bytes))
        return 0
    sampler = partial(shown_sample, job) if job.run.sample_tokens else None
    result = train(job, start, Observers(callbacks=callbacks, sampler=sampler))
    report(job, result, time.perf_counter() - begin)
    return STOPPED if result.stopped else 0


def run_of(values: Namespace) -> tuple[Job, Start]:
    """Return the job of a new run by its flags, and what it starts with: random values or a model."""
    require_one_length(given_flags(RunConfig, values))
    run, numbers = from_flags(RunConfig, values), given_flags(ModelConfig, values)
    run, options = replace(run, out=run.out or new_folder()), {"asked": values.asked, "connects": not values.plan}
    settings = {"optimizer": from_flags(OptimizerConfig, values), "dataflow": from_flags(DataflowConfig, values)}
    settings |= {"run": run, "data": from_flags(DataConfig, values)}
    if not run.init:
        rule, advice = "adapters must have a model to adapt", "Add --init with a folder or file of one."
        require(not numbers.get("lora"), "train", rule, {"lora": numbers.get("lora")}, advice)
        name = values.preset or DEFAULT
        fitting = {"positions": settings["data"].sequence_length} if name == DEFAULT else {}  # as long as its sequences
        return new_run(preset(name, **fitting | numbers), settings, sizes=numbers, **options)
    origin = WarmStart(run.init)
    if values.preset:
        size = preset(values.preset)
        numbers = {"blocks": size.blocks, "heads": size.heads, "channels": size.channels} | numbers
    lora = numbers.pop("lora", 0)
    origin.check_size(numbers, "train", "--init decides the size of the model", "Leave these flags out.")
    data, config = origin.data_config(given_flags(DataConfig, values)), replace(origin.config, lora=lora)
    if values.shorten:
        data = replace(data, sequence_length=min(data.sequence_length, config.positions))
    settings["data"] = data
    return new_run(config, settings, origin, **options)


def report(job: Job, result: Result, seconds: float) -> None:
    """Print the losses, the time and where the run was written."""
    print(f"{result}, {seconds:.1f} s in all")
    bits = result.bits_a_byte
    if job.tokens.encoding_name != "bytes" and not math.isnan(bits):
        print(f"validation by the text: {bits * math.log(2):.3f} nats a byte, {bits:.3f} bits")
    if result.checkpoint:
        folder = str(result.checkpoint.parent)
        print(f"run written to {folder}")
        best = result.checkpoint.parent / BEST
        if best.is_symlink() and (step := step_of(best.resolve())) != step_of(result.checkpoint):
            print(f"the lowest validation loss was after {number_of(step, 'step')}: {best}")
        if result.stopped:
            print(f"continue with: {called('train')} {resume_flags(folder, job.dataflow.scheduler)}")
            return
        command = f"{called('generate')} {shlex.quote(folder)}"
        if job.tokens.prompt:
            print(f"chat with it: {command} --interactive")
        else:
            print(f'write text with it: {command} --prompt "{"def " if job.data.data == STANDARD_LIBRARY else "The "}"')


def shown_sample(job: Job, scheduler: Scheduler, state: State) -> str:
    """Return generated text between two lines, of which the first has the number of steps.

    For a run on pairs, the text is a held-out prompt and the response of the model.
    """
    encoding, steps, asked = get_encoding(job.tokens.encoding_name), state.step, job.tokens.prompt
    options: dict[str, Any] = {"temperature": 0.8, "seed": job.run.seed, "context": job.data.sequence_length}
    end = encoding.eot_token if asked else None
    prompt = asked or encoding.encode("\n").tolist() or [encoding.eot_token]
    parameters = state.parameters(scheduler)
    tokens = list(sample(job.config, parameters, prompt, job.run.sample_tokens, end=end, **options))
    text = "".join(readable(encoding, [*asked, *shown(encoding, tokens, end)]))
    head = f"--- sample after {number_of(steps, 'step')} "
    return f"{head:-<71}\n{text}\n{'-' * 71}"


if __name__ == "__main__":
    run_command(main)
