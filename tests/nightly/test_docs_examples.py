"""Slow tests of the documentation: its examples, its table of metrics, and its site."""

import doctest
import re
import subprocess
import sys

import pytest
from documents import ROOT, code, failures, tables
from small_runs import metrics_of

import daskgpt
from daskgpt.config.model import preset

DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_documented_examples_pass(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = code(page, "python")
    parsed = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(parsed.examples) >= examples.count(">>>"), "an example without its prompt"
    assert failures(parsed) == ""


def test_documented_sweep_runs(small_text, tmp_path):
    (sweep,) = re.findall(
        r"```python\n(import daskgpt\nfrom distributed .*?)```", (DOCS / "python.md").read_text(), re.DOTALL
    )
    (tmp_path / "sweep.py").write_text(sweep.replace("text.txt", str(small_text)).replace('"steps": 200', '"steps": 2'))
    done = subprocess.run([sys.executable, "sweep.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\{0.0003: [\d.]+, 0.001: [\d.]+, 0.003: [\d.]+\}\n", done.stdout)


def test_metrics_of_a_run_match_the_table(tmp_path):
    (table,) = [table for table in tables(DOCS / "metrics.md") if table.head == ["name", "unit", "definition", "when"]]
    documented = {name for row in table.rows for name in row[0].split(", ")}
    model = preset("tiny", blocks=1, channels=32, positions=32)
    data = {"data": str(ROOT / "daskgpt/config/*.py"), "sequence_length": 32, "batch_size": 4}
    run = {"steps": 3, "validation_batches": 1, "out": str(tmp_path / "run"), "sample_tokens": 0}
    daskgpt.fit(model, data, {"clip": 1.0}, run=run, quiet=True)
    written = {name for record in metrics_of(tmp_path / "run") for name in record}
    assert {"loss", "norm", "validation_loss"} <= written <= documented


def test_site_builds_without_warnings_and_needs_no_network(tmp_path):
    for tool in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(tool, reason="the extra docs is not installed")
    words = [sys.executable, "-m", "sphinx", "-W", "-c", "docs", ".", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert {f"{page.stem}.html" for page in WRITTEN} <= set(pages)
    asks = re.compile(r'<(script|img|iframe|link)[^>]*(src|rel="stylesheet"[^>]*href)="(https?:)?//')
    assert [name for name, text in pages.items() if asks.search(text)] == []
