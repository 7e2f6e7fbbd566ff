"""Tests of what notebooks use and draw (`daskgpt.measure`, graphs, lanes), of their files, which are stored without
results, and of the verdicts on a puzzle's answers.
"""

import json
import re
from itertools import pairwise

import dataflow
import matplotlib.pyplot as plt
import pytest
from lanes import lanes
from puzzles import puzzle
from run_notebooks import NOTEBOOKS
from small_runs import MODEL

import daskgpt

DATA = {"batch_size": 4, "sequence_length": 16}


def graph(grain="kernel", batch_chunk=2, sequence_chunk=8, threads=2):
    cut = {"grain": grain, "batch_chunk": batch_chunk, "sequence_chunk": sequence_chunk, "scheduler": "threads"}
    return dataflow.dataflow(MODEL, DATA, cut | {"threads": threads})


def test_only_attention_joins_chunks_of_a_sequence():
    block = graph().of(block=0)
    attention = "attention attn[0, all]"
    linear = {name for name in block.before(attention) if name.startswith("linear")}
    assert linear == {"linear attn.c_attn[0, 0]", "linear attn.c_attn[0, 1]"}
    assert {task.chunk[0] for task in map(block.tasks.get, block.before(attention) | block.after(attention))} == {0}
    assert "attention attn[1, all]" in block.beside(attention)
    assert {task.chunk[0] for task in block.tasks.values()} == {0, 1}


def test_longest_chain():
    block = graph().of(block=0)
    chain = block.chain()
    assert set(pairwise(chain)) <= set(block.edges)
    assert len(chain) == 12
    assert max(block.depths().values()) == len(chain) - 1
    assert len(block.tasks) == 44


def test_barriers_and_updates_hand_nothing_on():
    flow = dataflow.dataflow(MODEL, DATA, {"batch_chunk": 2, "barrier": "layer"})
    silent = {task.name for task in flow.tasks.values() if not task.calls or task.name.startswith("adamw ")}
    assert {name for name, task in flow.tasks.items() if not task.bytes} == silent
    assert flow.tasks["gelu h.0.mlp[0, 0]"].bytes == 2 * 16 * 4 * MODEL.channels * 4  # a chunk, float32


@pytest.mark.parametrize("threads", [2, 4])
def test_drawing_has_boxes_and_stripes(threads):
    block = graph("segment", threads=threads).of(block=0)
    assert (3 in {len(task.chunk or ()) for task in block.tasks.values()}) == (threads == 4), "attention by heads"
    html = dataflow.Drawing(block, marked=block.chain(), hidden=block.edges[:1])._repr_html_()
    assert html.count("<title>") == len(block.tasks)
    assert html.count("<path") == len(block.edges) - 1
    assert html.count("<rect") == sum(len(task.calls) + 1 for task in block.tasks.values())
    assert len(re.findall('stroke="#d1242f" stroke-width="2.5"', html)) == len(block.chain())
    assert "tasks" in repr(block)
    for function, argument, told in ((block.before, "attention", "task=attention"), (graph().of, 9, "block=9")):
        with pytest.raises(ValueError, match=told):
            function(argument)


def test_dataflows_in_turns_have_equal_losses(monkeypatch):
    models = {
        "sequential": {"scheduler": "sync", "grain": "segment"},
        "fork-join": {"threads": 2, "barrier": "layer", "grain": "kernel"},
        "barrier-free": {"threads": 2, "barrier": "none", "grain": "segment"},
    }
    models = {name: {"batch_chunk": 2, "sequence_chunk": 16, **settings} for name, settings in models.items()}
    measured = daskgpt.measure(MODEL, DATA, models, turns=2, steps=4)
    assert list(measured) == list(models)
    assert {run.losses for run in measured.values()} == {measured["sequential"].losses}
    assert [(run.threads, len(run.timeline.steps)) for run in measured.values()] == [(1, 4), (2, 4), (2, 4)]
    assert measured.speedup("sequential") == measured.efficiency("sequential") == 1
    assert measured.efficiency("fork-join") == pytest.approx(measured.speedup("fork-join") / 2)
    assert measured["sequential"].timeline.summary.overlap == 0
    assert all(name in repr(measured) for name in models)
    monkeypatch.setattr(plt, "show", lambda: None)
    lanes({name: run.timeline for name, run in measured.items()})
    assert [len(axes.collections) for axes in plt.gcf().axes] == [2 * (1 + 2 + 2)], "a lane, and its bars, per thread"
    plt.close("all")
    with pytest.raises(ValueError, match="turns=0"):
        daskgpt.measure(MODEL, DATA, models, turns=0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize(
    ("answer", "worth", "more"),
    [(None, "Your turn.", ""), (2, "Right.", "two"), (3, "Not yet.", "count"), ("two", "Not yet.", "TypeError")],
)
def test_puzzle_verdicts(answer, worth, more):
    told = puzzle(answer, lambda x: x + 1 == 3, "count", "two")
    assert bool(told) == (worth == "Right.")
    assert str(told).startswith(worth)
    assert more in str(told)
    assert f"<b>{worth}</b>" in told._repr_html_()
