"""Tests of the documentation: links have targets, and drawings, excerpts and parameters match the code."""

from textwrap import indent

import pytest
from documents import PAGES, ROOT, anchors, excerpts, links, tables
from drawings import DRAWINGS, FOLDER

from daskgpt.config.model import preset
from daskgpt.config.run import OptimizerConfig
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
    config, rule = preset("gpt2"), OptimizerConfig().decay
    (table,) = [t for t in tables(ROOT / "docs" / "model.md") if t.head[-2:] == ["initial values", "decays"]]
    expected = []
    for row in PARAMETERS:
        sizes, decays = " x ".join(f"{size:,}" for size in row.shape(config)), rule == "all" or row.is_matrix
        expected.append([row.name, " ".join(row.axes), sizes, row.initial, "yes" if decays else "no"])
    assert table.rows == expected
