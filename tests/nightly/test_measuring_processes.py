"""Tests of instruments that measure real processes: threads by number, what workers send, and the tools for records."""

from itertools import pairwise
from statistics import median

import dashboard_cost
import numpy as np
import overheads
import prepare_rate
import pytest
from conftest import random_batch, random_parameters
from machines import wait_until
from test_traffic import CONFIG, loads, spread
from tolerances import TOLERANCES

from daskgpt.instruments.records import read_records
from daskgpt.schedulers.addresses import open_scheduler

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16"
SHORT = f"{MODEL} --warmup 2 --steps 6 --validation-batches 1 --validate-every 2 --sample-every 3 --sample-tokens 4"


def written(dask_worker):
    """Who asked for results of this worker, and how many bytes it wrote, headers and all; nothing to the client."""
    return [(entry["who"], entry["compressed"]) for entry in dask_worker.transfer_outgoing_log if entry["who"]]


def sending(dask_worker):
    return dask_worker.transfer_outgoing_count


WORKERS = [(2, 64, 2, "float32"), (3, 48, 1, "float32"), (2, 64, 1, "bfloat16"), (4, 64, 4, "bfloat16")]


@pytest.mark.parametrize(("workers", "batch", "groups", "precision"), WORKERS)
def test_what_workers_send_is_what_was_predicted(workers, batch, groups, precision):
    """In the median step: now and then a result is fetched twice."""
    step = spread((batch, 12), (batch // workers, 12), workers, CONFIG, precision, groups=groups)
    random, looks = np.random.default_rng(4), []
    with open_scheduler("local", workers) as scheduler:
        state = step.initial(random_parameters(CONFIG, random))
        for _ in range(6):
            _, state = step(scheduler, state, *random_batch(CONFIG, random, (batch, 12)), 9)
            scheduler.settle(state.packs)
            wait_until(lambda: not any(scheduler.client.run(sending).values()), "transfers that end")
            looks.append(scheduler.client.run(written))
        numbered = scheduler.numbered
    steps = []
    for before, after in pairwise(looks):
        steps.append([(own, who, size) for own in numbered for who, size in after[own][len(before[own]) :]])
    for address, own in zip(numbered, loads(step)):
        sent = median(sum(size for sender, _, size in passed if sender == address) for passed in steps)
        received = median(sum(size for _, who, size in passed if who == address) for passed in steps)
        assert sent == pytest.approx(own.sent.total(), **TOLERANCES["bytes on the way"])
        assert received == pytest.approx(own.received.total(), **TOLERANCES["bytes on the way"])


TOOLS = [
    (overheads, f"{SHORT} --turns 2 --data", {"validation", "logs", "samples", overheads.AT_THE_END}, "turn 1: "),
    (prepare_rate, "--encoding bytes --turns 1 --check --text", {"prepare", "tiktoken", "ratio"}, "same bytes"),
    (dashboard_cost, f"{MODEL} --pairs 2 --window 4 --data", {"a step with the page / without"}, "2 pairs of 4"),
]


@pytest.mark.parametrize(
    ("tool", "flags", "figures", "shown"), TOOLS, ids=["overheads", "prepare_rate", "dashboard_cost"]
)
def test_tools_measure_and_record(small_text, tmp_path, capsys, tool, flags, figures, shown):
    path = tmp_path / "records.jsonl"
    tool.main([*flags.split(), str(small_text), "--record", str(path)])
    (found,) = read_records(path)
    assert figures <= found.figures.keys()
    assert "--record" not in found.command
    assert shown in capsys.readouterr().out
