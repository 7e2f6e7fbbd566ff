"""A run's metrics as TensorBoard's events, with the parts of its package that need no TensorFlow and no PyTorch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from daskgpt.training.record_file import RecordFile

FORMAT = "brain.Event:2"  # what TensorBoard calls its files' format
# Training and validation in one chart, and what belongs together under one heading; the rest is under "run".
GROUPS = {
    "loss": ("loss", "validation_loss"),
    "optimizer": ("learning_rate", "norm"),
    "speed": ("tokens_per_s", "gflop_per_s", "product_share"),
    "phases": ("forward_s", "backward_s", "update_s", "idle", "validation_s", "checkpoint_s", "checkpoint_waited_s"),
}
LEFT_OUT = ("step", "tokens", "seconds")  # an event has its step and time, and each number costs some microseconds
GROUP = {name: group for group, names in GROUPS.items() for name in names}


def open_tensorboard(folder: Path, sections: Mapping[str, Any], done: int | None) -> RecordFile:
    """A file of events beside a run's metrics: `tensorboard --logdir RUNS` shows each run by its folder's name.

    done   after how many steps a run goes on: what earlier files say of later ones counts no longer
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.record_writer import RecordWriter

    def framed(**fields: Any) -> bytes:
        buffer = BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return buffer.getvalue()

    def encode(record: Mapping[str, Any]) -> bytes:
        numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged(record)]
        return framed(step=record["step"], summary=Summary(value=numbers))

    # TensorBoard reads the files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}.{os.getpid()}"
    told = TensorProto(dtype=DT_STRING, string_val=[as_markdown(sections).encode()])
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    configuration = Summary(value=[Summary.Value(tag="configuration", tensor=told, metadata=kind)])
    header = framed(file_version=FORMAT)
    header += framed(step=done, session_log=SessionLog(status=SessionLog.START)) if done is not None else b""
    header += framed(step=done or 0, summary=configuration)
    return RecordFile(folder / name, encode, new=True, header=header)


def tagged(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A record's numbers by the names that TensorBoard shows them under: `loss/validation_loss`, `workers/0/idle`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif name not in LEFT_OUT and isinstance(value, int | float):
            yield f"{GROUP.get(name, 'run')}/{name}", value


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float):
            yield f"{before}{name}", value


def as_markdown(sections: Mapping[str, Any]) -> str:
    """A run's configuration as a table, which TensorBoard's text page shows."""
    rows = ["| setting | value |", "|---|---|"]
    for title, section in sections.items():
        values = section if isinstance(section, Mapping) else vars(section)
        rows += [f"| {title}.{name} | {value} |" for name, value in values.items()]
    return "\n".join(rows)
