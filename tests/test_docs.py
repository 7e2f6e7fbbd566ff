"""Tests of the documentation: links have targets, and drawings, excerpts, tables, examples and the reference match the
code.
"""

import doctest
import inspect
import re
from importlib import import_module
from textwrap import indent

import pytest
from documents import PAGES, ROOT, anchors, excerpts, failures, links, tables
from drawings import DRAWINGS, FOLDER

import daskgpt
from daskgpt.config.model import preset
from daskgpt.config.run import OptimizerConfig
from daskgpt.model import layers
from daskgpt.model.parameters import PARAMETERS


def test_links_have_targets():
    lost = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            if "://" in path or path.startswith(("mailto:", "data:")):
                continue
            target = (page.parent / path).resolve() if path else page
            there = target.exists() and target.is_relative_to(ROOT)
            if not there or (anchor and anchor not in anchors(target)):
                lost.append(f"{page.name}: {link}")
    assert lost == []


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_match_the_code(name):
    stored = (FOLDER / name).read_text(encoding="utf-8")
    assert stored == DRAWINGS[name](), "write it anew with: python benchmarks/drawings.py"


def test_excerpts_match_the_code():
    shown = excerpts(ROOT / "docs" / "tour.md")
    assert shown
    for source, excerpt in shown:
        code = source.read_text(encoding="utf-8")
        assert any(indent(excerpt, " " * depth) in code for depth in (0, 4, 8, 12)), f"{source.name}: {excerpt}"


def test_parameters_match_the_table():
    config, rule = preset("gpt2", lora=16), OptimizerConfig().decay
    (table,) = [t for t in tables(ROOT / "docs" / "model.md") if t.head[-2:] == ["initial values", "decays"]]
    expected = []
    for row in PARAMETERS:
        sizes, decays = " x ".join(f"{size:,}" for size in row.shape(config)), rule == "all" or row.is_matrix
        expected.append([row.name, " ".join(row.axes), sizes, row.initial, "yes" if decays else "no"])
    assert table.rows == expected


def test_kernels_and_signatures_match_the_table_of_layers():
    made = set()
    for layer in (value for value in vars(layers).values() if isinstance(value, layers.Layer)):
        for row in filter(None, (layer.forward, *layer.backward.values())):
            module = row.kernel.__module__.rpartition(".")[2]
            made.add((row.signature.strip(), f"{module}.{row.kernel.__name__}"))
    calls = [row for table in tables(ROOT / "docs" / "model.md") if table.head[0] == "call" for row in table.rows]
    assert calls
    assert [call for call, signature, kernel in calls if (signature.strip(), kernel) not in made] == []


def test_the_reference_lists_the_public_names():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`", text.partition("## Training")[0])) == set(daskgpt.__all__)
    assert set(re.findall(r"^\.\. auto\w+:: daskgpt\.(\w+)$", text, re.MULTILINE)) == set(daskgpt.__all__)
    listed = re.findall(r"automodule:: ([\w.]+)\n *:members:(.*)", text)
    members = [(module, name) for module, names in listed for name in re.findall(r"\w+", names)]
    assert members
    assert [member for member in members if not hasattr(import_module(member[0]), member[1])] == []


FUNCTIONS = [name for name in daskgpt.__all__ if inspect.isfunction(getattr(daskgpt, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_of_a_public_function(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = inspect.unwrap(getattr(daskgpt, name))
    module = import_module(function.__module__)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, module)
    assert example.examples, f"{name} has no example"
    assert failures(example) == ""
