"""llm.c's side of a comparison: its compiled CPU program `train_gpt2`, which prints the time of each step.

It cannot be stopped between two steps, so it runs once, between two halves of ours. Its batch is fixed when it is
compiled (4 sequences of 64 tokens in the published source); it reads its model and tokens from where it is started.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

from compare.processes import require_gpt2
from compare.programs import Programs, require_published
from compare.turns import Turn
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import ModelConfig
from daskgpt.profiling.measure import Spread, TimedEngine

STEP = re.compile(r"step\s+\d+: train loss ([0-9.]+) \(took ([0-9.]+) ms")
# What it prints of its model, and the field of ours.
SIZES = {"num_layers": "blocks", "num_heads": "heads", "channels": "channels"}


def compare_llmc(steps: TimedEngine, program: Path, warmup: int, timed: int) -> Programs:
    """Run half of our steps, the program's, the other half of ours; each half of ours makes a turn with theirs.

    Errors   ValueError if its model is of another size, RuntimeError if it prints too few steps
    """
    require_gpt2(steps.job.config)
    require_published(steps.job)
    steps.run(warmup)
    steps.reset_peak()
    before = Spread.of(steps.run(timed)).median
    lines, their_peak = run_program(program, steps.scheduler.threads, steps.job.config, warmup + timed)
    after = Spread.of(steps.run(timed)).median
    theirs = Spread.of([seconds for _, seconds in lines[warmup:]]).median
    turns = [Turn(((ours,), (theirs,))) for ours in (before, after)]
    first, peaks = (steps.losses[0], lines[0][0]), (steps.peak(), their_peak)
    return Programs(("ours", "theirs"), "llm.c", turns, len(turns), peaks, first)


def require_program(path: Path) -> None:
    """Errors   FileNotFoundError for a path without a program"""
    rule, advice = "llm.c's program must be a file", "Compile train_gpt2 and give its path."
    require(path.is_file(), "against", rule, {"path": path}, advice, FileNotFoundError)


def run_program(program: Path, threads: int, config: ModelConfig, steps: int) -> tuple[list[tuple[float, float]], int]:
    """Return loss and seconds of the program's first steps, and its peak memory in bytes; it is stopped after them."""
    process = subprocess.Popen(
        [str(program.resolve())],
        cwd=program.resolve().parent,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        reported = read_steps(process.stdout, config, steps)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # Popen.kill might wait for it, and its peak memory would be unknown
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
    if len(reported) < steps:
        rule, got = f"llm.c's program must print {steps} steps", {"steps": len(reported)}
        raise refusal(RuntimeError, "against", rule, got, "Start it by hand in its folder and see what is missing.")
    return reported, usage.ru_maxrss * 1024


def read_steps(lines: IO[str], config: ModelConfig, steps: int) -> list[tuple[float, float]]:
    """Return loss and seconds of each step that the lines report, at most so many.

    Errors   ValueError if the lines report a model of another size
    """
    reported: list[tuple[float, float]] = []
    for line in lines:
        name, _, number = line.partition(":")
        size = SIZES.get(name)
        if size:
            got = {size: getattr(config, size), f"llm.c's {size}": int(number)}
            rule = "both programs must train a model of one size"
            require(len(set(got.values())) == 1, "against", rule, got, f"Give --{size} {int(number)}.")
        if match := STEP.search(line):
            reported.append((float(match[1]), float(match[2]) / 1e3))
            if len(reported) == steps:
                break
    return reported
