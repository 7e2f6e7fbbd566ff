"""The grid of a study: its settings, the points that it measures, and how they are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import documented, setting
from daskgpt.profiling.measure import BatchConfig, job_of
from daskgpt.schedulers.connect import check_address
from daskgpt.training.job import Job

BARRIERS = {"layer": "layer (fork-join)", "phase": "phase", "step": "step (tasks)", "none": "none (barrier-free)"}
# Values that are words, in the order in which they are shown; the other settings of a point are numbers.
ORDER: dict[str, tuple[str, ...]] = {
    "scheduler": ("sync", "threads", "local"),
    "barrier": tuple(BARRIERS),
    "grain": ("kernel", "segment", "block", "chunk", "auto"),
    "engine": ("ranks", "tasks"),
}
TOKEN_PARTS = (1, 2, 4, 8)
MOST_CHUNKS = 8


@documented
@dataclass(frozen=True)
class StudyConfig(BatchConfig):
    """What all runs of a study share."""

    precision: str = setting("float32", "operands of matrix products", choices=("float32", "bfloat16", "auto"))
    window: int = setting(4, "steps in flight with barrier none", unit="steps", least=1, most=2**20)
    steps: int = setting(5, "least number of timed steps of a run", unit="steps", least=1, most=2**20)
    seconds: float = setting(1.0, "least time that a run's timed steps take together", unit="seconds", least=0)
    # What is auto settles in the first two steps.
    warmup: int = setting(3, "steps before them", unit="steps", least=3, most=2**20)
    repetitions: int = setting(3, "how often every point is run", least=1)
    minutes: float = setting(
        28.0, "no repetition but the first one is begun if it would probably end later", unit="minutes", least=0
    )
    out: str = setting("", "folder of the study, an earlier one to continue; empty = studies/DATE-TIME")


@dataclass(frozen=True, order=True)
class Point:
    """One setting of the dataflow; a chunk of 0 is auto."""

    threads: int
    scheduler: str
    barrier: str
    batch_chunk: int
    sequence_chunk: int
    grain: str
    engine: str = "ranks"

    def runnable(self) -> Point:
        """Return the point without contradictions: one thread with the synchronous scheduler, an engine on clusters
        only, and with fork-join, which waits after each layer, tasks of one kernel.
        """
        point = replace(self, threads=1) if self.scheduler == "sync" else self
        point = point if self.scheduler == "local" else replace(point, engine="ranks")
        return replace(point, grain="kernel") if self.barrier == "layer" else point

    def __str__(self) -> str:
        chunks = f"chunks of {self.batch_chunk or 'auto'} x {self.sequence_chunk or 'auto'}"
        engine = ", engine tasks" * (self.engine == "tasks")
        return f"{self.threads} x {self.scheduler}, barrier {self.barrier}, {chunks}, grain {self.grain}{engine}"


DIALS = tuple(field.name for field in fields(Point))


def sort_key(dial: str, value: Any) -> tuple[int, Any]:
    """Return a key that sorts words as ORDER has them, and numbers by size."""
    known = ORDER.get(dial, ())
    return known.index(value) if value in known else len(known), value


def base_point(study: StudyConfig, cores: int) -> Point:
    """Return the point that the others differ from in one setting: all cores, barrier step, grain block."""
    batch_chunk = study.batch_size // 2 if study.batch_size % 2 == 0 else study.batch_size
    return Point(cores, "threads", "step", batch_chunk, study.sequence_length, "block")


def default_grid(study: StudyConfig, cores: int) -> list[Point]:
    """Return the points of a study's five questions: threads and barriers, slicing, grain, and schedulers."""
    base = base_point(study, cores)
    points = [replace(base, threads=n, barrier=barrier) for n in thread_counts(cores) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=b, sequence_chunk=t) for b, t in slicings(study)]
    points += [replace(base, grain=grain) for grain in ("kernel", "segment", "block", "chunk")]
    points += [replace(base, scheduler=scheduler) for scheduler in ORDER["scheduler"]]
    points += [replace(base, scheduler="local", engine="tasks")]
    return distinct(points)


def quick_grid(study: StudyConfig, cores: int) -> list[Point]:
    """Return a few points, with which every section of the report has something to say."""
    base = base_point(study, min(cores, 2))
    points = [replace(base, threads=n, barrier=barrier) for n in (1, base.threads) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=study.batch_size, sequence_chunk=study.sequence_length // 2)]
    points += [replace(base, grain="kernel"), replace(base, scheduler="sync")]
    return distinct(points)


def chosen_grid(study: StudyConfig, cores: int, chosen: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Return every combination of the chosen values, with those of the base point for the other settings."""
    base = asdict(base_point(study, cores))
    values = [chosen.get(dial) or [base[dial]] for dial in DIALS]
    return distinct(Point(*combination) for combination in product(*values))


def distinct(points: Iterable[Point]) -> list[Point]:
    """Return each runnable point once."""
    return list(dict.fromkeys(point.runnable() for point in points))


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4 ... and all cores."""
    return [2**power for power in range(10) if 2**power < cores] + [cores]


def slicings(study: StudyConfig) -> list[tuple[int, int]]:
    """Return chunks (sequences, tokens): all sequences, half of them and one, with their tokens in 1 to 8 parts.

    No batch is cut into more than MOST_CHUNKS chunks, except into single sequences.
    """
    size, length = study.batch_size, study.sequence_length
    return [
        (sequences, length // parts)
        for sequences in dict.fromkeys((size, max(size // 2, 1), 1))
        for parts in TOKEN_PARTS
        if size % sequences == length % parts == 0 and (parts == 1 or size // sequences * parts <= MOST_CHUNKS)
    ]


def job_of_point(config: GPT2Config, study: StudyConfig, point: Point) -> Job:
    """Return the checked job of a point's runs.

    Errors   ValueError where the point does not fit the model or the batch
    """
    check_address(point.scheduler)
    return job_of(config, study, DataflowConfig(**asdict(point), precision=study.precision, window=study.window))
