"""The documentation: its links lead somewhere, its examples are true, its tables and drawings are those of the code."""

from __future__ import annotations

import doctest
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from chromium import PATH, visit
from documents import PAGES, ROOT, Table, anchors, code, links, tables
from drawings import DRAWINGS, FOLDER

import daskgpt
from daskgpt.config.model import GPT2Config, preset
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig
from daskgpt.graph.calls import is_pick
from daskgpt.graph.grain import in_order
from daskgpt.graph.nodes import Key
from daskgpt.kernels import layernorm
from daskgpt.model.layers import LAYERS, PASS, Row
from daskgpt.model.parameters import PARAMETERS, parameter_count
from daskgpt.training.step import TrainingStep

DOCS = ROOT / "docs"
MODEL = DOCS / "model.md"
WRITTEN = [page for page in PAGES if page.parent == DOCS]


def names(pages):
    return [page.relative_to(ROOT).as_posix() for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page):
    lost = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith(("mailto:", "data:")):
            continue
        target = (page.parent / path).resolve() if path else page
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_of_the_documentation_is_reached_from_its_index_or_from_the_readme():
    begins = (DOCS / "index.md", ROOT / "README.md")
    found = [(page, link.partition("#")[0]) for page in begins for link in links(page) if "://" not in link]
    reached = {(page.parent / link).resolve() for page, link in found}
    assert [page.name for page in WRITTEN if page not in reached and page.name != "index.md"] == []


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_examples_are_true(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = code(page, "python")
    parsed = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(parsed.examples) >= examples.count(">>>"), "an example without its prompt"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(parsed, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_the_code_makes(name):
    stored = (FOLDER / name).read_text(encoding="utf-8")
    assert stored == DRAWINGS[name](), "write it anew with: python tests/drawings.py"


def test_there_is_no_other_drawing():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(DRAWINGS)


def table(page, *head: str) -> Table:
    (found,) = [each for each in tables(page) if each.head == list(head)]
    return found


def test_the_variables_have_the_values_that_the_code_has():
    known = {
        "config": preset("gpt2"),
        "data": DataConfig(),
        "dataflow": DataflowConfig(),
        "layernorm": layernorm,
        "parameter_count": parameter_count,
    }
    rows = table(MODEL, "symbol", "meaning", "gpt2", "in the code").rows
    assert len(rows) >= 15
    for symbol, _, value, where in rows:
        assert float(value.replace(",", "")) == eval(where, known), symbol


def test_the_parameters_are_those_of_the_table():
    config, rule = preset("gpt2"), OptimizerConfig().decay
    expected = [
        [
            row.name,
            " ".join(row.axes),
            " x ".join(f"{size:,}" for size in row.shape(config)),
            row.initial,
            "yes" if rule == "all" or row.is_matrix else "no",
        ]
        for row in PARAMETERS
    ]
    assert table(MODEL, "name", "axes", "gpt2", "initial values", "decays").rows == expected


def test_the_layers_are_those_of_the_table():
    def told(call: str, row: Row) -> tuple[str, str, str]:
        kernel = f"{row.kernel.__module__.rpartition('.')[2]}.{row.kernel.__name__}"
        return call, row.signature.strip(), kernel

    expected = {told(layer.name, layer.forward) for layer in LAYERS}
    for layer in LAYERS:
        backward = {argument: row for argument, row in layer.backward.items() if row is not PASS}
        expected |= {told(f"{layer.name}, d{argument}", row) for argument, row in backward.items()}
    found = [each.rows for each in tables(MODEL) if each.head == ["call", "signature", "kernel"]]
    assert {tuple(cell.strip() for cell in row) for rows in found for row in rows} == expected


def test_the_arrays_of_a_block_are_those_of_a_recorded_step():
    config, batch = preset("gpt2"), (4, 64)
    sizes = {"B": batch[0], "T": batch[1], "C": config.channels, "NH": config.heads}
    found = table(DOCS / "memory.md", "made by", "axes", "MB", "kept").rows
    expected = forward_arrays(replace(config, blocks=3), batch)
    assert [(made, numbers(axes, sizes), kept) for made, axes, _, kept in found] == expected
    assert [f"{numbers(axes, sizes) * 4 / 1e6:.2f}" for _, axes, _, _ in found] == [size for _, _, size, _ in found]


def numbers(axes: str, sizes: dict[str, int]) -> int:
    """How many numbers an array has: `B T 3C` with the sizes of B, T and C."""
    parts = [re.fullmatch(r"(\d*)(\w+)", axis).groups() for axis in axes.split()]
    return math.prod(int(times or 1) * sizes[axis] for times, axis in parts)


def forward_arrays(config: GPT2Config, batch: tuple[int, int]) -> list[tuple[str, int, str]]:
    """What the second block of a recorded step makes in its forward pass: name, numbers, whether it is kept."""
    step = TrainingStep(config, batch, batch, OptimizerConfig(), grain="kernel")
    graph, found = step.recorded.unmerged, []
    readers: dict[Key, set[Key]] = {}
    for key, node in graph.items():
        for source in node.dependencies:
            readers.setdefault(source, set()).add(key)
    again = {step.recorded.origin(key).where for key in graph if getattr(step.recorded.origin(key), "again", False)}
    for key in in_order(graph):
        origin = step.recorded.origin(key)
        if origin is None or (origin.block, origin.phase) != (1, "forward") or is_pick(graph[key]):
            continue
        picks = sorted((each for each in readers[key] if is_pick(graph[each])), key=lambda each: each[0]) or [key]
        for number, (own, result) in enumerate(zip(picks, graph[key].func.results(key), strict=True)):
            made = f"{origin.layer} {origin.where.removeprefix('h.1.')}" + (", log-sum-exp" if number else "")
            passes = {step.recorded.origin(reader).phase for reader in readers[own]}
            cheap = origin.where in again and origin.layer in ("layernorm", "gelu")
            kept = "made again" if cheap else "yes" if "backward" in passes else "no"
            found.append((made, math.prod(result.shape), kept))
    return found


def test_the_reference_has_every_public_name():
    listed = {
        name for row in table(DOCS / "reference.md", "name", "what it is", "in").rows for name in row[0].split(", ")
    }
    assert listed == set(daskgpt.__all__)
    drawn = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert [name for name in listed if not re.search(rf"auto(function|class):: daskgpt\.{name}\n", drawn)] == []


def test_the_metrics_of_a_run_are_those_of_the_table(tmp_path):
    known = {
        name
        for row in table(DOCS / "metrics.md", "name", "unit", "definition", "when").rows
        for name in row[0].split(", ")
    }
    model = preset("tiny", blocks=1, channels=32, positions=32)
    data = {"data": str(ROOT / "daskgpt/config/*.py"), "sequence_length": 32, "batch_size": 4}
    run = {"steps": 3, "validation_batches": 1, "out": str(tmp_path / "run"), "sample_tokens": 0}
    daskgpt.fit(model, data, {"clip": 1.0, "skip_outliers": 1e-9}, run=run, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = {name for line in lines for name in line}
    assert written <= known
    source = "".join(path.read_text() for path in (ROOT / "daskgpt").rglob("*.py"))
    assert [name for name in known - written if f'"{name}"' not in source] == []  # of clusters, losses, checkpoints


def commands(page) -> list[str]:
    return [line.partition("#")[0].strip() for line in code(page, "sh").splitlines() if line.strip()]


@pytest.mark.slow
def test_the_versions_of_the_study_end_with_one_loss(tmp_path):
    given = commands(DOCS / "execution.md")
    assert len(given) == 5
    losses = set()
    for number, command in enumerate(given):
        program, *words = shlex.split(command)
        assert program == "python"
        out = tmp_path / str(number)
        done = subprocess.run([sys.executable, *words, "--out", out], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.add((out / "metrics.jsonl").read_text().splitlines()[-1].partition("loss")[2].partition(",")[0])
    assert len(losses) == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built by the command that the index names."""
    for tool in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(tool, reason="the extra docs is not installed")
    (command,) = commands(DOCS / "index.md")
    install, _, build = command.partition(" && ")
    assert install == 'pip install -e ".[docs]"'
    program, *words, out = shlex.split(build)
    assert (program, out) == ("sphinx-build", "site")
    folder = tmp_path_factory.mktemp("built") / out
    done = subprocess.run([sys.executable, "-m", "sphinx", *words, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_without_a_warning_and_asks_no_network(site):
    pages = sorted(site.rglob("*.html"))
    assert {f"{page.stem}.html" for page in WRITTEN} <= {page.name for page in pages}
    asks = re.compile(
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//'
    )
    assert [page.name for page in pages if asks.search(page.read_text(encoding="utf-8"))] == []
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not any(re.search(r"url\([\"\']?(?:https?:)?//|@import", style) for style in styles)


def test_formulas_of_the_site_are_drawn_by_the_browser_itself(site):
    text = (site / "docs" / "model.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 50
    assert "$" not in re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)


@pytest.mark.skipif(PATH is None, reason="no Chromium")
@pytest.mark.parametrize("page", ["index", "model", "memory", "execution", "metrics", "decisions", "reference"])
def test_a_page_fits_a_phone_and_asks_for_its_own_files_alone(site, page, tmp_path):
    found = visit(
        site / "docs" / f"{page}.html",
        tmp_path / "profile",
        "document.readyState == 'complete'",
        ("document.documentElement.scrollWidth - document.documentElement.clientWidth",),
        size=(390, 844),
        phone=True,
    )
    assert found.values == [0]
    assert [url for url in found.requests if not url.startswith(("file:", "data:"))] == []
    assert found.messages == []
