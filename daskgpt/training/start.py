"""The state that a run begins with: random values, a model to start from, or the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import nan
from pathlib import Path
from typing import Any

from daskgpt.config.errors import nearest, refusal, require, require_named, short
from daskgpt.config.files import expanded
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.config.settings import require_allowed
from daskgpt.data.dataset import Dataset, encoding_for, load_dataset
from daskgpt.data.source import PREPARED, recognize
from daskgpt.formats.encoding import encoding_of, encoding_of_model, is_to_be_learned, title_of, vocabulary_size
from daskgpt.formats.huggingface import encoding_named
from daskgpt.kernels import require_compiler
from daskgpt.kernels.bfloat16.isa import unit
from daskgpt.model.parameters import RandomParameters, check_finite, digest, trained_tensors
from daskgpt.model.step import Arrays
from daskgpt.schedulers.machine import versions
from daskgpt.schedulers.opening import LOCAL_SCHEDULERS, require_scheduler
from daskgpt.training import checkpoint
from daskgpt.training.job import LENGTHS, Job, from_root, require_memory, require_one_length
from daskgpt.training.logs import METRICS, metrics_lines
from daskgpt.training.run_folder import RunFolder

SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "dataflow": DataflowConfig,
    "run": RunConfig,
}
# Settings that may change when a run is resumed. Those of the first row change bits from there on, the others none.
MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("learning_rate", "schedule", "warmup", "cooldown", "final_learning_rate", "clip"),
    "dataflow": ("scheduler", "threads", "batch_chunk", "sequence_chunk", "grain", "barrier", "engine", "window"),
    "run": (
        *("steps", "epochs", "tokens", "validate_every", "validation_batches", "sample_tokens", "sample_every"),
        *("save_every", "save_minutes", "keep", "keep_best", "snapshot_every"),
        *("worker_minutes", "worker_seconds"),
    ),
}
# Settings that say where the data are. Their content decides bits, and a digest tells whether it is the same: they may
# be moved.
PLACES = ("data", "validation_data")
PARTS = ("validation_data", "validation_fraction", "held_out")  # settings that divide text
SEEDED = "random, by the seed"  # the parameters of the beginning
PACKAGES = ("numpy", "numba", "dask")


def configurations(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every configuration by its name, each from one, from a mapping of some of its fields, or from None.

    Errors   as of `given_settings`
    """
    return {name: kind(**given_settings(where, name, given.get(name))) for name, kind in SECTIONS.items()}


def given_settings(where: str, section: str, given: Any) -> Mapping[str, Any]:
    """Return the settings of a section that a mapping gives, or those of a configuration that differ from the defaults.

    Errors   TypeError for another kind of object, ValueError for an unknown field; `where` opens the message
    """
    kind = SECTIONS[section]
    if given is None:
        return {}
    if isinstance(given, Mapping):
        names = [f.name for f in fields(kind)]
        for name in given.keys() - names:
            rule = f"every field must be one of {kind.__name__}'s"
            raise refusal(ValueError, where, rule, {"field": name}, nearest(str(name), names))
        return given
    rule, got = f"it must be a {kind.__name__} or a mapping of its fields", {"given": repr(given)[:40]}
    require(isinstance(given, kind), where, rule, got, f"Give daskgpt.{kind.__name__}(...).", TypeError)
    return {f.name: value for f in fields(kind) if (value := getattr(given, f.name)) != f.default}


class NoStepsLeft(ValueError):
    """All steps of a run that is to be continued are done."""


@dataclass(frozen=True, eq=False)
class Start:
    """Beginning of a run: its first parameters, or those of a checkpoint, and what earlier processes have done.

    folder      where it is written; None for nowhere
    moments     "MOMENT.NAME"; None for zeros
    losses      of the steps that earlier processes have made
    validation  the last validation loss, nan if there was none
    messages    lines to print
    entry       of the run's chain, behind which it continues; empty for a new run
    """

    folder: RunFolder | None
    parameters: Arrays
    moments: Arrays | None = None
    losses: list[float] = field(default_factory=list)
    validation: float = nan
    messages: Sequence[str] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of steps that earlier processes have made."""
        return len(self.losses)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the parameters and moments that were read; random ones are made when they are needed."""
        read = [] if isinstance(self.parameters, RandomParameters) else [*self.parameters.values()]
        return sum(array.nbytes for array in (*read, *(self.moments or {}).values()))


class WarmStart:
    """A model to start from.

    init   its path
    data   the data settings of the run that made it; empty for a model file alone
    """

    def __init__(self, init: str) -> None:
        """Open the model. Errors   as of `daskgpt.load`"""
        self.init = init
        self.model, state = checkpoint.open_with_state(init)
        self.config = self.model.config
        self.data: Mapping[str, Any] = state.get("configuration", {}).get("data", {})

    def check_size(self, given: Mapping[str, int], where: str, rule: str, advice: str) -> None:
        """Check that numbers of a model, by the names of its configuration, are those of this one.

        Errors   ValueError naming those that differ
        """
        names = [name for name, value in given.items() if getattr(self.config, name) != value]
        got, theirs = (
            ", ".join(f"{name}={numbers[name]}" for name in names) for numbers in (given, asdict(self.config))
        )
        require(not names, where, rule, f"{got}, init={self.init} ({theirs})", advice)

    def data_config(self, given: Mapping[str, Any]) -> DataConfig:
        """Return the data settings of this model's run, with those that are given in their place."""
        length = self.model.sequence_length or min(DataConfig().sequence_length, self.config.positions)
        names = {"data", *PARTS} & self.data.keys()
        return DataConfig(**{"sequence_length": length, **{name: self.data[name] for name in names}, **given})

    def encoding(self, wanted: str) -> str:
        """Return the model's encoding; where its file has none, the wanted one, or the one that its vocabulary means.

        Errors   ValueError if another one is wanted
        """
        encoding, wanted = self.model.encoding, _named(wanted)
        if not (encoding or is_to_be_learned(wanted)):
            return encoding_of_model(self.config.vocabulary) if wanted == "auto" else wanted
        rule = "the encoding must be that of the model to start from"
        got = {"encoding": title_of(wanted), "init": f"{self.init} ({title_of(encoding) or 'of its vocabulary'})"}
        require(wanted in ("auto", encoding), "train", rule, got, "Leave --encoding out.")
        return encoding


def _named(encoding: str) -> str:
    return encoding if encoding == "auto" else encoding_named(encoding)


def open_dataset(data: DataConfig, vocabulary: int, start: WarmStart | None = None, *, most: int = 0) -> Dataset:
    """Open the tokens that a configuration names.

    vocabulary   of the model: where the encoding is auto, the size of GPT-2's vocabulary means GPT-2's encoding
    start        the model that training starts from, whose encoding `auto` means
    most         ids of an encoding that the model can take; 0 = the encoding decides

    Errors       ValueError if the encoding is not that model's, or has more ids; as of load_dataset
    """
    source = recognize(data.data)
    wanted = start.encoding(data.encoding) if start else _named(data.encoding)
    default = encoding_of(vocabulary)
    encoding = encoding_for(source, None if wanted == "auto" else wanted, default)
    if most:
        rule, ids = "the model must know every token id of the encoding", vocabulary_size(encoding)
        advice = "Start from another model." if start else "Leave --vocabulary to the encoding."
        got = {"encoding": title_of(encoding), "ids": ids, "vocabulary": most}
        require(ids <= most, "train", rule, got, advice)
    parts = {name: getattr(data, name) for name in PARTS}
    return load_dataset(source, encoding, sequence_length=data.sequence_length, **parts)


def _require_division(given: Mapping[str, Any], data: DataConfig) -> None:
    """Refuse settings other than the defaults that divide text, among given ones, for data that are not divided.

    Errors   ValueError; as of `recognize`
    """
    unused = {name: value for name, value in given.items() if name in PARTS[1:] and value != getattr(DataConfig, name)}
    if unused and (data.validation_data or recognize(data.data).kind == PREPARED):
        rule, got = "data with a validation part must not be divided", unused | {"data": data.data}
        raise refusal(ValueError, "train", rule, got, f"Leave out {' and '.join(unused)}.")


def new_run(
    config: ModelConfig,
    settings: Mapping[str, Any],
    origin: WarmStart | None = None,
    parameters: Arrays | None = None,
    *,
    sizes: Collection[str] = ("vocabulary",),
    asked: Mapping[str, Any] | None = None,
    connects: bool = True,
) -> tuple[Job, Start]:
    """Return the job of a new run, and what it starts with. All but the data is checked before these are read.

    settings     configurations by name, without that of the model
    origin       model to start from; without it, parameters are random
    parameters   checked, in place of both
    sizes        names of numbers of the model that stay; a vocabulary that is not among them becomes that of the data
    asked        settings of the data that a user has given; None for all
    connects     whether a scheduler must answer

    Errors       as of `daskgpt.fit`
    """
    require_compiler()
    job = Job(config, **settings)
    require_memory(job)
    folder = RunFolder(job.run.out) if job.run.out else None
    if connects:
        require_scheduler(job.dataflow.scheduler)
    _require_division(vars(job.data) if asked is None else asked, job.data)
    fitting = "vocabulary" not in sizes
    dataset = open_dataset(job.data, config.vocabulary, origin, most=0 if fitting else config.vocabulary)
    if fitting and dataset.vocabulary != config.vocabulary:
        padded = config.padded_vocabulary if "padded_vocabulary" in sizes else 0
        config = replace(config, vocabulary=dataset.vocabulary, padded_vocabulary=padded)
    job = replace(job, config=config, dataset=dataset)
    require_memory(job)
    if parameters is not None:
        parameters = {name: value.copy() for name, value in parameters.items()}  # a run may write over them
    elif origin:
        parameters = origin.model.loaded().parameters
    parameters = with_adapters(job, parameters)
    if not isinstance(parameters, RandomParameters):
        check_finite("train", parameters)
    return job, Start(folder, parameters)


def with_adapters(job: Job, parameters: Arrays | None) -> Arrays:
    """Return the parameters that a run begins with: those of a model with random adapters, or random ones."""
    random = RandomParameters(job.config, job.run.seed)
    if parameters is None or not job.config.lora:
        return random if parameters is None else parameters
    return dict(parameters) | {name: random[name] for name in trained_tensors(job.config)}


def checkpoint_facts(job: Job) -> dict[str, Any]:
    """Return the entries of a checkpoint's state.json by which a run is resumed."""
    return {
        "data": fingerprint(job.tokens),
        "configuration": job.resolved(),
        "arithmetic": arithmetic(job),
        "versions": versions(*PACKAGES) | dict(job.modules),
    }


def arithmetic(job: Job) -> dict[str, str]:
    """Return what decides the bits of a matrix product: the precision, and the unit that multiplies."""
    return {"precision": job.precision.name, "unit": unit().name.lower() if job.precision.packed else "fused"}


def beginning(facts: Mapping[str, Any], parameters: Arrays) -> dict[str, Any]:
    """Return the first entry of a run's chain; parameters: those that the run begins with."""
    origin = SEEDED if isinstance(parameters, RandomParameters) else digest(parameters)
    return {"version": checkpoint.VERSION, "step": 0, **facts, "parameters": origin, "files": {}}


def stored_settings(where: str, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings in a checkpoint's state, by sections. Those that only another version has, and that are off,
    are left out.

    Errors   ValueError for a setting that only another version has, or that names a row of a module which is not
             allowed: a job would import it
    """
    settings = {}
    for section, kind in SECTIONS.items():
        values, names = state["configuration"][section], {f.name for f in fields(kind)}
        unknown = [name for name, value in values.items() if value and name not in names]
        rule, got = "every setting of the run must be known here", {section: short(min(unknown, default=""))}
        require(not unknown, where, rule, got, "Another version of daskgpt wrote it: use that.")
        settings[section] = {name: value for name, value in values.items() if name in names}
    require_allowed(map(str, [*settings["model"].values(), settings["optimizer"]["optimizer"]]), where)
    return settings


def data_of_run(
    where: str, data: DataConfig, state: Mapping[str, Any], opened: Callable[[DataConfig, int], Dataset] = open_dataset
) -> Dataset:
    """Open the data of a run, which may be in another place than a checkpoint's state says.

    opened   opens them

    Errors   FileNotFoundError; ValueError if they are not those of the state
    """
    configuration = state["configuration"]
    try:
        dataset = opened(data, configuration["model"]["vocabulary"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} If the data have moved, name their place by --data.") from None
    then, now = state["data"], fingerprint(dataset)
    place, digest_then = short(configuration["data"]["data"], 200), short(then.get("sha256"))[:16]
    rule = "the data must be those that the run was trained on"
    got = f"data={data.data} (sha256={now['sha256'][:16]}), the run's={place} (sha256={digest_then})"
    require(now.items() <= then.items(), where, rule, got, "Name their place by --data.")
    return dataset


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Return numbers that identify these tokens: their counts, and a digest of all of them."""
    sizes = {"training_tokens": int(dataset.training.size), "validation_tokens": int(dataset.validation.size)}
    return {**sizes, "sha256": dataset.digest}


def resumed_run(path: str, changes: Mapping[str, Mapping[str, Any]], *, connects: bool = True) -> tuple[Job, Start]:
    """Return the job of a run that continues from its newest good checkpoint, and what it starts with.

    path      the run folder, which is locked from here on
    changes   settings by section and name; each must be one of MAY_CHANGE, or have the run's own value
    connects  whether a scheduler among them must answer

    Errors    FileNotFoundError if there is no run or no good checkpoint; RuntimeError if another process trains it,
              or no scheduler answers; ValueError for a change that is refused, other data than the run's, and no step
              left (`NoStepsLeft` if all are done)
    """
    require_compiler()
    if connects and (address := changes.get("dataflow", {}).get("scheduler")) is not None:
        require_scheduler(address)
    require_named(path, "train", "resume")
    path = str(expanded(path))
    rule, advice = "--resume must name the folder of a run", "The newest checkpoint in it is taken."
    require(not checkpoint.is_checkpoint(Path(path)), "train", rule, {"resume": path}, advice)
    folder = RunFolder(path, resumed=True)
    try:
        return _continued(folder, path, changes)
    except BaseException:
        folder.close()
        raise


def _continued(folder: RunFolder, path: str, changes: Mapping[str, Mapping[str, Any]]) -> tuple[Job, Start]:
    messages = list[str]()
    damaged, newest = checkpoint.checkpoints(folder.path), checkpoint.newest_good(folder.path, messages.append)
    if newest is None:
        got = f"resume={path} ({f'{len(damaged)} damaged' if damaged else 'none'})"
        advice = "Nothing of it can be resumed" if damaged else "It ended before its first"
        rule, got = "the run must have a good checkpoint", "; ".join([got, *messages])
        raise refusal(FileNotFoundError, "train", rule, got, f"{advice}: start again with another --out.")
    checkpoint_folder, state = newest
    c = _changed_configuration(path, state, changes)
    checkpoint.open_model_file(checkpoint_folder)  # makes a learned vocabulary known
    job = Job(c.pop("model"), **c)
    if not job.run.epochs:  # whose number of steps the data decide
        _require_steps_left(job, state, path)
    job = replace(job, dataset=data_of_run("train", job.data, state))
    _require_steps_left(job, state, path)
    (parameters, moments), done = checkpoint.read_checkpoint(checkpoint_folder, job.moments), state["step"]
    messages.append(f"resumed    {checkpoint_folder}: {done} of {job.steps} steps are done")
    units = state["arithmetic"], arithmetic(job)
    if units[0] != units[1]:
        change = " -> ".join(f"{unit['precision']} by {unit['unit']}" for unit in units)
        messages.append(f"arithmetic {change}: bits differ from here on")
    if others := [name for name, now in job.modules.items() if state["versions"].get(name, now) != now]:
        messages.append(f"modules    {', '.join(others)} changed: bits may differ from here on")
    records = {record["step"]: record for record, _ in metrics_lines(folder.path / METRICS, done)}
    written = [records.get(number, {}).get("loss") for number in range(done)]
    if missing := written.count(None):
        messages.append(f"metrics    {missing} of {done} steps are missing")
    losses = [nan if loss is None else loss for loss in written]
    validated = [loss for record in records.values() if (loss := record.get("validation_loss")) is not None]
    return job, Start(folder, parameters, moments, losses, validated[-1] if validated else nan, messages, state)


def _require_steps_left(job: Job, state: Mapping[str, Any], path: str) -> None:
    rule, got = "the run must have steps left", {"steps": job.steps, "resume": f"{path} ({state['step']} done)"}
    kind = NoStepsLeft if job.steps == state["step"] else ValueError
    require(job.steps > state["step"], "train", rule, got, "Give more --steps.", kind)


def _changed_configuration(
    path: str, state: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the configuration of a run, by sections, with the changes.

    Errors   as of `resumed_run`
    """
    made = {}
    for section, values in stored_settings("train", state).items():
        given = changes.get(section, {})
        if section == "dataflow":
            # Never an address from the folder: another person's could name theirs, whose data would be unpickled.
            values["scheduler"] = values["scheduler"] if values["scheduler"] in LOCAL_SCHEDULERS else "auto"
        if section == "run":
            values["out"] = from_root(path)
        may_change = (*MAY_CHANGE.get(section, ()), *(PLACES if section == "data" else ()))
        for setting, value in given.items():
            kept = values.get(setting)
            same = value in (kept, "", "auto") or _resolved(setting, value) == kept
            if not (same or setting in may_change):
                raise may_not_change(path, setting, value, kept)
        if section == "run" and any(map(given.get, LENGTHS)):
            require_one_length(given)
            values |= {"epochs": 0, "tokens": 0}  # the new length replaces the old one
        made[section] = SECTIONS[section](
            **values | {name: value for name, value in given.items() if name in may_change}
        )
    return made


def _resolved(setting: str, value: Any) -> Any:
    """Return a setting as `Job.resolved` has it."""
    if setting in ("out", "init"):
        return from_root(str(value))
    return _named(str(value)) if setting == "encoding" else value


def may_not_change(path: str, setting: str, value: Any, kept: Any = None) -> ValueError:
    """Return the error for a setting that a run keeps; it lists those that may change."""
    shown = "" if kept is None else f" (its own: {kept})" if kept != "" else " (it has none)"
    got = f"{setting}={value}{shown}, resume={path}"
    rule = "--resume keeps the run's own settings"
    return refusal(ValueError, "train", rule, got, f"May change: {', '.join(changeable())}.")


def changeable() -> list[str]:
    """Return the flags that may be given with --resume."""
    return [f"--{name.replace('_', '-')}" for names in MAY_CHANGE.values() for name in names]
