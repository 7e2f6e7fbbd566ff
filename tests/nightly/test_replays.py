"""Tests of replays in numbers: random tensors of runs of several kinds."""

import random

import pytest
from saved_tensors import saved_tensors
from small_runs import MODEL

import daskgpt
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.replay import Replay

LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "kv_heads": 1, "bias": "none"}
LLAMA = daskgpt.preset("tiny", blocks=2, heads=2, channels=32, vocabulary=257, positions=16, head="untied", **LLAMA)
TWO_BLOCKS = daskgpt.preset("tiny", blocks=2, heads=2, channels=32, vocabulary=257, positions=16)
CLIPPED = {"warmup": 3, "clip": 0.5}
KINDS = {
    "dropout": (TWO_BLOCKS, {**CLIPPED, "dropout": 0.1}, {}, {}),
    "llama": (LLAMA, CLIPPED, {}, {}),
    "bfloat16": (TWO_BLOCKS, CLIPPED, {"precision": "bfloat16"}, {}),
    "muon in two micro-batches": (TWO_BLOCKS, {**CLIPPED, "optimizer": "muon"}, {}, {"batch_size": 2, "accumulate": 2}),
    "two groups": (MODEL, CLIPPED, {}, {"groups": 2}),
}
TENSORS = 20  # of each run


@pytest.mark.parametrize("kind", KINDS)
def test_random_tensors_have_the_bits_of_training(kind, small_text, tmp_path):
    config, optimizer, dataflow, data = KINDS[kind]
    cut = {"scheduler": "sync", "grain": "kernel", "batch_chunk": 2, "sequence_chunk": 16, "barrier": "step"}
    data = {"data": str(small_text), "batch_size": 4, "sequence_length": 16} | data
    run = {"steps": 9, "save_every": 5, "keep": 2, "keep_best": 0, "validation_batches": 1, "out": tmp_path / "run"}
    with saved_tensors() as saved:
        daskgpt.fit(config, data, optimizer, cut | dataflow, run, quiet=True)
        daskgpt.fit(resume=tmp_path / "run", optimizer={"learning_rate": 2e-3}, run={"steps": 14}, quiet=True)
    draw, compared = random.Random(kind), []
    for step in draw.sample(range(14), 10):
        dials = {"batch_chunk": draw.choice((1, 2)), "sequence_chunk": draw.choice((8, 16)), "threads": 2}
        replay = Replay("rewind", tmp_path / "run", dials | {"grain": draw.choice(("kernel", "block", "chunk"))})
        with open_scheduler(draw.choice(("sync", "threads")), 2) as scheduler:
            tensors = replay.tensors_of(step, scheduler)
            names = sorted(name for at, name in saved if at == step and name in {*tensors.names, *tensors.aliases})
            assert len(names) > 60
            tensors.begin(replay.state_before(step, scheduler))
            for name, array in tensors.arrays(draw.sample(names, TENSORS // 10)).items():
                wanted = saved[step, name]
                assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype), (step, name)
                assert array.tobytes() == wanted.tobytes(), (step, name)
                compared.append(name)
    assert len(compared) == TENSORS
