"""What `--plan --workers` says before a step, beside what workers of a real cluster did in some steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from machines import wait_until
from test_spreading import spread_step
from tolerances import TOLERANCES

from daskgpt import bench
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.memory import predict
from daskgpt.instruments.traffic import SHOWN, describe_loads, loads
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.addresses import open_scheduler

# So large that what passes is numbers: a message's frame has some hundred bytes.
CONFIG = replace(SMALL, channels=128, blocks=4)
STEPS = 5
WEIGHTS = ("float32", "bfloat16")


def written(dask_worker):
    """Who asked for results of this worker, and how many bytes it wrote, headers and all; nothing to the client."""
    log = dask_worker.transfer_outgoing_log
    return [(entry["who"], entry["compressed"]) for entry in log if entry["who"]]


def sending(dask_worker):
    return dask_worker.transfer_outgoing_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "batch", "groups", "precision"),
    [
        (2, 64, 1, "float32"),
        (2, 64, 2, "float32"),
        (3, 48, 1, "float32"),
        (2, 64, 1, "bfloat16"),
        (4, 64, 4, "float32"),
        (4, 64, 4, "bfloat16"),
    ],
    ids=["2", "groups", "3", "bfloat16", "4", "4-bfloat16"],
)
def test_what_workers_send_is_what_was_predicted(workers, batch, groups, precision):
    """In the median step: now and then a result is fetched twice."""
    options = {"groups": groups, "precision": precision_of(precision)}
    step = spread_step((batch, 12), (batch // workers, 12), workers, CONFIG, **options)
    predicted, random = loads(step), np.random.default_rng(4)
    with open_scheduler("local", workers) as scheduler:
        state, looks = step.initial(random_parameters(CONFIG, random)), []
        for _ in range(1 + STEPS):
            _, state = step(scheduler, state, *random_batch(CONFIG, random, (batch, 12)), 9)
            scheduler.settle(state.packs)
            wait_until(lambda: not any(scheduler.client.run(sending).values()), "transfers that end")
            looks.append(scheduler.client.run(written))
        numbered = scheduler.numbered
    steps = [
        [(sender, who, size) for sender in numbered for who, size in after[sender][len(before[sender]) :]]
        for before, after in pairwise(looks)
    ]
    for address, own in zip(numbered, predicted):
        sent = median(sum(size for sender, _, size in passed if sender == address) for passed in steps)
        received = median(sum(size for _, who, size in passed if who == address) for passed in steps)
        assert sent == pytest.approx(own.sent.total(), **TOLERANCES["bytes on the way"])
        assert received == pytest.approx(own.received.total(), **TOLERANCES["bytes on the way"])


def test_what_passes_by_kind():
    few, many = loads(spread_step((2, 1), (1, 1))), loads(spread_step((64, 12), (8, 12)))
    assert sum(own.sent["sums"] for own in few) == 0 < sum(own.sent["activations"] for own in few)
    assert sum(own.sent["activations"] for own in many) == 0 < sum(own.sent["sums"] for own in many)
    parameters = sum(value.nbytes for value in random_parameters(SMALL, np.random.default_rng(0)).values())
    assert sum(own.sent["weights"] for own in many) == parameters, "each weight once, to who does not own it"
    assert sum(own.sent["losses"] for own in many) == 64 * 12 * 4 / 2
    assert [own.sent.total() for own in many] == [own.received.total() for own in reversed(many)]


@pytest.mark.parametrize("precision", WEIGHTS)
def test_the_owner_of_a_large_table_is_not_everybodys_server(precision):
    """It sends the table twice, to who hands it on, and gets as many totals of it as the tree of eight has levels."""
    config = replace(CONFIG, blocks=1, vocabulary=400 * CONFIG.channels, padded_vocabulary=0)
    step = spread_step((64, 12), (8, 12), 8, config, groups=8, precision=precision_of(precision))
    found, table = loads(step), 4 * config.vocabulary * config.channels
    once = table / 2 if precision == "bfloat16" else table
    assert sum(own.sent["weights"] for own in found) == pytest.approx(7 * once, rel=0.1)
    assert max(own.sent["weights"] for own in found) == pytest.approx(2 * once, rel=0.1)
    assert max(own.received["weights"] for own in found) == pytest.approx(once, rel=0.1)
    tables = 2  # its gradient is the sum of two, as table and as unembedding; one of them goes on from the other
    assert max(own.received["sums"] for own in found) <= 1.1 * tables * 3 * table
    assert max(own.sent["sums"] for own in found) <= 1.1 * tables * table


def test_in_bfloat16_weights_pass_in_bfloat16():
    """Halves but of the vectors, and of what is looked up in the tables the activations."""
    by_name = {
        name: loads(spread_step((64, 12), (32, 12), 2, CONFIG, precision=precision_of(name))) for name in WEIGHTS
    }
    whole, half = (sum(own.sent["weights"] for own in by_name[name]) for name in WEIGHTS)
    assert 0.5 < half / whole < 0.55
    assert sum(own.sent["activations"] for own in by_name["bfloat16"]) == 32 * 12 * CONFIG.channels * 4


def test_a_large_table_stays_where_it_is_until_it_multiplies(monkeypatch):
    step = spread_step((64, 12), (32, 12), 2)
    sent = [sum(own.sent["activations"] for own in loads(step))]
    monkeypatch.setattr("daskgpt.training.step.LARGE_TABLE", 1)
    step = spread_step((64, 12), (32, 12), 2)
    sent.append(sum(own.sent["activations"] for own in loads(step)))
    assert sent == [0, 32 * 12 * SMALL.channels * 4], "what the owner has found for the other's sequences"


def test_memory_of_a_worker_is_its_part():
    alone = predict(job_of(1), 1).peak
    several = [own.memory for own in predict(job_of(4), 4).loads]
    assert alone / 4 < max(several) < alone


def job_of(workers):
    asked = bench.BenchConfig(batch_size=8, sequence_length=12)
    return bench.job_of(CONFIG, asked, DataflowConfig(scheduler="local", threads=workers))


def test_the_table_of_a_plan_for_workers(capsys):
    assert bench.main(["--plan", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (head,) = [number for number, line in enumerate(lines) if line.startswith("worker ")]
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [row[0] for row in rows] == ["0", "1", "together"]
    assert int(rows[2][1]) == int(rows[0][1]) + int(rows[1][1])
    assert f"tasks         {rows[2][1]} a step" in lines
    many = describe_loads(loads(spread_step((12, 12), (1, 12), 12))).splitlines()
    assert many[SHOWN + 1] == "and 4 more"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "2"], "plan: --workers must come with --plan; got workers=2. Add --plan."),
        (["--plan", "--workers", "0"], "plan: --workers must be at least 1; got workers=0. Give 1 or more."),
    ],
)
def test_workers_of_no_plan(flags, message):
    with pytest.raises(ValueError) as error:
        bench.main(flags)
    assert str(error.value) == message
