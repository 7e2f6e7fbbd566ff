"""Fields of configurations, from which command-line flags derive."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from daskgpt.config.errors import nearest, require


def setting(default: Any, help: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that can be a flag, with its help text, unit and allowed values."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices})


def one_of(config: Any, name: str) -> None:
    choices = next(f for f in fields(config) if f.name == name).metadata["choices"]
    value = getattr(config, name)
    require(
        value in choices, type(config).__name__, f"{name} must be known", {name: value}, nearest(value, list(choices))
    )
