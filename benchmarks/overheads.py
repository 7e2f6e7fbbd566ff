"""Measure the time of a default run that is not in steps: `python benchmarks/overheads.py --turns 3`.

Two programs take turns, each in its own process: README's first command, in a terminal, and the same steps bare, where
nothing is shown, logged, saved or sampled, and the only validation is the last one, which does not count. A table shows
the time of each part of the first, and its share of the time from the first step to the last.
Work during the steps (a checkpoint's writer, kernels recorded now and then) has no timer: it shows in the ratio of the
remaining times of both, turn by turn, which is 1 without such work.

Flags of `daskgpt.train` may follow, for both. `--metg` measures runtimes alone instead, see `task_sizes`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import task_sizes
from records import Figure, add_record_flag, check_record, record

import daskgpt
from daskgpt import train
from daskgpt.profiling.measure import Spread
from daskgpt.training.inference import Validation
from daskgpt.training.metrics import Finite, Progress, StepMetrics
from daskgpt.training.recovery import Recovery
from daskgpt.training.run_folder import RunFolder
from daskgpt.training.trainer import _Trainer

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from terminals import in_terminal

COLUMNS = 80
TOLD = "told.json"
AT_THE_END = "sample at the end"
# What a run does between its steps, and the methods that do it, none of which calls another.
PARTS: dict[str, list[tuple[type, str]]] = {
    "validation": [(Validation, "measure"), (Finite, "require")],
    "logs": [(StepMetrics, "of_window"), (Progress, "step"), (RunFolder, "log")],
    "checkpoints": [(_Trainer, "_save_if_due")],
    "recovery points": [(Recovery, "after_window")],
}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the seconds of each part of PARTS, to which its methods add."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                seconds[part] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for part, methods in PARTS.items():
            for owner, name in methods:
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield seconds


def whole(arguments: list[str], folder: Path) -> dict[str, Any]:
    """What the command trains and shows; seconds of the steps and of all parts."""
    told: dict[str, Any] = {}
    report, sample = train.report, train.shown_sample
    sampled = [0.0]  # seconds of each, the last one after the steps

    def shown(*arguments: Any) -> str:
        start = time.perf_counter()
        text: str = sample(*arguments)
        sampled.append(time.perf_counter() - start)
        return text

    def reported(job: Any, result: Any, seconds: float) -> None:
        report(job, result, seconds)
        besides = seconds_of_parts | {"samples": sum(sampled[:-1]), AT_THE_END: sampled[-1]}
        told.update(seconds=result.seconds, besides=besides, validation=result.validation_loss)

    train.report, train.shown_sample = reported, shown
    with timed_parts() as seconds_of_parts:
        assert train.main([*arguments, "--out", str(folder / "run")]) == 0
    return told


def bare(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The same steps of the same model, and nothing else."""
    job, _ = train.run_of(train.parsed(arguments))
    run = replace(job.run, validate_every=0, out="", snapshot_every=0)
    with timed_parts() as besides:
        result = daskgpt.fit(job.config, job.data, job.optimizer, job.dataflow, run, quiet=True)
    return {"seconds": result.seconds, "besides": besides, "validation": result.validation_loss}


WAYS = {"whole": whole, "bare": bare}


def turn(way: str, arguments: list[str]) -> dict[str, Any]:
    """One run, in a process and a terminal of its own."""
    with tempfile.TemporaryDirectory() as folder:
        code, shown = in_terminal([sys.executable, __file__, "--way", way, "--folder", folder, *arguments], COLUMNS)
        assert code == 0, shown
        told: dict[str, Any] = json.loads(Path(folder, TOLD).read_text())
        return told


def left(told: dict[str, Any]) -> float:
    """Seconds of the steps themselves."""
    return float(told["seconds"] - sum(seconds for part, seconds in told["besides"].items() if part != AT_THE_END))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--metg", action="store_true", help="size of a task at which half of the time is work")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_record_flag(parser)
    values, flags = parser.parse_known_args(arguments)
    flags = ["--scheduler", "threads", *flags]
    if values.way:
        (values.folder / TOLD).write_text(json.dumps(WAYS[values.way](flags, values.folder)))
        return
    if values.metg:
        task_sizes.table()
        return
    check_record(values.record)
    shares: dict[str, list[float]] = {}
    ratios = []
    for number in range(values.turns):
        ways = list(WAYS)[:: -1 if number % 2 else 1]
        runs = {way: turn(way, flags) for way in ways}
        full, alone = runs["whole"], runs["bare"]
        assert full["validation"] == alone["validation"], "what is no step has changed the training"
        for part, seconds in full["besides"].items():
            shares.setdefault(part, []).append(seconds / full["seconds"])
        ratios.append(left(full) / left(alone))
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in full["besides"].items())
        print(f"turn {number}: {full['seconds']:.1f} s, of which {parts}; what is left / bare {ratios[-1]:.3f}")
    told = {part: Spread.of(part_shares) for part, part_shares in shares.items()}
    print("\npart                 share of the run")
    for part, spread in told.items():
        ends = f" ({min(spread.values):.2%} .. {max(spread.values):.2%})" if spread.n > 1 else ""
        print(f"{part:<20} {spread.median:.2%}{ends}")
    print(f"{'what is left / bare':<20} {Spread.of(ratios).text('', 3)}")
    figures = {part: Figure.of(spread, "%", 100) for part, spread in told.items()}
    figures["what is left / bare"] = Figure.of(Spread.of(ratios), "")
    what = "Besides steps, of the time from the first step to the last"
    record(values.record, "benchmarks/overheads.py", arguments, figures, what, "the same steps and nothing else")


if __name__ == "__main__":
    main(sys.argv[1:])
