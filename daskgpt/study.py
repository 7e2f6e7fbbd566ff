"""Run training steps on random tokens under many settings of the dataflow, and compare them.

Each run is a fresh process on as many cores as it has threads. A study is a folder: results.csv (a row per run),
figures, and report.md with the conclusions.

Without any of the lists below, points differ from one base point (all cores, barrier step, grain block, half of the
sequences in a chunk) in one dial: threads and barriers, slicing, grain, scheduler and engine. With lists, every
combination of their values is run; with --threads alone, each barrier on these numbers of threads: fork-join, phases,
tasks, and barrier-free. Barrier layer always has grain kernel, and the scheduler sync one thread. Unless it is
--quick, a study predicts the times first, as --plan does, and calibrates a machine that is not yet calibrated.
--out FOLDER continues a study that was stopped; runs in its table are not repeated.
--record FILE adds the measurements to a file when the study is complete: a line of JSON per point, with command, date,
machine, versions, and the time of every run.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from daskgpt.config.errors import require
from daskgpt.config.flags import Parser, add_flags, add_model_flags, given_flags, run_command
from daskgpt.config.model import ModelConfig, preset
from daskgpt.profiling.records import append_records, check_records
from daskgpt.profiling.study import (
    BARRIERS,
    DIALS,
    ORDER,
    Rows,
    StudyConfig,
    Table,
    chosen_grid,
    default_grid,
    job_of_point,
    predicted_times,
    quick_grid,
    run_all,
    write_timelines,
)
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import require_scheduler
from daskgpt.training.job import compile_kernels

QUICK_MODEL: dict[str, Any] = {"blocks": 1, "heads": 2, "channels": 32, "vocabulary": 64, "positions": 16}
QUICK_STUDY: dict[str, Any] = {"batch_size": 4, "sequence_length": 16, "steps": 3, "seconds": 0.0, "repetitions": 1}


def parser() -> Parser:
    """Return all flags."""
    flags = Parser(prog="daskgpt.study", description=__doc__)
    flags.add_argument("--quick", action="store_true", help="a very small model, few points, one repetition")
    flags.add_argument(
        "--timelines",
        action="store_true",
        help="instead, write a timeline of each barrier and a page with all of them, in chunks of a quarter of the "
        "sequences; of --repetitions recordings of each barrier, the shortest is kept",
    )
    flags.add_argument("--record", metavar="FILE", help="add the measurements to a file, a line of JSON per point")
    lists = flags.add_argument_group("Values to combine, with commas between them")
    for name in DIALS:
        flag, kind = f"--{name.replace('_', '-')}", _words if name in ORDER else _numbers
        lists.add_argument(flag, type=kind, metavar="LIST", help=f"values of daskgpt.train's {flag}")
    add_model_flags(flags)
    add_flags(flags, StudyConfig)
    return flags


def main(arguments: list[str]) -> int:
    """Check everything, make the missing runs, and write the report."""
    values = parser().parse_args(arguments)
    model, study = settings(values)
    rule, got = "--record must come without --timelines", {"timelines": True, "record": values.record}
    require(not (values.timelines and values.record), "study", rule, got, "Timelines measure nothing: leave one out.")
    if values.record:
        check_records(values.record)
    cores = usable_cores()
    chosen = {dial: getattr(values, dial) for dial in DIALS if getattr(values, dial)}
    if chosen.keys() == {"threads"}:
        chosen["barrier"] = [*BARRIERS]
    grid = chosen_grid(study, cores, chosen) if chosen else (quick_grid if values.quick else default_grid)(study, cores)
    for point in grid:
        job_of_point(model, study, point)
    for address in {point.scheduler for point in grid}:
        require_scheduler(address)
    folder = Path(study.out or Path("studies") / time.strftime("%Y%m%d-%H%M%S"))
    if values.timelines:
        compile_kernels()
        write_timelines(model, study, folder)
        return 0
    from daskgpt.profiling.report import write_report  # refuses to be imported without matplotlib

    table = Table(folder / "results.csv", model, study)
    folder.mkdir(parents=True, exist_ok=True)
    compile_kernels()
    predicted = {} if values.quick else predicted_times(model, study, grid)
    failed = run_all(model, study, grid, table, lambda: write_report(folder, table.rows, values.quick), predicted)
    if values.record:
        append_records(values.record, Rows(table.rows).records(arguments))
    print(f"study written to {folder / 'report.md'}")
    return 1 if failed else 0


def settings(values: Namespace) -> tuple[ModelConfig, StudyConfig]:
    """Return the model and the settings that all runs share; --quick makes both small, except for given flags."""
    model, study = given_flags(ModelConfig, values), given_flags(StudyConfig, values)
    if values.quick:
        return preset("tiny", **QUICK_MODEL | model), StudyConfig(**QUICK_STUDY | study)
    return preset(values.preset, **model), StudyConfig(**study)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [0 if part == "auto" else int(part) for part in text.split(",")]


# argparse shows these names if a text is not such a list.
_words.__name__, _numbers.__name__ = "list of words", "list of numbers"


if __name__ == "__main__":
    run_command(main)
