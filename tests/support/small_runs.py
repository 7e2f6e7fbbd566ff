"""The smallest runs for tests of checkpoints, and comparisons of them."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import daskgpt

MODEL = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, vocabulary=257, positions=16)
STEPS = 12
DISTURBED_STEPS = 30  # of runs to which something happens
# The same as flags.
FLAGS = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16 --groups 4 --warmup 3"
FLAGS += " --validation-batches 1 --sample-tokens 0 --save-minutes 0"
OPTIMIZER = daskgpt.OptimizerConfig(warmup=3)


def fit(
    text: Path,
    out: Path | str = "",
    *,
    config: Any = MODEL,
    optimizer: Any = OPTIMIZER,
    dataflow: Any = None,
    groups: int = 0,
    quiet: bool = True,
    client: Any = None,
    on_step: Any = None,
    parameters: Any = None,
    callbacks: Any = (),
    **run: Any,
) -> Any:
    """A run, from random values if none are given."""
    settings = {"steps": STEPS, "validation_batches": 1, "save_minutes": 0, "out": str(out), "sample_tokens": 0} | run
    data = {"data": str(text), "batch_size": 4, "sequence_length": 16, "groups": groups}
    more = {"client": client, "on_step": on_step, "parameters": parameters, "callbacks": callbacks}
    return daskgpt.fit(config, data, optimizer, dataflow, settings, quiet=quiet, **more)


def fit_in_parts(
    text: Path,
    out: Path | str,
    scheduler: str,
    on_step: Any = None,
    *,
    precision: str = "float32",
    engine: str = "ranks",
    **more: Any,
) -> Any:
    """A run of which each of four workers may have a part, and which prints what it does; return its folder."""
    dataflow = {"scheduler": scheduler, "threads": 2, "batch_chunk": 1, "precision": precision, "engine": engine}
    fit(text, out, dataflow=dataflow, on_step=on_step, groups=4, quiet=False, **more)
    return out


def stopping_at(step: int) -> Any:
    """Return an `on_step` that stops after some steps, as Ctrl-C does."""

    def stop(number: int, metrics: Any) -> None:
        if number + 1 == step:
            signal.raise_signal(signal.SIGINT)

    return stop


def tensors_of(run: Path, step: int | None = None) -> tuple[bytes, bytes]:
    """The bytes of the model and of the optimizer's moments, of a step or the last one."""
    folder = run / ("latest" if step is None else f"step-{step:08}")
    return (folder / "model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same losses, models and moments, bit for bit."""
    return losses_of(one) == losses_of(other) and tensors_of(one) == tensors_of(other)


def config_of(run: Path) -> dict[str, dict[str, Any]]:
    """The configuration that a run has written."""
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    """From the metrics, which must have each step once."""
    records = metrics_of(run)
    assert [record["step"] for record in records] == list(range(len(records)))
    return [record["loss"] for record in records]


def steps_in(run: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, damaged ones by another name left out."""
    return sorted(int(path.name[5:]) for path in run.glob("step-*") if path.name[5:].isdigit())
