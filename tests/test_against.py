"""Tests of programs in turns, and of `benchmarks/against.py`, which compares them."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import against
import numpy as np
import pytest
from compare.llmc_program import compare_llmc, run_program
from compare.programs import Apart, Programs, WorkerTime, check_losses, require_published, steps_of_a_turn
from compare.turns import Turn, take_turns, undisturbed
from conftest import SMALL

from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.schedulers.opening import open_scheduler

JOB = job_of(SMALL, BenchConfig(batch_size=4, sequence_length=12), DataflowConfig(scheduler="sync"))


class Program:
    """A side whose last step of a turn takes three times as long as the others."""

    def __init__(self, seconds, order):
        self.seconds, self.order, self.losses = seconds, order, []

    def run(self, count):
        self.order.append((self.seconds, count))
        self.losses += [float(len(self.losses) + number) for number in range(count)]
        return [self.seconds] * (count - 1) + [3 * self.seconds]

    def reset_peak(self):
        self.order.append("peaks count from here")

    def peak(self):
        return len(self.losses)

    def cpu(self):
        return {("here", len(self.order)): 1.0}


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    monkeypatch.setattr("compare.turns._others_seconds", lambda sides: 0.0)


def test_turns_compare_three_programs():
    order = []
    turns = take_turns([Program(seconds, order) for seconds in (2, 1, 4)], 4, 3)
    assert order == [(seconds, 3) for seconds in (2, 1, 4, 1, 4, 2, 4, 2, 1, 2, 1, 4)]
    assert turns[1].seconds == ((2, 2, 6), (1, 1, 3), (4, 4, 12))
    names, shares = ("cluster", "threads", "theirs"), WorkerTime(0.5, 0.2, 0.3)
    peaks, losses = (3 * 10**9, 10**9, 10**9), (5.5, 5.5, 5.5)
    programs = Programs(names, "PyTorch 2", turns, 5, peaks, losses, against.THREE, shares)
    assert programs.ratio("cluster", "theirs").median == 0.5
    assert programs.counts == {"steps_a_turn": 3, "disturbed_turns": 0, "left_out_turns": 1}
    figures = {name: figure.median for name, figure in programs.figures().items()}
    assert (figures["threads"], figures["cluster_longest"], figures["cluster_peak"]) == (1666.67, 3, 3)
    assert (figures["ratio"], figures["throughput_of_threads"], figures["workers_messages"]) == (0.5, 0.5, 0.2)
    assert (figures["theirs_first_loss"], figures["theirs_peak"]) == (5.5, 1)
    assert "1 more turns left out" in programs.describe()
    disturbed = Programs(names, "", [Turn(((1,),) * 3, 1.5)], 1, (0, 0, 0), (1, 1, 1), against.THREE, shares)
    assert "WARNING: other programs ran in 1 of" in disturbed.describe()


def test_apart_opens_one_program_at_a_time():
    opened, order = [], []

    @contextmanager
    def open_one(name):
        assert opened == [], "another one is in memory"
        opened.append(name)
        yield Program(name, order)
        opened.remove(name)

    sides = [Apart(partial(open_one, seconds), 3) for seconds in (1, 2)]
    turns = take_turns(sides, 2, 4)
    assert [entry[0] for entry in order[::3]] == [1, 2, 2, 1]
    assert order[:3] == [(1, 3), "peaks count from here", (1, 4)]
    assert [turn.seconds for turn in turns] == [((1, 1, 1, 3), (2, 2, 2, 6))] * 2
    assert (sides[0].losses, sides[0].peak(), len(sides[0].cpu())) == ([float(n) for n in range(7)], 7, 2)


def test_disturbed_turns_are_left_out(monkeypatch):
    calm, disturbed = Turn(((1,), (2,)), 0.1), Turn(((1,), (20,)), 0.9)
    assert undisturbed([calm, disturbed, calm], 2) == [calm, calm]
    assert undisturbed([disturbed, disturbed, calm], 3) == [disturbed, disturbed, calm]
    monkeypatch.setattr("compare.turns.DISTURBED", -float("inf"))
    assert len(take_turns([Program(1, []), Program(1, [])], 3, 1)) == 9
    steps = {(0.01, 0.02): 50, (0.4, 0.4): 2, (0.01, 0.5): 10, (3.0, 9.0): 1}  # of a turn, by seconds of a step
    assert {pair: steps_of_a_turn(*pair) for pair in steps} == steps


def llmc_program(tmp_path, blocks=2, steps=1000):
    path = tmp_path / "train_gpt2"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, time\n"
        f"print('[GPT-2]\\nmax_seq_len: 16\\nnum_layers: {blocks}\\nnum_heads: 2\\nchannels: 16\\nval loss 3.4')\n"
        "open('threads', 'w').write(os.environ['OMP_NUM_THREADS'])\n"
        f"for step in range({steps}):\n"
        "    took = 900 if step == 0 else 100 + step\n"
        "    print(f'step {step}: train loss 3.{step:06d} (took {took}.250000 ms)', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    path.chmod(0o755)
    return path


def test_llmc_output_is_parsed_and_compared(tmp_path):
    with pytest.raises(ValueError, match="blocks=2, llm.c's blocks=5"):
        run_program(llmc_program(tmp_path, blocks=5), 1, SMALL, 2)
    with pytest.raises(RuntimeError, match="must print 4 steps; got steps=2"):
        run_program(llmc_program(tmp_path, steps=2), 1, SMALL, 4)
    lines, peak = run_program(llmc_program(tmp_path), 3, SMALL, 4)
    assert lines == [(3.0, 0.90025), (3.000001, 0.10125), (3.000002, 0.10225), (3.000003, 0.10325)]
    assert peak > 1e6
    assert (tmp_path / "threads").read_text() == "3"
    with open_scheduler("sync") as scheduler:
        comparison = compare_llmc(TimedEngine(JOB, scheduler, 0), llmc_program(tmp_path), 1, 3)
    assert (comparison.step("theirs").median, len(comparison.turns)) == (0.10225, 2)
    assert comparison.losses == (pytest.approx(np.log(29), abs=0.1), 3.0)


REFUSED = [
    ("llm.c", "path=None"),
    ("llm.c nowhere", "path=nowhere"),
    ("torch nowhere", "path=nowhere"),
    ("torch", "torch=not installed"),
    ("transformers", "torch=not installed"),
    ("transformers --torch-bf16", "must come with torch"),
    ("torch --apart", "must come with torch-ddp"),
]


@pytest.mark.parametrize(("flags", "keyword"), REFUSED)
def test_bad_input_is_refused_at_once(flags, keyword, monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module that cannot be imported
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError), match=keyword.replace("torch=n", "=n")):
        against.main(flags.split())


def test_first_losses_must_agree():
    check_losses((5.0, 5.0009), "float32")
    check_losses((5.0, 5.04), "bfloat16")
    for theirs in (5.002, 4.998, float("nan")):
        with pytest.raises(RuntimeError, match="first loss"):
            check_losses((5.0, theirs), "float32")


def test_peers_train_the_same_settings():
    require_published(JOB)
    muon = replace(JOB, optimizer=OptimizerConfig(optimizer="muon"))
    other = muon, replace(JOB, config=replace(SMALL, activation="custom_layers:SQUARED_RELU"))
    for job, keyword in zip(other, ("optimizer=muon", "activation=custom_layers")):
        with pytest.raises(ValueError, match=keyword):
            require_published(job)
