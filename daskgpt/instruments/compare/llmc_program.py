"""llm.c's side of a comparison: its compiled `train_gpt2` for processors, which prints how long each step took.

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

from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.instruments.compare.turns import Pair, PairedTurns, require_published_model
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.statistics import Spread

STEP = re.compile(r"step\s+\d+: train loss ([0-9.]+) \(took ([0-9.]+) ms")
# What it prints of its model, and the field of ours.
SIZES = {"num_layers": "blocks", "num_heads": "heads", "channels": "channels"}


def compare_llmc(steps: Steps, program: Path, warmup: int, timed: int) -> PairedTurns:
    """Half of our steps, the program's, the other half of ours; each half of ours makes a pair with theirs.

    Errors   FileNotFoundError for a path without a program, ValueError where its model is of another size,
             RuntimeError where it ends before it has printed enough steps
    """
    if not program.is_file():
        rule, advice = "llm.c's program must be a file", "Compile train_gpt2 and give its path."
        raise refusal(FileNotFoundError, "bench", rule, {"path": program}, advice)
    require_published_model(steps.job)
    threads = steps.scheduler.threads
    steps.run(warmup)
    steps.reset_peak()
    before = Spread.of(steps.run(timed)).median
    lines, their_peak = run_program(program, threads, steps.job.config, warmup + timed)
    after = Spread.of(steps.run(timed)).median
    theirs = Spread.of([seconds for _, seconds in lines[warmup:]])
    first = steps.losses[0], lines[0][0]
    pairs = [Pair(before, theirs.median), Pair(after, theirs.median)]
    return PairedTurns("llm.c", pairs, timed, len(pairs), (steps.peak(), their_peak), first, threads)


def run_program(program: Path, threads: int, config: GPT2Config, steps: int) -> tuple[list[tuple[float, float]], int]:
    """Loss and seconds of each of the program's first steps, and its peak memory in bytes. It is stopped after them."""
    process = subprocess.Popen(
        [str(program.resolve())],
        cwd=program.resolve().parent,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        found = read_steps(process.stdout, config, steps)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # Popen.kill might wait for it, and its memory would not be told
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
    if len(found) < steps:
        rule, got = f"llm.c's program must print {steps} steps", {"steps": len(found)}
        raise refusal(RuntimeError, "bench", rule, got, "Start it by hand in its folder and see what is missing.")
    return found, usage.ru_maxrss * 1024


def read_steps(lines: IO[str], config: GPT2Config, steps: int) -> list[tuple[float, float]]:
    """Loss and seconds of each step that the lines tell of, at most so many.

    Errors   ValueError where the lines tell of a model of another size
    """
    found: list[tuple[float, float]] = []
    for line in lines:
        name, _, number = line.partition(":")
        size = SIZES.get(name)
        if size:
            got = {size: getattr(config, size), f"llm.c's {size}": int(number)}
            rule = "both programs must train a model of one size"
            require(len(set(got.values())) == 1, "bench", rule, got, f"Give --{size} {int(number)}.")
        if match := STEP.search(line):
            found.append((float(match[1]), float(match[2]) / 1e3))
            if len(found) == steps:
                break
    return found
