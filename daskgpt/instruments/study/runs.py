"""Running a study: every run in a fresh process, the repetitions taking turns, so that noise hits all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tqdm import tqdm

from daskgpt.config.model import GPT2Config
from daskgpt.instruments.study.grid import Point, StudyConfig
from daskgpt.instruments.study.one import ONE_THREAD, Order
from daskgpt.instruments.study.table import Table


def run_all(
    model: GPT2Config, study: StudyConfig, points: Sequence[Point], table: Table, after: Callable[[], None]
) -> list[str]:
    """Run every point that the table lacks, repetition by repetition; return what failed, a line each.

    after   called after each repetition; once, where nothing was left to run
    """
    failed: list[str] = []
    todo = {n: [p for p in _order(points, study, n) if (p, n) not in table] for n in range(study.repetitions)}
    start, took = time.monotonic(), 0.0
    bar = tqdm(total=sum(map(len, todo.values())), unit="run", dynamic_ncols=True)
    for repetition, own in todo.items():
        elapsed = time.monotonic() - start
        if took and elapsed + took * len(own) > study.minutes * 60:
            bar.write(f"stopped after {repetition} of {study.repetitions} repetitions: --minutes {study.minutes:g}")
            break
        for point in own:
            bar.set_postfix_str(f"repetition {repetition + 1}: {point}")
            try:
                table.add(point, repetition, run_one(Order(model, study, point)))
            except RuntimeError as error:
                failed.append(f"{point}: {error}")
                bar.write(failed[-1])
            bar.update()
        if own:
            took = (time.monotonic() - start - elapsed) / len(own)
            after()
    bar.close()
    if not bar.total:
        after()
    return failed


def run_one(order: Order) -> dict[str, Any]:
    """The row of one run.

    Errors   RuntimeError with the last line that the run wrote, where it did not end well
    """
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    command = [sys.executable, "-m", "daskgpt.instruments.study.one", order.text()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"the run must end; got exit code {result.returncode}, {last}")
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def _order(points: Sequence[Point], study: StudyConfig, repetition: int) -> list[Point]:
    """Another order for each repetition, so that no point always follows the same one."""
    order = list(points)
    Random(f"{study.seed} {repetition}").shuffle(order)
    return order
