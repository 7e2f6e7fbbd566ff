"""Tests of `--plan --workers`, the plan of a step that workers share."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from rank_threads import train

from daskgpt import bench
from daskgpt import train as train_command
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.model.precision import precision_of
from daskgpt.profiling.plan import bytes_sent, described_messages, predict

CONFIG = replace(SMALL, channels=32, blocks=2)


def trained(count, groups, precision="float32", config=CONFIG):
    """The steps that ranks have recorded, and the bytes that they have sent in one of them: sender and kind."""
    random = np.random.default_rng(0)
    batch = random_batch(config, random, (12, 12))
    arguments = config, (12, 12), (1, 12), OptimizerConfig(), precision_of(precision)
    ranks, messages = train(count, random_parameters(config, random), [batch], arguments, {"groups": groups})
    passed = Counter()
    for sender, _, (kind, _), size in messages.sent:
        passed[sender, kind] += size
    return [rank.step for rank in ranks], passed


@pytest.mark.parametrize(("count", "groups", "precision"), [(2, 2, "float32"), (3, 12, "float32"), (3, 6, "bfloat16")])
def test_bytes_sent_match_the_plan(count, groups, precision):
    steps, passed = trained(count, groups, precision)
    losses = 4 * groups * count  # bytes at most, beside the totals
    for rank, sent in enumerate(bytes_sent(steps)):
        assert sent.total() > 0
        for kind in ("totals", "weights", "gather"):
            assert sent[kind] == pytest.approx(passed[rank, kind], abs=losses)


def test_bfloat16_weights_are_sent_in_bfloat16():
    """Halves but of vectors and of tables."""
    whole, half = (
        sum(sent["weights"] for sent in bytes_sent(trained(2, 2, name)[0])) for name in ("float32", "bfloat16")
    )
    matrices = 4 * 12 * CONFIG.blocks * CONFIG.channels**2
    assert whole - half == matrices / 2


def test_memory_of_a_worker():
    def job_of(workers):
        asked = bench.BenchConfig(batch_size=8, sequence_length=12, groups=4)
        return bench.job_of(CONFIG, asked, DataflowConfig(scheduler="local", threads=workers))

    alone, shared = (predict(job_of(count), count) for count in (1, 4))
    assert 0.2 < shared.peak / alone.peak < 0.6
    assert shared.at_peak["optimizer"] < 0.4 * alone.at_peak["optimizer"]
    assert len(shared.sent) == 4


def test_plan_table_for_workers(capsys, small_text):
    flags = ["--data", str(small_text), "--groups", "2", "--blocks", "1", "--heads", "2", "--channels", "32"]
    assert train_command.main([*flags, "--plan", "--workers", "2"]) == 0
    for wrong, keyword in ((["--workers", "2"], "--plan"), (["--plan", "--workers", "0"], "workers=0")):
        with pytest.raises(ValueError, match=keyword):
            train_command.main([*flags, *wrong])
    text = " ".join(capsys.readouterr().out.split())
    assert "messages a worker sends" in text
    workers = bytes_sent(trained(12, 12)[0])
    total = sum(sent.total() for sent in workers)
    assert f"together {total / 1e6:,.1f} MB (" in described_messages(workers)
