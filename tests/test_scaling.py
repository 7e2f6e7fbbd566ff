"""`bench --scaling`: a run for each number of threads, what it tells, and what it refuses."""

from __future__ import annotations

import json

import pytest

from daskgpt import bench
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.random_tokens import BenchConfig
from daskgpt.instruments.scaling import orders

SIZE = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]
FLAGS = [*SIZE, "--steps", "2", "--warmup", "1", "--recorded", "1"]


@pytest.mark.slow
def test_a_run_for_each_number_of_threads(capsys):
    assert bench.main([*FLAGS, "--scaling", "--threads", "3", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    rows = json.loads(out)["scaling"]
    assert [row["threads"] for row in rows] == [1, 2, 3]
    assert (rows[0]["speedup"], rows[0]["efficiency"]) == (1.0, 1.0)
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"], rel=1e-3)
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["threads"], rel=1e-3)
        assert row["chunks"] == 4 // row["batch_chunk"] * (32 // row["sequence_chunk"])
        assert row["grain"] != "auto"
    assert len({row["loss"] for row in rows}) == 1, "one number, whatever the threads"


@pytest.mark.slow
def test_the_table_for_people(capsys):
    assert bench.main([*FLAGS, "--scaling", "--threads", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(out) if "efficiency" in line)
    assert [line.split()[0] for line in out[head + 1 : head + 3]] == ["1", "2"]
    assert "100%" in out[head + 1]
    assert out[-1] == "all gave the same loss, bit for bit"


def test_the_dials_that_are_given_stay():
    found = orders(GPT2Config(), BenchConfig(), DataflowConfig(threads=4, batch_chunk=3, grain="block"))
    assert [order.point.threads for order in found] == [1, 2, 4]
    assert {(order.point.batch_chunk, order.point.grain) for order in found} == {(3, "block")}
    assert all(order.study.warmup >= 3 for order in found), "chunks and grain are settled before anything is timed"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan"], r"bench: --scaling must come without --plan and --against; got plan=True"),
        (["--scheduler", "sync"], r"bench: --scaling must run on threads or on a local cluster; got scheduler=sync\."),
    ],
)
def test_what_it_refuses(flags, message):
    with pytest.raises(ValueError, match=message):
        bench.main([*FLAGS, "--scaling", *flags])
