"""A model as a terminal and a notebook show it: its size and tensors, and none of its numbers."""

from __future__ import annotations

from typing import Protocol

from daskgpt.config.model import GPT2Config
from daskgpt.config.rich import html_table
from daskgpt.model.parameters import parameter_count, tensors

LINES = 8  # of tensors that have no block, and of the first block, at most


class Model(Protocol):
    """What is shown of a model."""

    @property
    def config(self) -> GPT2Config: ...
    @property
    def encoding(self) -> str: ...
    @property
    def sequence_length(self) -> int: ...


def model_text(name: str, model: Model) -> str:
    """A few lines."""
    rows = [f"{title:12}{text}" for title, text in _facts(model)]
    return "\n".join([f"{name} of {parameter_count(model.config):,} parameters", *rows])


def model_html(name: str, model: Model) -> str:
    """The same, and the shapes of the tensors: those of one block stand for all."""
    shown = {n: t.shape for n, t in tensors(model.config).items() if not n.startswith("h.") or ".0." in n}
    rows = [[_for_all(n, model.config), " x ".join(map(str, shape))] for n, shape in shown.items()]
    title = f"{name} of {parameter_count(model.config):,} parameters"
    return html_table(title, _facts(model)) + html_table("Tensors", rows)


def _facts(model: Model) -> list[tuple[str, str]]:
    c, known = model.config, model.encoding or "not known"
    length = f", trained on sequences of {model.sequence_length}" if model.sequence_length else ""
    return [
        ("size", f"{c.blocks} blocks, {c.heads} heads, {c.channels} channels"),
        ("tokens", f"vocabulary {c.vocabulary:,} ({known}), {c.positions:,} positions{length}"),
    ]


def _for_all(name: str, config: GPT2Config) -> str:
    return name.replace("h.0.", f"h.0 .. {config.blocks - 1}.") if config.blocks > 1 else name
