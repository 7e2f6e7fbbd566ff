"""What a study runs: points of the dataflow's dials, and the settings that all runs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from daskgpt.config.groups import groups_setting
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.instruments.measure import BenchConfig, job_of
from daskgpt.instruments.study.dials import BARRIERS, DIALS
from daskgpt.schedulers.connect import check_address
from daskgpt.training.job import Job

TOKEN_PARTS = (1, 2, 4, 8)
MOST_CHUNKS = 8
LARGEST_POWER = 10  # of two, of threads that the default grid tries


@documented
@dataclass(frozen=True)
class StudyConfig(Checked):
    """What all runs of a study share."""

    batch_size: int = setting(12, "B, sequences a step", least=1, most=2**20)
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens", least=1, most=2**24)
    groups: int = groups_setting()
    precision: str = setting("float32", "operands of matrix products", choices=("float32", "bfloat16", "auto"))
    window: int = setting(4, "steps in flight with barrier none", unit="steps", least=1, most=2**20)
    steps: int = setting(5, "least number of timed steps of a run", unit="steps", least=1, most=2**20)
    seconds: float = setting(1.0, "least time that a run's timed steps take together", unit="seconds", least=0)
    warmup: int = setting(2, "steps before them", unit="steps", least=1, most=2**20)
    repetitions: int = setting(3, "how often every point is run", least=1)
    minutes: float = setting(
        28.0, "no repetition but the first one is begun if it would probably end later", unit="minutes", least=0
    )
    seed: int = setting(0, "seed of initial values, tokens and of the order of the runs", least=0)
    out: str = setting("", "folder of the study, an earlier one to go on with; empty = studies/DATE-TIME")


@dataclass(frozen=True, order=True)
class Point:
    """One setting of every dial. In a study's grid chunks are sizes, not 0 for auto."""

    threads: int
    scheduler: str
    barrier: str
    batch_chunk: int
    sequence_chunk: int
    grain: str

    def runnable(self) -> Point:
        """The same without what contradicts itself: the synchronous scheduler has one thread, and fork-join waits
        after each layer, so that no task can hold more than one kernel.
        """
        point = replace(self, threads=1) if self.scheduler == "sync" else self
        return replace(point, grain="kernel") if self.barrier == "layer" else point

    def __str__(self) -> str:
        return (
            f"{self.threads} x {self.scheduler}, barrier {self.barrier}, chunks of {self.batch_chunk} x "
            f"{self.sequence_chunk}, grain {self.grain}"
        )


def base_point(study: StudyConfig, cores: int) -> Point:
    """The point from which a study goes out along each dial: all cores, tasks without a barrier in a step."""
    batch_chunk = study.batch_size // 2 if study.batch_size % 2 == 0 else study.batch_size
    return Point(cores, "threads", "step", batch_chunk, study.sequence_length, "block")


def default_grid(study: StudyConfig, cores: int) -> list[Point]:
    """The points of a study's five questions: threads and barriers, slicing, grain, and schedulers."""
    base = base_point(study, cores)
    points = [replace(base, threads=n, barrier=barrier) for n in thread_counts(cores) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=b, sequence_chunk=t) for b, t in slicings(study)]
    points += [replace(base, grain=grain) for grain in ("kernel", "segment", "block", "chunk")]
    points += [replace(base, scheduler=scheduler) for scheduler in ("threads", "sync", "local")]
    return distinct(points)


def quick_grid(study: StudyConfig, cores: int) -> list[Point]:
    """A few points, with which every section of the report has something to say."""
    base = base_point(study, min(cores, 2))
    points = [replace(base, threads=n, barrier=barrier) for n in (1, base.threads) for barrier in BARRIERS]
    points += [replace(base, batch_chunk=study.batch_size, sequence_chunk=study.sequence_length // 2)]
    points += [replace(base, grain="kernel"), replace(base, scheduler="sync")]
    return distinct(points)


def chosen_grid(study: StudyConfig, cores: int, chosen: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the chosen values, with those of the base point for the other dials."""
    base = asdict(base_point(study, cores))
    values = [chosen.get(dial) or [base[dial]] for dial in DIALS]
    return distinct(Point(*combination) for combination in product(*values))


def distinct(points: Iterable[Point]) -> list[Point]:
    """Each runnable point once."""
    return list(dict.fromkeys(point.runnable() for point in points))


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 ... and all cores."""
    return sorted({2**power for power in range(LARGEST_POWER) if 2**power < cores} | {cores})


def slicings(study: StudyConfig) -> list[tuple[int, int]]:
    """Chunks of all sequences (sliced by tokens only), of half of them, and of one, with their tokens in 1 to 8 parts;
    one sequence as a whole even where that makes many chunks.
    """
    size, length, found = study.batch_size, study.sequence_length, []
    for sequences in dict.fromkeys((size, max(size // 2, 1), 1)):
        for parts in TOKEN_PARTS:
            divides = size % sequences == 0 and length % parts == 0
            if divides and (parts == 1 or size // sequences * parts <= MOST_CHUNKS):
                found.append((sequences, length // parts))
    return found


def job_of_point(config: GPT2Config, study: StudyConfig, point: Point) -> Job:
    """The checked job of a point's runs.

    Errors   ValueError where the point does not fit the model or the batch
    """
    check_address(point.scheduler)
    batch = {name: getattr(study, name) for name in ("batch_size", "sequence_length", "groups", "seed")}
    asked = BenchConfig(**batch)
    return job_of(config, asked, DataflowConfig(**asdict(point), precision=study.precision, window=study.window))
