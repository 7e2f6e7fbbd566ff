"""Train GPT-2: `python -m daskgpt.train --help`."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

from daskgpt.config import (
    PRESETS,
    DataConfig,
    DataflowConfig,
    GPT2Config,
    OptimizerConfig,
    RunConfig,
    preset,
)
from daskgpt.data.encodings import get_encoding
from daskgpt.flags import Parser, add_flags, from_flags, given_flags, run_command
from daskgpt.plan import describe_prediction, predict
from daskgpt.run_folder import RunFolder, load
from daskgpt.sampling import sample
from daskgpt.schedulers import open_scheduler
from daskgpt.training import Plan, Result, compile_kernels, describe, open_dataset, run_plan, start_values, train


def parser() -> Parser:
    """All flags of a run."""
    flags = Parser(prog="daskgpt.train", description="Train GPT-2 as a Dask dataflow.", allow_abbrev=False)
    flags.add_argument("--preset", default="tiny", help=f"size of the model: {', '.join(PRESETS)} (default: tiny)")
    flags.add_argument("--plan", action="store_true", help="print tasks and memory of a step, and run nothing")
    add_flags(flags, GPT2Config, title="Numbers of the model that override the preset", given_only=True)
    for config in (DataConfig, OptimizerConfig, DataflowConfig, RunConfig):
        add_flags(flags, config)
    return flags


def main(arguments: list[str]) -> int:
    """Check everything, then train, then show what came of it."""
    start = time.perf_counter()
    values = parser().parse_args(arguments)
    data, run = from_flags(DataConfig, values), from_flags(RunConfig, values)
    optimizer, dataflow = from_flags(OptimizerConfig, values), from_flags(DataflowConfig, values)
    overrides = given_flags(GPT2Config, values)
    preset(values.preset, **overrides)
    folder = RunFolder(run.out)
    dataset = open_dataset(data)
    if values.preset == "tiny":
        overrides = {"positions": data.sequence_length} | overrides
    config = model_config(values.preset, overrides, dataset.vocabulary, run.init)
    plan = Plan(config, dataset, data, optimizer, dataflow, run)
    if values.plan:
        print(describe_prediction(predict(plan)))
        return 0
    initial = start_values(plan)
    compile_kernels(plan.precision)
    with open_scheduler(plan.dataflow.scheduler, plan.dataflow.threads) as scheduler:
        print(describe(plan, scheduler), flush=True)
        result = run_plan(plan, scheduler, initial, folder)
    report(plan, result, time.perf_counter() - start)
    return 0


def model_config(name: str, overrides: dict[str, int], vocabulary: int, init: str) -> GPT2Config:
    """The preset with the user's numbers and the encoding's vocabulary; with --init, the model file's."""
    if init:
        config = load(init)[0]
        differing = {key: value for key, value in overrides.items() if getattr(config, key) != value}
        if differing:
            got = ", ".join(f"{key}={value}" for key, value in differing.items())
            raise ValueError(f"train: --init decides the size of the model; got {got}. Leave these flags out.")
        return config
    if "vocabulary" not in overrides and preset(name).vocabulary != vocabulary:
        overrides = {"vocabulary": vocabulary} | overrides
    return preset(name, **overrides)


def report(plan: Plan, result: Result, seconds: float) -> None:
    """A sample of text, the time, the losses and where the run was written."""
    if plan.run.sample_tokens:
        print("\n--- sample " + "-" * 60)
        print(sample_text(plan, result))
        print("-" * 71)
    first, last = result.losses[0], result.losses[-1]
    print(f"loss {first:.3f} -> {last:.3f}, validation {result.validation_loss:.3f} nats a token")
    print(f"{len(result.losses)} steps in {result.seconds:.1f} s, {seconds:.1f} s in all")
    print(f"run written to {result.model.parent if result.model else 'nowhere'}")


def sample_text(plan: Plan, result: Result) -> str:
    """Text that the trained model writes."""
    encoding = get_encoding(plan.dataset.encoding_name)
    with open_scheduler("sync") as scheduler:
        tokens = sample(
            result.config,
            result.parameters,
            scheduler,
            encoding.encode("\n"),
            plan.run.sample_tokens,
            context=plan.data.sequence_length,
            temperature=0.8,
            seed=plan.run.seed,
        )
        return encoding.decode(list(tokens))


class _CallableModule(types.ModuleType):
    """Python puts a submodule into its package, over the function `daskgpt.train`: so this one can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Result:
        return train(*arguments, **options)


if __name__ == "__main__":
    run_command(main)
sys.modules[__name__].__class__ = _CallableModule
