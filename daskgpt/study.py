"""Run training steps on random tokens under many settings of the dataflow, and compare them.

Each run is `python -m daskgpt.bench` in a fresh process, on as many cores as it has threads. A study is a folder:
results.jsonl (the line of `bench --json` per run, with machine, versions and loss), table.md (times, speedup,
efficiency, overlap and memory of every point), and a figure, threads.png and .svg (time, speedup and efficiency by the
number of threads). Speedups are over the sequential run: the fastest point on one thread. Table and figure name it.

Every combination of the values in the lists below is run. Without lists, and with --threads alone, that is each
barrier on these numbers of threads (1, 2, 4 ... up to all cores): fork-join, phases, tasks, and barrier-free. Settings
without a list are barrier step, grain block, half of the sequences in a chunk, and all cores. Barrier layer always has
grain kernel, and the scheduler sync one thread. --out FOLDER continues a study that was stopped; runs in its results
are not repeated.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

from daskgpt.config.errors import text_table
from daskgpt.config.files import written
from daskgpt.config.flags import Parser, add_flags, add_model_flags, given_flags, run_command
from daskgpt.config.model import ModelConfig, preset
from daskgpt.profiling.measure import job_of
from daskgpt.profiling.study import (
    BARRIERS,
    DIALS,
    ORDER,
    Results,
    StudyConfig,
    caption,
    flags_of,
    grid,
    run_all,
    table_of,
    thread_counts,
)
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import require_scheduler
from daskgpt.training.job import compile_kernels

QUICK_MODEL = {"blocks": 1, "heads": 2, "channels": 32, "vocabulary": 64, "positions": 16}
QUICK_STUDY = {"batch_size": 4, "sequence_length": 16, "steps": 3, "repetitions": 1}


def parser() -> Parser:
    """Return all flags."""
    flags = Parser(prog="daskgpt.study", description=__doc__)
    flags.add_argument(
        "--quick", action="store_true", help="a very small model, each barrier on one and two threads, one repetition"
    )
    lists = flags.add_argument_group("Values to combine, with commas between them")
    for name in DIALS:
        flag, kind = f"--{name.replace('_', '-')}", _words if name in ORDER else _numbers
        lists.add_argument(flag, type=kind, metavar="LIST", help=f"values of daskgpt.train's {flag}")
    add_model_flags(flags)
    add_flags(flags, StudyConfig)
    return flags


def main(arguments: list[str]) -> int:
    """Check everything, make the missing runs, and print the table."""
    values = parser().parse_args(arguments)
    numbers, settings = given_flags(ModelConfig, values), given_flags(StudyConfig, values)
    if values.quick:  # small, except for given flags
        numbers, settings = QUICK_MODEL | numbers, QUICK_STUDY | settings
    model, study, cores = preset(values.preset, **numbers), StudyConfig(**settings), usable_cores()
    chosen = {dial: getattr(values, dial) for dial in DIALS if getattr(values, dial)}
    chosen = chosen or {"threads": thread_counts(min(cores, 2) if values.quick else cores)}
    if chosen.keys() == {"threads"}:
        chosen["barrier"] = [*BARRIERS]
    points = grid(study, cores, chosen)
    for point in points:
        job_of(model, study, point)
    for address in {point.scheduler for point in points}:
        require_scheduler(address)
    importlib.import_module("daskgpt.profiling.plots")  # refuses to be imported without matplotlib
    folder = Path(study.out or Path("studies") / time.strftime("%Y%m%d-%H%M%S"))
    results = Results(folder / "results.jsonl", model, study)
    with written(folder, "study"):
        folder.mkdir(parents=True, exist_ok=True)
    compile_kernels()
    failures = run_all(points, results, flags_of({"preset": values.preset} | numbers))
    if results.rows:
        print("\n".join([text_table([cells[:4] for cells in table_of(results.points)]), *caption(results)]))
    print(f"study written to {folder / 'table.md'}")
    return 1 if failures else 0


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [0 if part == "auto" else int(part) for part in text.split(",")]


# argparse shows these names if a text is not such a list.
_words.__name__, _numbers.__name__ = "list of words", "list of numbers"


if __name__ == "__main__":
    run_command(main)
