"""Tests of automatic chunks: all threads have work, the bits stay, the choice is printed and recorded."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL
from small_runs import losses_of
from steps import run_step, step_of

from daskgpt import digest, train
from daskgpt.config.model import preset
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.program import Span, calls_of
from daskgpt.model.parameters import initial_parameters
from daskgpt.model.step import Dials, compile_step
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.autotune import ChunkChoice, Trial, candidates, most_bytes
from daskgpt.training.cost import Work, work_of
from daskgpt.training.engine import LocalEngine
from daskgpt.training.job import Job

MUCH, LITTLE = Work(tokens=0.01, attention=1.0), Work(tokens=1.0, attention=0.01)  # attention
# A model, sequences and tokens of each, threads, chunks that are given, the work, and the chunk that is chosen.
CHUNKS = [
    *(("tiny", (12, 64), n, {}, None, (chunk, 64)) for n, chunk in ((1, 6), (2, 6), (3, 4), (4, 3), (8, 1), (64, 1))),
    # Tokens are cut where sequences are too few.
    ("gpt2", (1, 1024), 2, {}, None, (1, 512)),
    ("gpt2", (4, 64), 8, {}, None, (1, 32)),
    # What is given stays.
    ("tiny", (12, 64), 4, {"batch_chunk": 6}, None, (6, 32)),
    ("tiny", (1, 64), 2, {"sequence_chunk": 64}, None, (1, 64)),
    # Attention needs whole sequences: chunks of tokens share it out by heads.
    ("tiny", (4, 64), 8, {}, LITTLE, (1, 32)),
    ("tiny", (4, 64), 2, {}, MUCH, (2, 64)),
    ("tiny", (3, 64), 2, {}, Work(tokens=0.5, attention=1.0), (3, 32)),
]


@pytest.mark.parametrize(("name", "shape", "threads", "given", "work", "chunk"), CHUNKS, ids=str)
def test_chunks_follow_threads_and_work(name, shape, threads, given, work, chunk):
    assert candidates(preset(name), shape, DataflowConfig(**given), threads, work=work)[0].chunk == chunk


def test_attention_that_heads_do_not_divide_gets_chunks_of_whole_sequences():
    shape, dataflow, threads, work = (3, 64), DataflowConfig(), 2, Work(tokens=0.5, attention=1.0)
    custom = replace(preset("tiny"), attention="custom_layers:SAME_ATTENTION")
    assert candidates(custom, shape, dataflow, threads, work=work)[0].chunk == (1, 64)
    assert candidates(preset("tiny"), shape, dataflow, threads, 0.1, work)[0].chunk == (1, 64)


def job(shape=(3, 12), config=SMALL, **dataflow):
    data = DataConfig(batch_size=shape[0], sequence_length=shape[1])
    return Job(config, data, OptimizerConfig(schedule="constant"), DataflowConfig(**dataflow), RunConfig())


def spans_of(step, seconds):
    """Kernel calls of one step, of the length that a function of their origin says."""
    keys = [call.key for node in step.graph.values() for call in calls_of(node)]
    return [Span(key, 1, 0.0, seconds(step.kernels.origin(key))) for key in keys if step.kernels.origin(key)]


@pytest.mark.parametrize(
    ("shape", "threads", "accumulate", "parts"),
    [((1, 8), 4, 1, 3), ((1, 8), 6, 1, 6), ((3, 8), 2, 1, 2), ((2, 8), 2, 1, 0), ((2, 8), 2, 2, 2)],
)
def test_threads_without_sequences_of_their_own_share_heads(shape, threads, accumulate, parts):
    """Attention of whole sequences has no part in its tasks' keys. Micro-batches follow each other."""
    dials = Dials((1, 4), "segment", in_place=True, accumulate=accumulate, threads=threads)
    step = compile_step(replace(SMALL, heads=6, channels=24), shape, OptimizerConfig(), dials)
    graph = step.kernels.graph
    places = {chunk_of(graph, key, whole=False) for key in graph if key[0].startswith("attention.forward")}
    assert places == {(b, None, *([part] if parts else [])) for b in range(shape[0]) for part in range(parts or 1)}


def test_attention_from_outside_is_not_divided_by_heads():
    """Its kernels, which may know of all heads, are not replaced."""
    config, dials = replace(SMALL, attention="custom_layers:SAME_ATTENTION"), Dials((1, 4), in_place=True, threads=4)
    graph = compile_step(config, (1, 8), OptimizerConfig(), dials).kernels.graph
    keys = [key for key in graph if key[0].startswith("same_attention.forward")]
    assert {chunk_of(graph, key, whole=False) for key in keys} == {(0, None)}


def test_predictions_take_parts_of_the_heads_for_calls_with_fewer_heads():
    """Otherwise their kinds were never measured, and attention would be predicted to take the time of a copy."""
    kinds = []
    for threads in (1, 4):
        graph = step_of(SMALL, (1, 8), (1, 4), OptimizerConfig(), in_place=True, threads=threads).kernels.graph
        works = [work for work in (work_of(graph, key) for key in graph) if work]
        works = [work for work in works if work[0].startswith(("attention", "gather", "split"))]
        kinds.append({(kind, *sorted(set(sizes) - {"n"})) for kind, sizes in works})
        channels = [sizes["b"] * sizes["X"] for kind, sizes in works if kind.startswith("attention.forward")]
        assert sum(channels) == SMALL.blocks * 3 * SMALL.channels
    assert len(kinds[0]) == 6
    assert kinds[0] == kinds[1]


def test_measured_times_change_the_chunks_once():
    config = replace(SMALL, positions=64, kv_heads=1)  # attention cannot be divided by heads
    random = np.random.default_rng(2).integers(0, config.vocabulary, (3, 3, 65)).astype(np.int32)
    ends = []
    for change in (False, True):
        with open_scheduler("threads", 2) as scheduler:
            engine, losses = LocalEngine(job((3, 64), config), scheduler, str), []
            engine.step = engine.step.with_dials(chunk=(3, 32))
            engine.start(initial_parameters(config, 0))
            for number, tokens in enumerate(random):
                if change and number == 1:
                    slow = spans_of(engine.step, lambda origin: 0.5 if origin.layer == "attention" else 1e-4)
                    engine.step, line = engine.chunks.choose(engine.step, slow, 100)
                    assert "3 of 1 x 64" in line
                    assert engine.chunk == (1, 64)
                outcome, state = run_step(scheduler, engine.step, engine.state(), (tokens[:, :-1], tokens[:, 1:]), 3)
                engine.resume(state)
                losses.append(outcome.loss)
            assert engine.choice.undecided
            ends.append((losses, digest(engine.state().parameters(scheduler))))
    assert ends[0] == ends[1]


def test_chunks_stay_without_a_clear_gain():
    with open_scheduler("threads", 2) as scheduler:
        automatic = job((3, 64), replace(SMALL, positions=64))
        for seconds, steps in ((0.1, 1), (1e-4, 20)):
            engine = LocalEngine(automatic, scheduler)
            step = engine.step.with_dials(chunk=(3, 32))
            slow = spans_of(step, lambda origin, s=seconds: s if origin.layer == "attention" else 0.0)
            assert engine.chunks.choose(step, slow, steps) == (step, "")
            assert not engine.chunks.undecided


FREE = [
    (17_814_532, (32, 12), 9_153_280, "auto, for 2 threads", ""),
    (17_814_531, (32, 12), 9_153_280, "auto, for 2 threads", ""),
    (7_000_000, (8, 12), 7_000_000, "2 of 32 x 12 would take 9 MB of the 7 MB that are free", ""),
    (1_000_000, (4, 12), 7_000_000, "would take 9 MB", "a step takes 5 MB, and 1 MB are free"),
]


@pytest.mark.parametrize(("available", "chunk", "peak", "reason", "warning"), FREE)
def test_step_beyond_free_memory_gets_smaller_chunks(available, chunk, peak, reason, warning):
    """Logits take most of the memory here: the cut decides how many of them there are at once."""
    config = replace(SMALL, vocabulary=4000, padded_vocabulary=4000)
    choice = ChunkChoice(config, (64, 12), DataflowConfig(), 2)
    step = step_of(config, (64, 12), choice.first, OptimizerConfig(), grain="segment", in_place=True)
    assert (choice.first, Trial(step).peak, most_bytes(step)) == ((32, 12), 9_153_280, 17_814_532)
    step, told = choice.fit(step, 1, available)
    assert told.startswith(warning)
    assert (step.dials.chunk, choice.undecided) == (chunk, available == 17_814_532)
    assert Trial(step).peak <= peak
    assert choice.reason.endswith(reason) or (warning and reason in choice.reason)
    dataflow = DataflowConfig(batch_chunk=step.dials.chunk[0], sequence_chunk=12)
    given = ChunkChoice(config, (64, 12), dataflow, 2)
    step, told = given.fit(step, 1, 100_000)
    assert told.startswith("a step takes")
    assert (step.dials.chunk, given.reason) == (chunk, "")


def run(small_text, tmp_path, name, *flags):
    command = ["--data", small_text, "--blocks", 2, "--heads", 2, "--channels", 32, "--sample-tokens", 0, "--steps", 2]
    command += ["--validation-batches", 1, "--out", tmp_path / name, *flags]
    train.main([*map(str, command)])
    model = (tmp_path / name / "latest" / "model.safetensors").read_bytes()
    dataflow = tomllib.loads((tmp_path / name / "config.toml").read_text())["dataflow"]
    return (losses_of(tmp_path / name), model), (dataflow["batch_chunk"], dataflow["sequence_chunk"])


def test_automatic_chunks_change_no_bit(small_text, tmp_path, cluster, capsys):
    cluster.have(2)
    schedulers = [("threads", 1), ("threads", 2), ("threads", 5), (cluster.address, 0)]
    bits, chunks = zip(*(run(small_text, tmp_path, f"{n}", "--scheduler", s, "--threads", n) for s, n in schedulers))
    assert all(other == bits[0] for other in bits)
    assert chunks == ((6, 64), (6, 64), (3, 64), (6, 64))
    out = capsys.readouterr().out
    assert "2 of 6 x 64 (auto, for 2 threads)" in out
    assert "(auto, for 5 threads)" in out


def test_auto_is_accepted_for_numbers():
    assert DataflowConfig(batch_chunk="auto", sequence_chunk="auto") == DataflowConfig()
    given = train.parsed(["--batch-chunk", "auto", "--sequence-chunk", "32"])
    assert (given.batch_chunk, given.sequence_chunk) == (0, 32)
    with pytest.raises(SystemExit):
        train.main(["--batch-chunk", "half"])
