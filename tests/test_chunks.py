"""Chunks that nobody gave: everybody has something to do, the bits stay, what was chosen is said and recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from command_lines import PATIENCE
from conftest import SMALL
from one_number import MODELS
from test_one_number import needs_own_product

import daskgpt
from daskgpt.config.model import preset
from daskgpt.config.run import DataConfig, DataflowConfig, OptimizerConfig, RunConfig
from daskgpt.graph.program import calls_of
from daskgpt.graph.spans import Span
from daskgpt.kernels.float32.blas import VARIABLE
from daskgpt.model.parameters import initial_parameters
from daskgpt.model.precision import FLOAT32
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.chunk_choice import ChunkChoice
from daskgpt.training.chunking import Work, cuttings
from daskgpt.training.job import Job
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.stand_ins import Trial, most_bytes
from daskgpt.training.step import TrainingStep

TINY = preset("tiny")


def chunk_of(shape, threads, config=TINY, work=None, **given):
    return cuttings(config, shape, DataflowConfig(**given), threads, work)[0].chunk


@pytest.mark.parametrize(
    ("shape", "threads", "chunk"),
    [
        ((12, 64), 1, (6, 64)),
        ((12, 64), 2, (6, 64)),
        ((12, 64), 3, (4, 64)),
        ((12, 64), 4, (3, 64)),
        ((12, 64), 5, (1, 64)),
        ((12, 64), 8, (1, 64)),
        ((2, 64), 2, (1, 64)),
        ((7, 64), 2, (1, 64)),
    ],
    ids=str,
)
def test_chunks_follow_the_threads(shape, threads, chunk):
    assert chunk_of(shape, threads) == chunk


@pytest.mark.parametrize(("shape", "threads"), [((1, 1024), 2), ((4, 1024), 8), ((1, 1024), 4), ((4, 64), 8)], ids=str)
def test_tokens_are_cut_where_sequences_are_too_few(shape, threads):
    b, t = chunk_of(shape, threads, preset("gpt2"))
    assert b == 1
    assert t < shape[1]
    assert shape[0] * shape[1] // (b * t) == threads


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 6, 8, 12])
@pytest.mark.parametrize(("name", "shape"), [("tiny", (12, 64)), ("gpt2", (12, 64)), ("gpt2", (8, 256))], ids=str)
def test_everybody_has_something_to_do(name, shape, threads):
    b, t = chunk_of(shape, threads, preset(name))
    assert shape[0] % b == 0
    assert shape[1] % t == 0
    assert shape[0] // b * (shape[1] // t) >= threads


def test_what_is_given_stays():
    assert chunk_of((12, 64), 4, batch_chunk=6) == (6, 32)
    assert chunk_of((12, 64), 8, batch_chunk=12, sequence_chunk=16) == (12, 16)
    assert chunk_of((1, 64), 2, sequence_chunk=64) == (1, 64)
    assert DataflowConfig(batch_chunk="auto", sequence_chunk="auto") == DataflowConfig()


def test_slow_attention_is_not_left_to_one_thread():
    """It needs whole sequences: chunks of tokens do not share it out."""
    cut = chunk_of((4, 64), 8, work=Work(tokens=1.0, attention=0.01))
    assert cut == (1, 32)
    assert chunk_of((4, 64), 2, work=Work(tokens=0.01, attention=1.0))[0] < 4
    assert chunk_of((3, 64), 2, work=Work(tokens=1.0, attention=0.01)) == (3, 32)
    assert chunk_of((3, 64), 2, work=Work(tokens=0.5, attention=1.0)) == (1, 64)


def job(shape=(3, 12), config=SMALL, **dataflow):
    data = DataConfig(batch_size=shape[0], sequence_length=shape[1])
    return Job(config, data, OptimizerConfig(schedule="constant"), DataflowConfig(**dataflow), RunConfig())


def spans_of(step, seconds):
    """Kernel calls of one step, of the length that a function of their origin says."""
    keys = [call.key for node in step.runnable.graph.values() for call in calls_of(node)]
    return [Span(key, 1, 0.0, seconds(step.recorded.origin(key))) for key in keys if step.recorded.origin(key)]


@needs_own_product
def test_measured_times_change_the_chunks_once_and_the_state_stays():
    config = replace(SMALL, positions=64)
    random = np.random.default_rng(2).integers(0, config.vocabulary, (3, 3, 65)).astype(np.int32)
    batches = [(tokens[:, :-1], tokens[:, 1:]) for tokens in random]
    said, ends = [], []
    for change in (False, True):
        with open_scheduler("threads", 2) as scheduler:
            steps = JobSteps(job((3, 64), config, sequence_chunk=0), scheduler, said.append)
            steps.step.set_chunk((3, 32))
            state = steps.initial(initial_parameters(config, 0))
            losses = []
            for number, batch in enumerate(batches):
                if change and number == 1:
                    slow = spans_of(steps.step, lambda origin: 0.5 if origin.layer == "attention" else 1e-4)
                    line = steps.chunks.settle(steps.step, slow, 100)
                    assert line.startswith("3 of 1 x 64 from now on (by measured kernel times, ")
                    assert steps.chunk == (1, 64)
                loss, state = steps.step(scheduler, state, *batch, 3)
                losses.append(loss)
            assert steps.choice.open
            ends.append((losses, state.parameters(scheduler)))
    assert ends[0][0] == ends[1][0]
    for name, value in ends[0][1].items():
        np.testing.assert_array_equal(value, ends[1][1][name])


def test_chunks_stay_where_another_cut_would_not_pay():
    with open_scheduler("threads", 2) as scheduler:
        own = job((3, 64), replace(SMALL, positions=64))
        for seconds, steps in ((0.1, 1), (1e-4, 20)):
            made = JobSteps(own, scheduler)
            made.step.set_chunk((3, 32))
            slow = spans_of(made.step, lambda origin, s=seconds: s if origin.layer == "attention" else 0.0)
            assert made.chunks.settle(made.step, slow, steps) == ""
            assert made.chunk == (3, 32)
            assert not made.chunks.open


@pytest.mark.parametrize("name", MODELS)
def test_the_state_in_place_has_one_layout_however_the_batch_is_cut(name):
    model = MODELS[name]
    step = TrainingStep(model.config, model.batch, model.batch, OptimizerConfig(), in_place=True)
    layout = step.runnable.layout
    step.set_chunk((1, 1))
    assert step.runnable.layout == layout


def test_a_library_s_product_fixes_the_chunks_and_says_so(monkeypatch):
    monkeypatch.setenv(VARIABLE, "numpy")
    choice = ChunkChoice(TINY, (12, 64), DataflowConfig(), FLOAT32, 4, in_place=True)
    assert choice.first == (3, 64)
    assert not choice.open
    assert choice.reason == "auto, for 4 threads; with this matrix product other chunks are other bits"


def many_words():
    """A model and a batch whose logits take most of the memory: the cut decides how many of them there are at once."""
    config = replace(SMALL, vocabulary=4000, padded_vocabulary=4000)
    choice = ChunkChoice(config, (64, 12), DataflowConfig(), FLOAT32, 2, in_place=True)
    step = TrainingStep(config, (64, 12), choice.first, OptimizerConfig(), grain="segment", in_place=True)
    return choice, step


@needs_own_product
def test_a_step_that_needs_more_memory_than_is_free_is_cut_smaller():
    choice, step = many_words()
    assert (choice.first, Trial(step).peak, most_bytes(step)) == ((32, 12), 9_153_280, 17_814_532)
    assert choice.fit(step, 1, 7_000_000) == ""
    assert step.chunk == (8, 12)
    assert Trial(step).peak < 7_000_000
    assert not choice.open
    assert choice.reason == "auto, for 2 threads; 2 of 32 x 12 would take 9 MB of the 7 MB that are free"


@needs_own_product
@pytest.mark.parametrize("available", [None, 10_000_000, 100_000_000])
def test_chunks_stay_where_memory_is_enough_or_unknown(available):
    choice, step = many_words()
    assert choice.fit(step, 1, available) == ""
    assert step.chunk == choice.first
    assert choice.reason == "auto, for 2 threads"


@needs_own_product
def test_memory_that_no_cut_saves_is_warned_of():
    choice, step = many_words()
    assert choice.fit(step, 1, 1_000_000) == (
        "a step takes 5 MB, and 1 MB are free: the system may swap, or end this process. "
        "Try a smaller --batch-size or --sequence-length."
    )
    assert step.chunk == (4, 12)


def test_given_chunks_stay_and_are_warned_of():
    choice, step = many_words()
    given = ChunkChoice(
        step.config, (64, 12), DataflowConfig(batch_chunk=32, sequence_chunk=12), FLOAT32, 2, in_place=True
    )
    assert given.fit(step, 1, 7_000_000).startswith("a step takes 9 MB, and 7 MB are free")
    assert (step.chunk, given.reason) == (choice.first, "")


def run(tmp_path, name, *flags):
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = [sys.executable, "-m", "daskgpt.train", "--data", text, "--blocks", 2, "--heads", 2, "--channels", 32]
    command += ["--steps", 4, "--sample-tokens", 0, "--validation-batches", 2, "--out", tmp_path / name, *flags]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    with (tmp_path / name / "config.toml").open("rb") as file:
        config = tomllib.load(file)
    return losses, (tmp_path / name / "latest" / "model.safetensors").read_bytes(), config["dataflow"], result.stdout


@needs_own_product
def test_threads_and_workers_give_one_model_with_automatic_chunks(tmp_path):
    schedulers = [("threads", 1), ("threads", 2), ("threads", 5), ("local", 3)]
    found = [run(tmp_path, f"{s}{n}", "--scheduler", s, "--threads", n) for s, n in schedulers]
    for losses, model, _, _ in found:
        assert losses == found[0][0]
        assert model == found[0][1]
    chunks = [(dataflow["batch_chunk"], dataflow["sequence_chunk"]) for _, _, dataflow, _ in found]
    assert chunks == [(6, 64), (6, 64), (3, 64), (4, 64)]
    assert "\nchunks     2 of 6 x 64 (auto, for 2 threads)\n" in found[1][3]
    assert "\nchunks     4 of 3 x 64 (auto, for 5 threads)\n" in found[2][3]


def test_the_word_auto_is_a_number_on_the_command_line(tmp_path):
    *_, dataflow, _ = run(tmp_path, "auto", "--batch-chunk", "auto", "--sequence-chunk", 32, "--threads", 2)
    assert dataflow["sequence_chunk"] == 32
    result = subprocess.run(
        [sys.executable, "-m", "daskgpt.train", "--batch-chunk", "half"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "daskgpt.train: argument --batch-chunk: invalid number or auto value: 'half'\n"


def test_help_says_that_the_machine_chooses():
    assert "batch_chunk: int\n" in daskgpt.DataflowConfig.__doc__
    assert "(default: auto)" in daskgpt.DataflowConfig.__doc__
