"""Where a run starts: from random values, the user's, or a model, and what it takes over from that model's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig
from daskgpt.data.dataset import Dataset, is_token_folder, is_token_source, load_dataset, load_prepared
from daskgpt.data.tokenizer import encoding_named, encoding_of, encoding_of_model, is_to_be_learned
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import RandomParameters, check_dtypes, check_parameters
from daskgpt.training.job import Job
from daskgpt.training.run_folder import data_of, read_model_of


@dataclass(frozen=True)
class Start:
    """A model to go on from, and the data of the run that made it; None for a model file alone."""

    init: str
    model: StoredModel
    data: DataConfig | None

    @classmethod
    def read(cls, init: str) -> Start:
        """Errors   FileNotFoundError; ValueError where it is no model, or its run's configuration cannot be read"""
        return cls(init, read_model_of(init), data_of(init))

    @property
    def config(self) -> GPT2Config:
        """The size of the model."""
        return self.model.config

    def check_size(self, given: Mapping[str, int], where: str, rule: str, advice: str) -> None:
        """Numbers of a model, of which each must be this one's.

        Errors   ValueError naming those that are not
        """
        own = {name: getattr(self.config, name) for name, value in given.items() if getattr(self.config, name) != value}
        if own:
            got = ", ".join(f"{name}={given[name]}" for name in own)
            theirs = ", ".join(f"{name}={value}" for name, value in own.items())
            raise refusal(ValueError, where, rule, f"{got}, init={self.init} ({theirs})", advice)

    def data_config(self, given: Mapping[str, Any]) -> DataConfig:
        """The data of this model's run, but for what is given. The encoding is always the run's own.

        Errors   ValueError where another encoding is given than that of the run
        """
        if self.data is None:
            length = self.model.sequence_length or min(DataConfig().sequence_length, self.config.positions)
            return DataConfig(**{"sequence_length": length} | dict(given))
        kept = ("data", "encoding", "validation_fraction", "held_out", "sequence_length")
        known = asdict(self.data)
        chosen = DataConfig(**{name: known[name] for name in kept} | dict(given))
        return replace(chosen, encoding=self.encoding(chosen.encoding))

    def encoding(self, wanted: str) -> str:
        """The run's encoding; for a model file alone the one that it says, or that its vocabulary means."""
        rule, got = "a model to start from has its own encoding", {"encoding": wanted, "init": self.init}
        require(not is_to_be_learned(wanted), "train", rule, got, "Leave --encoding out.")
        own, wanted = self.data.encoding if self.data else self.model.encoding, _named(wanted)
        if not own:
            return encoding_of_model(self.config.vocabulary) if wanted == "auto" else wanted
        require(
            wanted in ("auto", own),
            "train",
            "the encoding must be that of the run to start from",
            {"encoding": wanted, "init": f"{self.init} ({own})"},
            "Leave --encoding out.",
        )
        return own


def _named(encoding: str) -> str:
    return encoding if encoding == "auto" or is_to_be_learned(encoding) else encoding_named(encoding)


def open_dataset(data: DataConfig, vocabulary: int, start: Start | None = None) -> Dataset:
    """The tokens that a configuration names.

    vocabulary   ids of the model: where the encoding is auto, those of GPT-2 mean its encoding
    start        the model that training goes on from: auto is then its run's encoding

    Errors       ValueError where the encoding is not the run's, or as of load_dataset
    """
    if is_token_folder(data.data):
        wanted = start.encoding(data.encoding) if start else data.encoding
        return load_prepared(data.data, "" if wanted == "auto" else wanted, data.sequences, data.sequence_length)
    encoding = start.encoding(data.encoding) if start else _named(data.encoding)
    if encoding == "auto":
        encoding = "gpt2" if is_token_source(data.data) else encoding_of(vocabulary)
    return load_dataset(
        data.data,
        encoding,
        validation_fraction=data.validation_fraction,
        held_out=data.held_out,
        sequence_length=data.sequence_length,
    )


def start_values(
    job: Job, start: Start | None = None, parameters: Mapping[str, np.ndarray] | None = None
) -> Mapping[str, np.ndarray]:
    """Initial parameters: those given, those of a model, or random ones.

    Errors   ValueError where those given are not of the job's model, TypeError unless float32
    """
    if parameters is not None:
        check_parameters(job.config, parameters)
        check_dtypes("fit", parameters, np.float32)
        return {name: value.copy() for name, value in parameters.items()}  # the run may write over its own
    return start.model.parameters if start else RandomParameters(job.config, job.run.seed)
