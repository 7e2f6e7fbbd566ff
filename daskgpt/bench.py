"""Time training steps on random tokens.

step        milliseconds from a batch to its loss with everything updated: median and quartiles of the timed steps
forward, backward, update
            milliseconds a step in which kernels of that pass ran, divided by the number of threads. They come from
            separate steps, in which the start and end of each kernel call is recorded. The sums of a weight gradient
            count as backward if they are tasks, and as update if they are one task with AdamW (the schedulers sync and
            threads, which update in place)
overhead    1 - busy / (threads * wall): the share of the threads' time in the recorded steps in which no kernel ran.
            Of the threads' time, inside = between the kernels of a task, scheduling = a task was ready and a thread
            free, waiting = no task was ready
overlap     the share of the time in which two or more layers ran at once, and steps_overlap two or more steps
critical_path
            milliseconds a step of the longest chain of tasks that wait for each other
rate        operations a second of the matrix products, 6 N B T + 6 L C B T (T + 1) a step (N values in the matrices of
            products, each multiplied and added in the forward pass and twice in the backward pass; causal attention
            reads (T + 1) / 2 tokens on average)
peak        memory during the timed steps: this process, and the worker processes of a cluster

Speedup on more threads is measured by `python -m daskgpt.study --threads 1,2,4`; with --batch-chunk auto,
--sequence-chunk auto and --grain auto, chunks and grain are chosen for each number of threads.
--calibrate measures the costs from which `python -m daskgpt.train --plan` predicts the time of a step.
--json prints a line of JSON instead, with command, date, machine, versions and every turn.
In a checkout of the repository, `python benchmarks/against.py` compares with other programs, and
`python benchmarks/generation.py` times text generation.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext, redirect_stdout

from daskgpt.config.flags import Parser, run_command
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.profiling.calibrate import calibrate
from daskgpt.profiling.measure import BenchConfig, TimedEngine, figure, job_of, measure_steps, origin
from daskgpt.schedulers import machine
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.training.job import compile_kernels


def main(arguments: list[str]) -> int:
    """Check everything, measure, and print it."""
    flags = Parser(prog="daskgpt.bench", description=__doc__)
    text = "measure kernels and tasks for train --plan, in two to three minutes; other flags are ignored"
    flags.add_argument("--calibrate", action="store_true", help=text)
    flags.add_argument("--json", action="store_true", help="print the measurement as a line of JSON")
    values, config, options, dataflow = flags.read(arguments, ModelConfig, BenchConfig, DataflowConfig)
    if values.calibrate:
        print(f"calibration written to {calibrate().save()}")
        return 0
    job = job_of(config, options, dataflow)
    require_scheduler(job.dataflow.scheduler)
    with redirect_stdout(sys.stderr) if values.json else nullcontext():  # standard output has one line
        others = machine.busy_cores()
        if others > machine.BUSY:
            print(f"note: other programs keep {others:.1f} cores busy; the figures show a share of the machine only")
        compile_kernels(job.precision, job.uses)
        with open_scheduler(job.dataflow.scheduler, job.dataflow.threads) as scheduler:
            steps = TimedEngine(job, scheduler, options.seed)
            measured = measure_steps(steps, options.warmup, options.steps, options.recorded)
            settings = {"preset": values.preset, "others_cores": others, **steps.settings, "threads": scheduler.threads}
    settings["loss"], made = steps.losses[options.warmup + options.steps - 1], origin()
    if values.json:
        command = shlex.join(["python", "-m", "daskgpt.bench", *(word for word in arguments if word != "--json")])
        figures = {name: figure(*values_and_unit) for name, values_and_unit in measured.items()}
        print(json.dumps({"command": command, **made, "figures": figures, "settings": settings}))
        return 0
    for name, value in {"processor": made["machine"]["processor"], **settings}.items():
        print(f"{name:14} {value}")
    for name, (spread, unit) in measured.items():
        print(f"{name:14} {spread.text(unit)}")
    return 0


if __name__ == "__main__":
    run_command(main)
