"""A timeline of each barrier, on the same chunks: what a study's figures sum up, to look at."""

from __future__ import annotations

from pathlib import Path

from daskgpt.config.model import GPT2Config
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.study.dials import BARRIERS
from daskgpt.instruments.study.grid import Point, StudyConfig, job_of_point
from daskgpt.instruments.study.numbers import model_name
from daskgpt.instruments.timeline import (
    Timeline,
    describe_summary,
    summarise,
    write_picture,
    write_side_by_side,
    write_timeline,
)
from daskgpt.schedulers.connect import open_scheduler
from daskgpt.schedulers.local import usable_cores


def write_timelines(model: GPT2Config, study: StudyConfig, folder: Path) -> list[Path]:
    """FOLDER/BARRIER.html and .json of every barrier, with as many steps as a window has, and FOLDER/barriers.html
    with all of them on one time scale, and FOLDER/fork_join.svg with the first and the last; return the pages, the
    common one last.

    A chunk holds a quarter of the sequences, so that there is something to overlap. A task is what one chunk does
    between two gathers, for fork-join one kernel. Of --repetitions recordings the shortest is kept: what other programs
    do only makes one longer.
    """
    chunk = max(study.batch_size // 4, 1)
    pages, timelines = [], dict[str, Timeline]()
    for barrier, look in BARRIERS.items():
        point = Point(usable_cores(), "threads", barrier, chunk, study.sequence_length, "segment").runnable()
        job = job_of_point(model, study, point)
        with open_scheduler("threads", point.threads) as scheduler:
            steps = Steps(job, scheduler, study.seed)
            steps.run(max(study.warmup, study.window))
            found = [steps.timeline(study.window) for _ in range(study.repetitions)]
        timeline = timelines[f"barrier {look.label}"] = min(found, key=_seconds)
        pages.append(write_timeline(timeline, folder / barrier)[1])
        print(f"\nbarrier {barrier}: {pages[-1]}\n{describe_summary(summarise(timeline))}")
    title = f"{study.window} steps of {model_name(model)}, {study.batch_size} x {study.sequence_length} tokens a step"
    pages.append(write_side_by_side(timelines, folder / "barriers.html", title))
    ends = {name: timelines[name] for name in (*list(timelines)[:1], *list(timelines)[-1:])}
    picture = write_picture(ends, folder / "fork_join.svg")
    print(f"\nfork-join beside barrier-free, a picture: {picture}")
    print(f"all barriers on one time scale: {pages[-1]}")
    return pages


def _seconds(timeline: Timeline) -> float:
    """In which the steps ran, without what lies between windows."""
    return sum(window.end - window.start for window in timeline.windows)
