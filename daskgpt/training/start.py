"""The state that a run begins with: random values, a model to start from, or the newest checkpoint of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import nearest, refusal, require, require_named
from daskgpt.config.model import ModelConfig
from daskgpt.config.rows import require_allowed
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.data.dataset import Dataset, encoding_for, load_dataset
from daskgpt.data.source import PREPARED, recognize
from daskgpt.data.tokenizer import (
    encoding_named,
    encoding_of,
    encoding_of_model,
    is_to_be_learned,
    mean_the_same,
    size_to_learn,
    vocabulary_size,
)
from daskgpt.formats.models import open_model_file
from daskgpt.formats.stored_model import short
from daskgpt.kernels import require_compiler
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.kernels.float32.blas import one_order
from daskgpt.model.parameters import RandomParameters, check_dtypes, check_parameters, digest
from daskgpt.model.step import Arrays
from daskgpt.schedulers.machine import versions
from daskgpt.schedulers.opening import LOCAL_SCHEDULERS, chosen_address, require_scheduler
from daskgpt.training.chain import CHAIN, read_chain
from daskgpt.training.checkpoint import (
    VERSION,
    Best,
    checkpoints,
    is_checkpoint,
    newest_good,
    open_with_state,
    read_checkpoint,
)
from daskgpt.training.job import (
    HORIZONS,
    Horizon,
    Job,
    from_root,
    one_horizon,
    require_ids,
    require_memory,
    require_room,
)
from daskgpt.training.logs import METRICS, metrics_lines
from daskgpt.training.run_folder import CONFIG, RunFolder

SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "dataflow": DataflowConfig,
    "run": RunConfig,
}
# Settings that may change when a run is resumed. Those of the first row change bits from there on, the others none.
MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("learning_rate", "schedule", "warmup", "cooldown", "final_learning_rate", "clip", "skip_outliers"),
    "dataflow": ("scheduler", "threads", "batch_chunk", "sequence_chunk", "grain", "barrier", "engine", "window"),
    "run": (
        *("steps", "epochs", "tokens", "minutes", "validate_every", "validation_batches", "sample_tokens"),
        *("sample_every", "save_every", "save_minutes", "keep", "keep_best", "keep_every", "snapshot_every"),
        *("worker_minutes", "worker_seconds", "log"),
    ),
}
# Settings that say where something is, with their sections. Its content decides bits, and a digest tells whether it is
# the same: it may be moved.
PLACES: Mapping[str, str] = {"data": "data", "validation_data": "data", "init": "run"}
# Values that leave a setting to the run: with --resume, they change nothing.
OPEN = {"encoding": "auto", "order": "auto", "precision": "auto", "groups": 0, "out": "", "init": ""}
DIALS = MAY_CHANGE["dataflow"]
CHUNKS = ("batch_chunk", "sequence_chunk")
SEEDED = "random, by the seed"  # the parameters of the beginning
PACKAGES = ("numpy", "numba", "dask")
FINGERPRINT = ("training_tokens", "validation_tokens", "sha256")


def configurations(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every configuration by its name, each from one, from a mapping of some of its fields, or from None.

    Errors   TypeError for another kind of object, ValueError for an unknown field; `where` opens the message
    """
    require_one_model(where, given)
    made = {}
    for section, kind in SECTIONS.items():
        settings = {} if given.get(section) is None else given[section]
        if isinstance(settings, Mapping):
            names = [f.name for f in fields(kind)]
            for name in settings.keys() - names:
                rule = f"every field must be one of {kind.__name__}'s"
                raise refusal(ValueError, where, rule, {"field": name}, nearest(str(name), names))
            settings = kind(**settings)
        rule, got = f"it must be a {kind.__name__} or a mapping of its fields", {"given": repr(settings)[:40]}
        require(isinstance(settings, kind), where, rule, got, f"Give daskgpt.{kind.__name__}(...).", TypeError)
        made[section] = settings
    return made


def require_one_model(where: str, configuration: Mapping[str, Any]) -> None:
    """Errors   ValueError for a run of an earlier version whose replicas trained apart (local steps)"""
    steps = (configuration.get("local") or {}).get("local_steps", 0)
    rule, advice = "all steps of a run must be those of one model", "Start a new run: local steps are no longer made."
    require(not steps, where, rule, {"local_steps": steps}, advice)


@dataclass(frozen=True, eq=False)
class Start:
    """Beginning of a run: its first parameters, or those of a checkpoint, and what earlier processes have done.

    folder      where it is written; None for nowhere
    horizon     its length
    moments     "MOMENT.NAME"; None for zeros
    step        how many steps earlier processes have made
    losses      their losses
    validation  the last validation loss, nan if there was none
    messages    lines to print
    seconds     how long earlier processes have trained
    outliers    see `metrics.Outliers.facts`
    best        the best checkpoint of earlier processes
    entry       of the run's chain, behind which it continues; empty for a new run
    """

    folder: RunFolder | None
    horizon: Horizon
    parameters: Arrays
    moments: Arrays | None = None
    step: int = 0
    losses: list[float] = field(default_factory=list)
    validation: float = nan
    messages: tuple[str, ...] = ()
    seconds: float = 0.0
    outliers: Sequence[Sequence[Any]] = ()
    best: Best = field(default_factory=Best)
    entry: Mapping[str, Any] = field(default_factory=dict)


class WarmStart:
    """A model to start from.

    init   its path
    data   the data settings of the run that made it; empty for a model file alone
    """

    def __init__(self, init: str) -> None:
        """Open the model. Errors   as of `daskgpt.load`"""
        self.init = init
        self.model, state = open_with_state(init)
        self.config = self.model.config
        self.data: Mapping[str, Any] = state.get("configuration", {}).get("data", {})

    def check_size(self, given: Mapping[str, int], where: str, rule: str, advice: str) -> None:
        """Check that numbers of a model, by the names of its configuration, are those of this one.

        Errors   ValueError naming those that differ
        """
        other_sizes = {
            name: getattr(self.config, name) for name, value in given.items() if getattr(self.config, name) != value
        }
        if other_sizes:
            got = ", ".join(f"{name}={given[name]}" for name in other_sizes)
            theirs = ", ".join(f"{name}={value}" for name, value in other_sizes.items())
            raise refusal(ValueError, where, rule, f"{got}, init={self.init} ({theirs})", advice)

    def data_config(self, given: Mapping[str, Any]) -> DataConfig:
        """Return the data settings of this model's run, with those that are given in their place.

        Errors   ValueError if the given encoding is not the model's
        """
        length = self.model.sequence_length or min(DataConfig().sequence_length, self.config.positions)
        kept = {
            name: self.data[name]
            for name in ("data", "validation_data", "validation_fraction", "held_out")
            if name in self.data
        }
        chosen = DataConfig(**{"sequence_length": length} | kept | dict(given))
        return replace(chosen, encoding=self.encoding(chosen.encoding))

    def encoding(self, wanted: str) -> str:
        """Return the model's encoding; where its file has none, the wanted one, or the one that its vocabulary means.

        Errors   ValueError if another one is wanted
        """
        rule, got = "a model to start from has its own encoding", {"encoding": wanted, "init": self.init}
        require(not is_to_be_learned(wanted), "train", rule, got, "Leave --encoding out.")
        encoding, wanted = self.model.encoding, _named(wanted)
        if not encoding:
            return encoding_of_model(self.config.vocabulary) if wanted == "auto" else wanted
        rule, got = "the encoding must be that of the model to start from", got | {"init": f"{self.init} ({encoding})"}
        require(
            wanted == "auto" or mean_the_same(wanted, encoding),
            "train",
            rule,
            got | {"encoding": wanted},
            "Leave --encoding out.",
        )
        return encoding


def _named(encoding: str) -> str:
    return encoding if encoding == "auto" or is_to_be_learned(encoding) else encoding_named(encoding)


def open_dataset(data: DataConfig, vocabulary: int, start: WarmStart | None = None, *, most: int = 0) -> Dataset:
    """Open the tokens that a configuration names.

    vocabulary   of the model: where the encoding is auto, the size of GPT-2's vocabulary means GPT-2's encoding
    start        the model that training starts from, whose encoding `auto` means
    most         ids of an encoding that the model can take; 0 = the encoding decides

    Errors       ValueError if the encoding is not that model's, or has more ids; as of load_dataset
    """
    source = recognize(data.data)
    if data.validation_data:
        recognize(data.validation_data)  # is refused before anything is read
    wanted = start.encoding(data.encoding) if start else _named(data.encoding)
    default = encoding_of(vocabulary)
    encoding = encoding_for(source, None if wanted == "auto" else wanted, default)
    if most:
        ids = size_to_learn(encoding) if is_to_be_learned(encoding) else vocabulary_size(encoding)
        require_ids(encoding, ids, most, from_model=bool(start))
    dataset = load_dataset(
        source,
        encoding,
        validation_data=data.validation_data,
        validation_fraction=data.validation_fraction,
        held_out=data.held_out,
        sequence_length=data.sequence_length,
    )
    if source.kind == PREPARED:
        dataset.checked("load_dataset", data.sequences, data.sequence_length)
    return dataset


def first_start(job: Job, origin: WarmStart | None = None, parameters: Arrays | None = None) -> Start:
    """Return what a new run starts with: the given parameters, those of a model, or random ones.

    parameters   checked

    Errors       as of RunFolder
    """
    if parameters is not None:
        parameters = {name: value.copy() for name, value in parameters.items()}  # a run may write over them
    elif origin:
        parameters = origin.model.loaded().parameters
    else:
        parameters = RandomParameters(job.config, job.run.seed)
    return Start(RunFolder(job.run.out) if job.run.out else None, job.horizon(), parameters)


def check_beginning(job: Job, *, connects: bool = True) -> None:
    """Check what a new run needs, before its data are read (`open_dataset` looks at their kind first) or anything is
    computed.

    job        without data
    connects   whether a scheduler must answer

    Errors     as of `daskgpt.fit`
    """
    require_compiler()
    require_memory(job)
    if job.run.out:
        RunFolder(job.run.out)
        require_room(job)
    if connects:
        require_scheduler(job.dataflow.scheduler)


def new_run(sections: Mapping[str, Any], parameters: Arrays | None, *, connects: bool = True) -> tuple[Job, Start]:
    """Return the job of a new run from its configurations by name, and what it starts with.

    connects   whether a scheduler must answer; it has if there is a client

    Errors     as of `daskgpt.fit`
    """
    c = configurations("fit", sections)
    config, origin = c.pop("model"), WarmStart(c["run"].init) if c["run"].init else None
    if origin:
        rule = "the model's numbers must be those of the model to start from"
        origin.check_size(asdict(config), "fit", rule, "Take them from daskgpt.load.")
    job = Job(config, **c)
    if parameters is not None:
        check_parameters(config, parameters)
        check_dtypes("fit", parameters, np.float32)
    check_beginning(job, connects=connects)
    job = replace(job, dataset=open_dataset(c["data"], config.vocabulary, origin, most=config.vocabulary))
    return job, first_start(job, origin, parameters)


def checkpoint_facts(job: Job, resolved: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the entries of a checkpoint's state.json by which a run is resumed.

    resolved   see `Job.resolved`

    `configuration` has every setting resolved, `asked` the dials as they were given: another machine resolves `auto`
    in its own way.
    """
    data = {"next_batch": step, "position": "batches are a pure function of seed and step"} | fingerprint(job.tokens)
    return {
        "seed": job.run.seed,
        "data": data | ({"form": [*job.tokens.form]} if any(job.tokens.form) else {}),
        "configuration": resolved,
        "asked": {name: getattr(job.dataflow, name) for name in DIALS},
        "groups": job.groups,
        "arithmetic": arithmetic(job),
        "versions": versions(*PACKAGES),
    }


def arithmetic(job: Job) -> dict[str, str]:
    """Return the settings that decide the bits of a matrix product: the precision, and the unit that multiplies."""
    if job.precision.packed:
        return {"precision": job.precision.name, "unit": unit().name.lower()}
    return {"precision": job.precision.name, "unit": "fused" if one_order(job.precision.dtype) else "library"}


def beginning(job: Job, resolved: Mapping[str, Any], parameters: Arrays) -> dict[str, Any]:
    """Return the first entry of a run's chain; parameters: those that the run begins with."""
    origin = SEEDED if isinstance(parameters, RandomParameters) else digest(parameters)
    return {"version": VERSION, "step": 0, **checkpoint_facts(job, resolved, 0), "parameters": origin, "files": {}}


def rows_named(state: Mapping[str, Any]) -> list[str]:
    """Return the values of a checkpoint's state that may name rows of a module from outside of the package."""
    configuration = state["configuration"]
    return [*map(str, configuration["model"].values()), str(configuration["optimizer"]["optimizer"])]


def data_of_run(
    where: str, data: DataConfig, state: Mapping[str, Any], opened: Callable[[DataConfig, int], Dataset] = open_dataset
) -> Dataset:
    """Open the data of a run, which may be in another place than a checkpoint's state says.

    opened   opens them

    Errors   FileNotFoundError; ValueError if they are not those of the state, or if the state names layers of a module
             that is not allowed
    """
    require_allowed(rows_named(state), where)
    configuration = state["configuration"]
    try:
        dataset = opened(data, configuration["model"]["vocabulary"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} If the data have moved, name their place by --data.") from None
    then, now = state["data"], fingerprint(dataset)
    same, place = all(value == then.get(name) for name, value in now.items()), short(configuration["data"]["data"], 200)
    rule, got = "the data must be those that the run was trained on", f"data={data.data} ({_shown(now)})"
    require(same, where, rule, f"{got}, the run's={place} ({_shown(then)})", "Name their place by --data.")
    return dataset


def _shown(numbers: Mapping[str, Any]) -> str:
    training, validation, sha256 = (short(numbers.get(name)) for name in FINGERPRINT)
    return f"{training} + {validation} tokens, sha256={sha256[:16]}"


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Return numbers that identify these tokens: their counts, and a digest of all of them."""
    return dict(zip(FINGERPRINT, (int(dataset.training.size), int(dataset.validation.size), dataset.digest)))


def written_configuration(run: Path) -> dict[str, Any]:
    """Return the configuration in a run folder; empty if it cannot be read."""
    try:
        return tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}


def place_of(setting: str, given: Any, *configurations: Mapping[str, Any]) -> Any:
    """Return the place of a row of PLACES: the given one, or else that of the first configuration that names one."""
    tables = (configuration.get(PLACES[setting]) for configuration in configurations)
    return next(filter(None, [given, *(table.get(setting) for table in tables if isinstance(table, Mapping))]), "")


class Resumed:
    """A run that continues from its newest good checkpoint.

    folder      locked from here on
    job         its settings with the changes
    start       from the checkpoint
    """

    def __init__(self, path: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """path     the run folder
        changes  settings by section and name; each must be one of MAY_CHANGE, or have the run's own value

        Errors   FileNotFoundError if there is no run or no good checkpoint; RuntimeError if another process trains it;
                 ValueError for a change that is refused, other data than the run's, and no step left
        """
        require_compiler()
        require_named(path, "train", "resume")
        rule, advice = "--resume must name the folder of a run", "The newest checkpoint in it is taken."
        require(not is_checkpoint(Path(path)), "train", rule, {"resume": path}, advice)
        self.path, self.messages = path, list[str]()
        self.folder = RunFolder(path, resumed=True)
        self.written = written_configuration(Path(path))
        try:
            self._read(changes)
        except BaseException:
            self.folder.close()
            raise

    def _read(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        damaged = checkpoints(Path(self.path))
        newest = newest_good(Path(self.path), self.messages.append)
        if newest is None:
            got = f"resume={self.path} ({f'{len(damaged)} damaged' if damaged else 'none'})"
            advice = "Nothing of it can be resumed" if damaged else "It ended before its first"
            rule, got = "the run must have a good checkpoint", "; ".join([got, *self.messages])
            raise refusal(FileNotFoundError, "train", rule, got, f"{advice}: start again with another --out.")
        folder, state = newest
        self._require_same_run(folder, state["configuration"])
        c = self._configuration(state, changes)
        open_model_file(folder)  # makes a learned vocabulary known
        self._require_init(c["run"].init, state["configuration"]["run"]["init"])
        require_allowed(rows_named(state), "train")  # a job imports the modules of its rows
        self.job = Job(c.pop("model"), **c)
        require_room(self.job)
        if not self.job.run.epochs:  # whose length the data decide
            self._horizon(state)
        self.job = replace(self.job, dataset=data_of_run("train", self.job.data, state))
        horizon, done = self._horizon(state), state["step"]
        checkpoint = read_checkpoint(folder, state, self.job.moments)
        self.messages.append(f"resumed    {folder}: {done} of {horizon.steps} steps are done")
        units = state["arithmetic"], arithmetic(self.job)
        if units[0] != units[1]:
            change = " -> ".join(f"{unit['precision']} by {unit['unit']}" for unit in units)
            self.messages.append(f"arithmetic {change}: bits differ from here on")
        records = {record["step"]: record for record, _ in metrics_lines(self.folder.path / METRICS, done)}
        losses = [records.get(number, {}).get("loss") for number in range(done)]
        if missing := sum(loss is None for loss in losses):
            self.messages.append(f"metrics    {missing} of {done} steps are missing")
        known_losses = [nan if loss is None else loss for loss in losses]
        validated = [loss for record in records.values() if (loss := record.get("validation_loss")) is not None]
        last, seconds = validated[-1] if validated else nan, state.get("horizon", {}).get("seconds", 0.0)
        parameters, moments, messages = checkpoint.model.parameters, checkpoint.moments, tuple(self.messages)
        outliers, best = state.get("outliers", ()), Best.of(self.folder.path, state)
        self.start = Start(
            self.folder,
            horizon,
            parameters,
            moments,
            done,
            known_losses,
            last,
            messages,
            seconds,
            outliers,
            best,
            state,
        )

    def _horizon(self, state: Mapping[str, Any]) -> Horizon:
        """Return the length of the run. Errors   ValueError if no step or no time is left"""
        horizon, done = self.job.horizon(), state["step"]
        horizon.resume(state.get("horizon", {}), done)
        rule, got = "the run must have steps left", {"steps": horizon.steps, "resume": f"{self.path} ({done} done)"}
        require(horizon.steps > done, "train", rule, got, "Give more --steps.")
        return horizon

    def _require_same_run(self, folder: Path, configuration: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that a checkpoint and the configuration beside it are of the same run.

        Errors   ValueError naming a setting that a run keeps and that differs
        """
        if not self.written:
            self.messages.append(f"{CONFIG} cannot be read: the checkpoint's own configuration is used")
        for section, settings in configuration.items():
            table = self.written.get(section, {})
            kept = settings.keys() - set(MAY_CHANGE.get(section, ())) - PLACES.keys() - {"out"}
            for name in sorted(kept & table.keys() if isinstance(table, Mapping) else ()):
                rule, value = f"checkpoint and {CONFIG} must be of one run", table[name]
                got = f"resume={self.path}, {section}.{name}={short(value)} ({folder.name}: {short(settings[name])})"
                advice = "Another run has written into this folder: name a folder that only one has."
                require(settings[name] == value, "train", rule, got, advice)

    def _require_init(self, init: str, began_with: str) -> None:
        """Check that a model to start from, if it is in another place now, is the one that the run began with.

        Errors   ValueError; as of WarmStart
        """
        if from_root(init) == began_with:
            return
        first = next((entry for _, entry in read_chain(self.folder.path / CHAIN) if entry), {})
        began, model = first.get("parameters", "not known"), digest(WarmStart(init).model.loaded().parameters)
        rule, advice = "--init must name the model that the run began with", "Leave it out, or start a new run."
        got = f"init={init} ({model}), the run's={began_with or 'none'} ({began})"
        require(model == began, "train", rule, f"{got}, resume={self.path}", advice)

    def _configuration(self, state: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the configuration of the run, by sections, with the changes."""
        require_one_model("train", state["configuration"])
        made = {}
        for name, kind in SECTIONS.items():
            values, given = dict(state["configuration"][name]), changes.get(name, {})
            unknown = values.keys() - {f.name for f in fields(kind)}
            rule, advice = "every setting of the run must be known here", "A newer daskgpt wrote it: resume with that."
            newer = {"resume": self.path, name: short(min(unknown, default=""))}
            require(not unknown, "train", rule, newer, advice)
            if name == "dataflow":
                # As they were given, so that this machine resolves them; but for chunks where these change bits.
                fixed = () if one_order(np.dtype(np.float32)) else CHUNKS
                values |= {dial: value for dial, value in state["asked"].items() if dial not in fixed}
                values["scheduler"] = self._scheduler(str(values["scheduler"]), given)
            if name == "run":
                values["out"] = from_root(self.path)
            for setting in (setting for setting, section in PLACES.items() if section == name):
                values[setting] = place_of(setting, given.get(setting), self.written, state["configuration"])
            may_change = MAY_CHANGE.get(name, ())
            for setting, value in given.items():
                same = value in (values.get(setting), OPEN.get(setting))
                same = same or (setting == "out" and values[setting] == from_root(str(value)))
                same = same or (setting == "encoding" and values[setting] == _named(str(value)))
                if not (same or setting in may_change or setting in PLACES):
                    raise may_not_change(self.path, setting, value, values.get(setting))
            if name == "run" and any(map(given.get, HORIZONS)):
                one_horizon(given)
                values |= {"epochs": 0, "tokens": 0, "minutes": 0}  # the new length replaces the old one
            made[name] = kind(**values | {n: v for n, v in given.items() if n in may_change})
        return made

    def _scheduler(self, former: str, given: Mapping[str, Any]) -> str:
        """Return the scheduler to use where none is given: never an address from the folder.

        A run folder from another person could name their scheduler, and data from a scheduler are unpickled.

        Errors   ValueError for an address that neither a flag nor the environment gives
        """
        if "scheduler" in given or former in LOCAL_SCHEDULERS or chosen_address("auto") != "threads":
            return former if former in LOCAL_SCHEDULERS else "auto"
        rule, got = "the address of a scheduler must be given again", {"resume": self.path, "scheduler": former}
        advice = f"Add --scheduler {former} where you trust it, or --scheduler threads."
        raise refusal(ValueError, "train", rule, got, advice)


def may_not_change(path: str, setting: str, value: Any, kept: Any = None) -> ValueError:
    """Return the error for a setting that a run keeps; it lists those that may change."""
    got = f"{setting}={value}{'' if kept is None else f' (its own: {kept})'}, resume={path}"
    rule = "--resume keeps the run's own settings"
    return refusal(ValueError, "train", rule, got, f"May change: {', '.join(changeable())}.")


def changeable() -> list[str]:
    """Return the flags that may be given with --resume."""
    return [f"--{name.replace('_', '-')}" for names in MAY_CHANGE.values() for name in names]
