"""Going on with a run: its newest good checkpoint, its configuration, and what of that may change."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

import daskgpt
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, LocalConfig, OptimizerConfig, RunConfig
from daskgpt.data.dataset import Dataset
from daskgpt.formats.checks import short
from daskgpt.formats.models import open_model_file
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.kernels.float32.blas import one_order
from daskgpt.schedulers.connect import LOCAL_SCHEDULERS, chosen_address
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.checkpoint import (
    NONE,
    Best,
    Checkpoint,
    best_of,
    checkpoints,
    is_checkpoint,
    newest_good,
    read_checkpoint,
    step_of,
)
from daskgpt.training.horizon import HORIZONS, one_horizon
from daskgpt.training.job import Job, from_root
from daskgpt.training.run_folder import CONFIG, MODELS, RunFolder
from daskgpt.training.start import open_dataset

SECTIONS: Mapping[str, type] = {
    "model": GPT2Config,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "local": LocalConfig,
    "dataflow": DataflowConfig,
    "run": RunConfig,
}
# What of a run may change where it is gone on with. The first row changes bits from here on, the others none.
MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("learning_rate", "schedule", "warmup", "cooldown", "final_learning_rate", "clip", "skip_outliers"),
    "dataflow": ("scheduler", "threads", "batch_chunk", "sequence_chunk", "grain", "barrier", "engine", "window"),
    "run": (
        *("steps", "tokens", "minutes", "validate_every", "validation_batches", "sample_tokens", "sample_every"),
        *("save_every", "save_minutes", "keep", "keep_best", "keep_every", "snapshot_every", "worker_minutes"),
        *("worker_seconds", "log"),
    ),
}
# What leaves open what the run has settled: the same command again, with --resume, asks for no change.
OPEN = {"encoding": "auto", "order": "auto", "precision": "auto", "groups": 0, "out": "", "init": ""}
DIALS = MAY_CHANGE["dataflow"]
CHUNKS = ("batch_chunk", "sequence_chunk")
PACKAGES = ("numpy", "numba", "dask")


@dataclass(frozen=True, eq=False)
class Beginning:
    """What a run's loop begins with.

    moments     "MOMENT.NAME", None for zeros
    step        how many steps earlier processes have made
    losses      of these
    validation  the last validation loss of these, nan if there was none
    said        lines for people
    spared      damaged checkpoints, which are never deleted
    seconds     how long earlier processes have trained
    outliers    see `outliers.Outliers.facts`
    best        which checkpoint of these is the best one
    """

    parameters: Mapping[str, np.ndarray]
    moments: Mapping[str, np.ndarray] | None = None
    step: int = 0
    losses: list[float] = field(default_factory=list)
    validation: float = nan
    said: tuple[str, ...] = ()
    spared: frozenset[Path] = frozenset()
    seconds: float = 0.0
    outliers: Sequence[Sequence[Any]] = ()
    best: Best = NONE


def facts(job: Job, scheduler: Scheduler, chunk: tuple[int, int], grain: str, step: int) -> dict[str, Any]:
    """What a checkpoint says of its run besides arrays, as JSON has it.

    configuration   with everything resolved; `asked` has the dials as they were asked for, which a machine may resolve
                    in another way
    """
    resolved = {name: asdict(section) for name, section in job.resolved(scheduler, chunk, grain).items()}
    return {
        "seed": job.run.seed,
        "data": {
            "next_batch": step,
            "position": "batches are a pure function of seed and step",
            **fingerprint(job.tokens),
        },
        "configuration": resolved,
        "asked": {name: getattr(job.dataflow, name) for name in DIALS},
        "groups": job.groups,
        "arithmetic": arithmetic(job),
        "versions": {"python": platform.python_version(), "daskgpt": daskgpt.__version__}
        | {name: version(name) for name in PACKAGES},
    }


def arithmetic(job: Job) -> dict[str, str]:
    """What decides over the bits of a product: the precision, and who multiplies."""
    if job.precision.packed:
        return {"precision": job.precision.name, "unit": unit().name.lower()}
    return {"precision": job.precision.name, "unit": "fused" if one_order(job.precision.dtype) else "library"}


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """What tells these tokens from others: how many there are, and a digest of all of them."""
    return {
        "training_tokens": int(dataset.training.size),
        "validation_tokens": int(dataset.validation.size),
        "sha256": dataset.digest,
    }


class Resumed:
    """A run that is gone on with: held by its lock, its newest good checkpoint read and checked.

    said   lines for people
    """

    def __init__(self, path: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """path     the run folder
        changes  what is given anew, by section and name; it must be what may change, or what it was

        Errors   FileNotFoundError where there is no run or no good checkpoint; RuntimeError where another process
                 trains it; ValueError for a change that is refused, data that are others by now, and no step left
        """
        rule, advice = "--resume must name the folder of a run", "It goes on from the newest checkpoint there."
        require(not is_checkpoint(Path(path)), "train", rule, {"resume": path}, advice)
        self.path, self.said = path, list[str]()
        self.folder = RunFolder(path, resumed=True)
        try:
            self._read(changes)
        except BaseException:
            self.folder.close()
            raise

    def _read(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        found = newest_good(Path(self.path), self.said.append)
        if found is None:
            rule, again = "the run must have a good checkpoint", "start again with another --out."
            count = len(checkpoints(Path(self.path)))
            got = f"resume={self.path} ({f'{count} damaged' if count else 'none'})"
            advice = f"Nothing of it can be gone on with: {again}" if count else f"It ended before its first: {again}"
            if any((Path(self.path) / name).exists() for name in MODELS):
                advice = "An older version wrote it: start a new run from its model with --init."
            raise refusal(FileNotFoundError, "train", rule, "; ".join([got, *self.said]), advice)
        folder, self.state = found
        self._require_same_run(folder)
        self.spared = frozenset(path for path in checkpoints(folder.parent) if step_of(path) > step_of(folder))
        self.configuration = self._changed(self.state["configuration"], changes)
        open_model_file(folder)  # a learned vocabulary is in it, and known from here on
        self.job = self._job()
        done = self.state["step"]
        self.job.horizon.go_on(self.state.get("horizon", {}), done)
        steps = self.job.steps
        rule, advice = "the run must have steps left", "Give more --steps."
        require(steps > done, "train", rule, {"steps": steps, "resume": f"{self.path} ({done} done)"}, advice)
        self.checkpoint: Checkpoint = read_checkpoint(folder, self.state, self.job.moments)
        self.said.append(f"resumed    {folder}: {done} of {steps} steps are done")
        self._compare_arithmetic()

    def _changed(self, known: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The configuration of the run with what is given anew."""
        found = {}
        known = {"local": asdict(LocalConfig()), **known}  # runs from before there were replicas had none
        for name, kind in SECTIONS.items():
            own = {f.name for f in fields(kind)}
            unknown = known[name].keys() - own
            rule, advice = "every setting of the run must be known here", "A newer daskgpt wrote it: go on with that."
            newer = {"resume": self.path, name: short(min(unknown, default=""))}
            require(not unknown, "train", rule, newer, advice)
            values = dict(known[name])
            if name == "dataflow":
                # Asked for again, so that another machine resolves them for itself; not where chunks change bits.
                fixed = () if one_order(np.dtype(np.float32)) else CHUNKS
                values |= {dial: value for dial, value in self.state["asked"].items() if dial not in fixed}
                values["scheduler"] = self._scheduler(str(values["scheduler"]), changes.get(name, {}))
            if name == "run":
                values["out"] = from_root(self.path)
            given = changes.get(name, {})
            self._require_changeable(name, values, given)
            if name == "run":
                one_horizon(given)
                # What is given anew says how long the run is, in place of what did.
                values |= dict.fromkeys(("tokens", "minutes"), 0) if any(map(given.get, HORIZONS)) else {}
            found[name] = kind(**values | {n: v for n, v in given.items() if n in MAY_CHANGE.get(name, ())})
        return found

    def _scheduler(self, known: str, given: Mapping[str, Any]) -> str:
        """The scheduler to ask for where nobody names one: never an address that stands in the folder.

        Who sends a run folder could name a scheduler of their own, and what a scheduler sends is unpickled.

        Errors   ValueError for an address that is given neither by a flag nor by the environment
        """
        if "scheduler" in given or known in LOCAL_SCHEDULERS or chosen_address("auto") != "threads":
            return known if known in LOCAL_SCHEDULERS else "auto"
        rule, got = "the address of a scheduler must be given anew", {"resume": self.path, "scheduler": known}
        advice = f"Add --scheduler {known} where you trust it, or --scheduler threads."
        raise refusal(ValueError, "train", rule, got, advice)

    def _require_same_run(self, folder: Path) -> None:
        """The configuration beside a checkpoint must be that of the same run.

        Errors   ValueError naming a setting that a run keeps and that is another one in either
        """
        try:
            written = tomllib.loads((self.folder.path / CONFIG).read_text(encoding="utf-8"))
        except (ValueError, OSError):
            self.said.append(f"{CONFIG} cannot be read: the checkpoint's own configuration is used")
            return
        for section, known in self.state["configuration"].items():
            table = written.get(section)
            kept = known.keys() - set(MAY_CHANGE.get(section, ())) - {"out"}
            for name in sorted(kept & table.keys() if isinstance(table, dict) else ()):
                rule, own = f"checkpoint and {CONFIG} must be of one run", written[section][name]
                got = f"resume={self.path}, {section}.{name}={short(own)} ({folder.name}: {short(known[name])})"
                advice = "Another run has written into this folder: name a folder that only one has."
                require(known[name] == own, "train", rule, got, advice)

    def _require_changeable(self, section: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            same = value in (known.get(name), OPEN.get(name))
            same |= name in ("data", "out", "init") and known[name] == from_root(str(value))
            if name not in MAY_CHANGE.get(section, ()) and not same:
                raise may_not_change(self.path, {name: value}, known.get(name))

    def _job(self) -> Job:
        c = self.configuration
        dataset = open_dataset(c["data"], c["model"].vocabulary)
        then, now = self.state["data"], fingerprint(dataset)
        known = [name for name in now if name in then]  # runs from before have no digest of all tokens
        other = [f"{name}={now[name]} (was {then[name]})" for name in known if now[name] != then[name]]
        if other:
            rule = "the data must be those that the run was trained on"
            got = f"data={c['data'].data}, {short(other[0], 100)}"
            advice = "Bring them back, or start a new run with --init."
            raise refusal(ValueError, "train", rule, got, advice)
        return Job(c["model"], c["data"], c["optimizer"], c["dataflow"], c["run"], dataset, c["local"])

    def _compare_arithmetic(self) -> None:
        then, now = self.state["arithmetic"], arithmetic(self.job)
        if then != now:
            told = " -> ".join(f"{each['precision']} by {each['unit']}" for each in (then, now))
            self.said.append(f"arithmetic {told}: from here on other bits than there")

    def beginning(self) -> Beginning:
        """What the loop begins with."""
        step = self.checkpoint.step
        known = {record["step"]: record for record in self.folder.known_metrics(step)}
        losses = [known.get(number, {}).get("loss") for number in range(step)]
        if missing := sum(loss is None for loss in losses):
            self.said.append(f"metrics    {missing} of {step} steps are missing")
        validated = [
            record["validation_loss"] for record in known.values() if record.get("validation_loss") is not None
        ]
        return Beginning(
            self.checkpoint.model.parameters,
            self.checkpoint.moments,
            step,
            [nan if loss is None else loss for loss in losses],
            validated[-1] if validated else nan,
            tuple(self.said),
            self.spared,
            self.state.get("horizon", {}).get("seconds", 0.0),
            self.state.get("outliers", ()),
            best_of(self.folder.path, self.state),
        )


def may_not_change(path: str, given: Mapping[str, Any], known: Any = None) -> ValueError:
    """The refusal of a setting that a run keeps, which lists those that may change."""
    rule = "--resume keeps the run's own settings"
    (got,) = (
        f"{name}={value}" + (f" (its own: {known})" if known is not None else "") for name, value in given.items()
    )
    return refusal(ValueError, "train", rule, f"{got}, resume={path}", f"May change: {', '.join(changeable())}.")


def changeable() -> Iterable[str]:
    """Flags that may be given beside --resume."""
    return [f"--{name.replace('_', '-')}" for names in MAY_CHANGE.values() for name in names]
