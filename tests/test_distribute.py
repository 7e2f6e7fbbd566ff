"""Tests of rank programs: ranks train to the bits of one process with any messages, and send what plans say."""

import random
from collections import Counter
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import rank_threads
from conftest import SMALL, random_batch, random_parameters
from one_number import MODELS, SEED, VARIANTS, Dials, bits_after_steps, bits_of, seed, start_values
from steps import step_of

from daskgpt import bench
from daskgpt import train as train_command
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.graph import distribute, update_in_place
from daskgpt.graph.distribute import Rank
from daskgpt.graph.fuse import GRAINS
from daskgpt.model.precision import precision_of
from daskgpt.profiling.plan import bytes_sent, described_messages, predict

STEPS = 3


def train(model, precision, count, chunk, threads=1, **options):
    arguments = model.config, model.batch, chunk, model.optimizer_config, precision_of(precision)
    options |= {"groups": model.groups}
    return rank_threads.train(count, start_values(model.config), model.batches(STEPS), arguments, options, threads)


KINDS = ["odd", "clipped", "odd with muon", "odd with dropout", "llama", "llama with adapters"]


@pytest.mark.parametrize(("name", "count"), [*zip(KINDS, cycle((2, 3, 5))), *zip(KINDS, cycle((3, 5, 2)))])
def test_ranks_train_to_the_bits_of_one_process(name, count, monkeypatch):
    model = replace((MODELS | VARIANTS)[name], groups=6)
    print(f"{SEED}={(number := seed())}")
    choose = random.Random(f"{number} {name} {count}").choice
    monkeypatch.setattr(distribute, "BUCKET_BYTES", choose([1, 4000, 1 << 23]))
    precision, barrier = choose(["float32", "bfloat16"]), choose(["layer", "phase", "step", "none"])
    monkeypatch.setattr(update_in_place, "TASK_ELEMENTS", choose([1 << 8, 1 << 22]))
    for constant in ("LEAST_ELEMENTS", "THREADS_OF_PIECE"):
        monkeypatch.setattr(update_in_place, constant, 1)
    dials = {"threads": choose([1, 2, 5]), "grain": choose(["kernel", "segment", "block", "chunk"]), "barrier": barrier}
    if count == 3:
        dials["accumulate"] = choose([1, 2])
    print(dials, precision)
    wanted = bits_after_steps(model, precision, Dials(model.batch, grain="kernel"), STEPS)
    ranks, _ = train(model, precision, count, (1, choose([20, 10])), **dials)
    assert {bits_of(rank_of_run.outcomes, rank_threads.owned(ranks)) for rank_of_run in ranks} == {wanted}
    if precision == "float32":
        assert {bits_of(rank_of_run.outcomes, rank_of_run.parameters) for rank_of_run in ranks} == {wanted}


@pytest.mark.parametrize("grain", GRAINS)
def test_tasks_of_a_rank_of_many_chunks(grain):
    config, rank = replace(SMALL, blocks=3), Rank(0, 2, None, 2, 16, 16)
    step = step_of(config, (16, 16), (1, 16), OptimizerConfig(), rank=rank, grain=grain, in_place=True, groups=2)
    assert step.chunks == 8
    assert step.tasks > 8


def test_moments_on_owners_and_one_message_per_bucket():
    ranks, messages = train(MODELS["odd in 2 groups"], "float32", 2, (3, 20))
    for name, moment in ranks[0].moments.items():
        for largest in zip(*(np.abs(rank.moments[name]).reshape(len(moment), -1).max(1) for rank in ranks)):
            assert min(largest) == 0, f"both ranks have updated a row of {name}"
    assert sum(np.abs(rank.moments["m.wte.weight"]).max() > 0 for rank in ranks) >= 1
    # Losses, totals, weights both ways, and what the tied table is summed from where that is.
    assert len(messages.sent) <= STEPS * (3 * 2 + 2)


# Plans of a step that workers share (`--plan --workers`)


CONFIG = replace(SMALL, channels=32, blocks=2)


def trained(count, groups, precision="float32", config=CONFIG):
    """The steps that ranks have recorded, and the bytes that they have sent in one of them: sender and kind."""
    random = np.random.default_rng(0)
    batch = random_batch(config, random, (12, 12))
    arguments = config, (12, 12), (1, 12), OptimizerConfig(), precision_of(precision)
    initial = random_parameters(config, random)
    ranks, messages = rank_threads.train(count, initial, [batch], arguments, {"groups": groups})
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
    def plan_of(workers, sequences=8, groups=4, grain="auto"):
        asked = bench.BenchConfig(batch_size=sequences, sequence_length=12, groups=groups)
        dataflow = DataflowConfig(scheduler="local", threads=workers, grain=grain)
        return predict(bench.job_of(CONFIG, asked, dataflow))

    alone, shared = map(plan_of, (1, 4))
    assert 0.2 < shared.peak / alone.peak < 0.6
    assert shared.at_peak["optimizer"] < 0.4 * alone.at_peak["optimizer"]
    assert len(shared.sent) == 4
    assert "3 workers without a group" in str(plan_of(7))
    # Of one, two and two sequences, the plan is not that of the first worker.
    assert plan_of(3, 5, 5, "kernel").at_peak["activations"] > 1.5 * plan_of(3, 3, 3, "kernel").at_peak["activations"]


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
