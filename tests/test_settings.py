"""Docstrings of configurations: what `help` shows a person who has no command line."""

from __future__ import annotations

import pydoc
from dataclasses import fields

import pytest

import daskgpt
from daskgpt.generate import GenerateConfig
from daskgpt.instruments.random_tokens import BenchConfig
from daskgpt.instruments.study.grid import StudyConfig

PUBLIC = [getattr(daskgpt, name) for name in daskgpt.__all__ if name.endswith("Config")]


@pytest.mark.parametrize("config", [*PUBLIC, GenerateConfig, BenchConfig, StudyConfig])
def test_help_lists_every_field_with_its_meaning_unit_and_default(config):
    page = pydoc.render_doc(config, renderer=pydoc.plaintext)
    own = page[: page.index("Methods defined here")]
    told = " ".join(own.replace("|", " ").split())
    for f in fields(config):
        assert f" {f.name}: {f.type} {f.metadata['help'].replace('|', ' ')}" in told
        for part in (f.metadata["unit"], ", ".join(f.metadata["choices"]), f"default: {f.default or ''}".strip()):
            assert part in told
    assert max(map(len, own.split("Fields")[1].splitlines())) <= 80


def test_the_docstring_itself_comes_first():
    document = daskgpt.GPT2Config.__doc__
    assert document.startswith("The size of a GPT-2 model.\n\nErrors   ")
    assert document.index("Source   ") < document.index("Fields   blocks: int")
