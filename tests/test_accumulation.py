"""Accumulation: micro-batches make the step of one batch of their joined size, in the memory of one of them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from command_lines import refused, run, write_text
from one_number import MODELS, Dials, bits_after_steps
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.graph.accumulating import MicroBatches, MicroSum
from daskgpt.instruments.memory import predict
from daskgpt.model.parameters import tensors
from daskgpt.training.job import Job
from daskgpt.training.step import TrainingStep

DIALS = [
    Dials((1, 20)),
    Dials((1, 5), grain="kernel"),
    Dials((3, 10), grain="segment", scheduler="threads", threads=2),
    Dials((1, 20), grain="chunk", scheduler="threads", threads=5),
    Dials((1, 10), barrier="layer", scheduler="threads", threads=2),
    Dials((2, 20), barrier="phase", grain="kernel"),
    Dials((1, 20), barrier="none", scheduler="threads", threads=2),
    Dials((1, 20), in_place=False),
    Dials((3, 4), in_place=False, barrier="phase"),
    Dials((1, 20), in_place=False, parts=2),
    Dials((1, 10), in_place=False, parts=3, barrier="layer"),
]


@pytest.mark.parametrize("dials", DIALS, ids=str)
@pytest.mark.parametrize(
    ("name", "precision"), [("odd", "float32"), ("odd in 2 groups", "bfloat16"), ("odd with muon", "float32")]
)
def test_micro_batches_are_the_joined_batch_to_the_bit(name, precision, dials):
    model = MODELS[name]
    expected = bits_after_steps(model, precision, Dials(model.batch))
    for accumulate in (2, 3):
        assert bits_after_steps(model, precision, replace(dials, accumulate=accumulate)) == expected, accumulate


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_have_micro_batches_of_their_own(workers):
    model = MODELS["odd in 2 groups"]
    expected = bits_after_steps(model, "float32", Dials(model.batch))
    dials = Dials((1, 20), scheduler="local", threads=workers, accumulate=3)
    assert bits_after_steps(model, "float32", dials) == expected


def test_every_sequence_has_one_micro_batch_of_its_part():
    assert [MicroBatches(4, 8).of_chunk(chunk) for chunk in range(8)] == [(0, n // 2) for n in range(8)]
    assert [MicroBatches(2, 8, 2).of_chunk(chunk) for chunk in range(8)] == [(n // 4, n % 4 // 2) for n in range(8)]
    assert [MicroBatches(4, 2).of_chunk(chunk) for chunk in range(2)] == [(0, 0), (0, 2)]


def job(config, batch_size, accumulate):
    data = DataConfig(batch_size=batch_size, sequence_length=64, accumulate=accumulate, groups=1)
    return Job(config, data, OptimizerConfig(), DataflowConfig(scheduler="threads", threads=2), RunConfig())


@pytest.mark.parametrize("config", [GPT2Config(), GPT2Config(blocks=3, channels=64, vocabulary=2000)], ids=str)
def test_the_memory_is_that_of_one_micro_batch_and_the_gradients(config):
    """And what the tied table's last sum waits for: the gradients of the embedding's output, a row a token.

    Of several groups more gradients are held at once, one for each level of the tree that has a total.
    """
    one, four = (predict(job(config, 12, accumulate)) for accumulate in (1, 4))
    gradients = 4 * sum(prod(tensor.shape) for tensor in tensors(config).values())
    kept = 4 * 4 * 12 * 64 * config.channels
    factor = TOLERANCES["memory of a micro-batch"]["factor"]
    joined = predict(job(config, 48, 1))
    assert sum(four.at_peak.values()) <= factor * sum(one.at_peak.values()) + gradients + kept
    assert four.at_peak["gradients"] <= gradients
    assert sum(joined.at_peak.values()) > sum(four.at_peak.values()) + one.at_peak["activations"]


def test_a_sum_is_made_when_its_micro_batch_has_come_so_far():
    config = MODELS["odd"].config
    step = TrainingStep(config, (6, 20), (1, 20), OptimizerConfig(), in_place=True, accumulate=3)
    sums = [node.func for node in step.recorded.unmerged.values() if isinstance(getattr(node, "func", None), MicroSum)]
    assert {each.micro for each in sums} == {0, 1, 2, None}
    assert {each.origin.where for each in sums if each.micro is None} == {"wte+wpe"}


def test_a_run_with_accumulation_is_that_of_larger_batches(tmp_path):
    text = write_text(tmp_path)
    config = GPT2Config(blocks=1, heads=2, channels=16, positions=16)
    results = [
        daskgpt.fit(
            config,
            DataConfig(data=str(text), batch_size=size, accumulate=count, sequence_length=16),
            dataflow=DataflowConfig(scheduler="threads", threads=2, barrier=barrier),
            run=RunConfig(steps=6, validate_every=3, validation_batches=2),
            quiet=True,
        )
        for size, count, barrier in ((8, 1, "step"), (2, 4, "step"), (2, 4, "none"))
    ]
    for other in results[1:]:
        assert other.losses == results[0].losses
        assert other.validation_loss == results[0].validation_loss
        for name, value in other.parameters.items():
            np.testing.assert_array_equal(value, results[0].parameters[name])


def test_what_does_not_go_together_is_refused(tmp_path):
    text = write_text(tmp_path)
    assert refused(run("train", "--data", text, "--accumulate", "0")).startswith(
        "DataConfig: accumulate must be at least 1"
    )
    told = refused(run("train", "--data", text, "--accumulate", "2", "--local-steps", "5"))
    assert "accumulate must be 1 where replicas make steps of their own" in told
    told = refused(run("train", "--data", text, "--accumulate", "2", "--batch-chunk", "24"))
    assert "batch_chunk must divide batch_size; got batch_chunk=24, batch_size=12" in told


def test_it_is_told(tmp_path):
    out = run("train", "--data", write_text(tmp_path), "--accumulate", "2", "--plan").stdout
    assert "24 x 64 tokens, 2 micro-batches of 12" in out
