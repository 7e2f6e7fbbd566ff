"""PyTorch's DistributedDataParallel beside a cluster and threads: one model in all three, and none stays behind."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from command_lines import PATIENCE
from conftest import SMALL
from test_stopping import Terminal
from tolerances import TOLERANCES

from daskgpt import bench
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.compare.apart import Apart
from daskgpt.instruments.compare.messages import TorchOptions
from daskgpt.instruments.compare.torch_ddp import Programs
from daskgpt.instruments.compare.torch_process import Place, TorchSide
from daskgpt.instruments.compare.turns import Turn, take_turns
from daskgpt.instruments.measure import Steps
from daskgpt.instruments.timeline.events import Event, TaskGraph, Timeline, Transfer, Window
from daskgpt.instruments.timeline.worker_time import WorkerTime, worker_time
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.addresses import open_scheduler

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install 'daskgpt[compare]'"
)
MODEL = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]


def job_of(batch_size=4, **dataflow):
    asked = bench.BenchConfig(batch_size=batch_size, sequence_length=16)
    return bench.job_of(replace(SMALL, channels=32), asked, DataflowConfig(**dataflow))


# One model.


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "bf16"), [(2, False), (2, True), (4, False)])
def test_processes_together_train_what_threads_train(processes, bf16):
    job = job_of()
    with TorchSide(job, 3, 1, TorchOptions(bf16=bf16), [Place()] * processes) as torch:
        assert len(torch.run(10)) == len(torch.losses) == 10
        assert len(torch.cpu()) == processes
        assert torch.peak() > processes * 5e7
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(job, scheduler, 3)
        steps.run(10)
    tolerance = TOLERANCES["bfloat16 losses" if bf16 else "golden losses"]
    np.testing.assert_allclose(torch.losses, steps.losses, **tolerance)


@needs_torch
@pytest.mark.slow
def test_what_ends_while_others_wait_for_it_is_said():
    """The others give up, and are ended: the error names the first that did not answer."""
    torch = TorchSide(job_of(), 0, 1, TorchOptions(), [Place()] * 2)

    def one_is_killed():
        with torch:
            torch.run(1)
            torch.processes[1].process.kill()
            torch.run(1)

    with pytest.raises(RuntimeError, match="bench: the PyTorch process must answer; got exit code="):
        one_is_killed()
    assert all(process.process.poll() is not None for process in torch.processes)


def test_a_batch_without_equal_parts_is_refused():
    with pytest.raises(ValueError) as error:
        TorchSide(job_of(), 0, 1, TorchOptions(), [Place()] * 3)
    assert str(error.value) == (
        "bench: DistributedDataParallel needs as many sequences in each process; got batch_size=4, processes=3. "
        "Give --batch-size 6."
    )


@needs_torch
def test_threads_are_no_cluster():
    with pytest.raises(ValueError) as error:
        bench.main(["--against", "torch-ddp", "--scheduler", "threads"])
    assert str(error.value) == (
        "bench: --against torch-ddp must run on a cluster; got scheduler=threads. Leave --scheduler out, or name a "
        "cluster."
    )


# The command.


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_three_programs_in_turns(capsys, monkeypatch, apart):
    monkeypatch.setattr("daskgpt.instruments.compare.turns.DISTURBED", float("inf"))
    monkeypatch.setattr("daskgpt.instruments.compare.turns.LONGEST_TURN", 1.0)
    flags = ["--steps", "2", "--warmup", "1", "--recorded", "1", "--json", *["--apart"] * apart]
    assert bench.main(["--against", "torch-ddp", *MODEL, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("cluster", "threads", "theirs"):
        assert 0 < found[f"{name}_ms_min"] <= found[f"{name}_ms_q1"] <= found[f"{name}_ms"] <= found[f"{name}_ms_q3"]
        assert found[f"{name}_longest"] >= 1
        assert found[f"{name}_peak_gb"] > 0.1
    assert (found["workers"], found["scheduler"], found["turns"]) == (2, "local", 2)
    rounding = TOLERANCES["golden losses"]["rtol"]
    assert (
        found["cluster_first_loss"]
        == found["threads_first_loss"]
        == pytest.approx(found["theirs_first_loss"], rounding)
    )
    shares = [share for name, share in found.items() if name.startswith("workers_")]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert min(found["workers_kernels"], found["workers_scheduler"]) > 0


@needs_torch
@pytest.mark.slow
def test_ctrl_c_leaves_no_process():
    compile_all(np.float32)
    command = [sys.executable, "-m", "daskgpt.bench", "--against", "torch-ddp", *MODEL, "--steps", "100000"]
    terminal = Terminal(*command)
    children = {}

    def all_are_there():
        children.update({child.pid: child for child in terminal.process.children(recursive=True)})
        used = [child.cpu_times().user for child in children.values() if "torch_gpt2" in " ".join(child.cmdline())]
        return len(used) == 2 and min(used) > 2  # seconds: it has been imported

    assert terminal.read_until(all_are_there), terminal.shown
    terminal.control_c()
    assert terminal.ended() == 130, terminal.shown
    assert "Traceback" not in terminal.shown
    end = time.monotonic() + PATIENCE
    while [child for child in children.values() if child.is_running()]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_apart_from_whom():
    with pytest.raises(ValueError) as error:
        bench.main(["--apart"])
    assert str(error.value) == "bench: --apart must come with --against torch-ddp; got against=none. Add it."


# The arithmetic.


class Numbers:
    def __init__(self, seconds, order):
        self.seconds, self.order, self.losses = seconds, order, []

    def run(self, count):
        self.order.append(self.seconds)
        return [self.seconds] * (count - 1) + [3 * self.seconds]

    def cpu(self):
        return {}


def test_three_take_turns_and_are_compared_within_one(monkeypatch):
    monkeypatch.setattr("daskgpt.instruments.compare.turns.DISTURBED", float("inf"))
    order = []
    turns = take_turns([Numbers(seconds, order) for seconds in (2, 1, 4)], 4, 3)
    assert order == [2, 1, 4, 1, 4, 2, 4, 2, 1, 2, 1, 4]
    assert turns[1].seconds == ((2, 2, 6), (1, 1, 3), (4, 4, 12))
    shares = WorkerTime(0.5, 0.1, 0.2, 0.15, 0.05)
    found = Programs("PyTorch 2", 2, turns, 5, (3 * 10**9, 10**9, 10**9), (5.5, 5.5, 5.5), shares)
    assert found.ratio(0, 2).median == 0.5
    assert found.longest(0) == 3
    record = found.record()
    assert (record["ratio"], record["throughput_of_threads"], record["left_out_turns"]) == (0.5, 0.5, 1)
    assert record["workers_transfer"] == 0.2
    lines = found.describe().splitlines()
    assert lines[1] == "1 more turns left out, in which other programs ran"
    assert all(len(line) <= 80 for line in lines)
    rows = {line[:18].strip(): line[18:].split() for line in lines[3:8]}
    assert rows["daskgpt, cluster"] == ["3,333.3", "3,333.3", "..", "3,333.3", "3.00", "3.00", "5.50000"]
    assert rows["cluster / DDP"][0] == rows["cluster / threads"][0] == "0.500"


def test_of_programs_apart_one_is_open_at_a_time(monkeypatch):
    monkeypatch.setattr("daskgpt.instruments.compare.turns.DISTURBED", float("inf"))
    opened = []

    class Program:
        def __init__(self, name):
            self.name, self.losses, self.ran = name, [], []

        def __enter__(self):
            assert opened == [], "another one is in memory"
            opened.append(self.name)
            return self

        def __exit__(self, *_):
            opened.remove(self.name)

        def run(self, count):
            self.ran.append(count)
            self.losses += [float(len(self.losses) + number) for number in range(count)]
            return [0.5] * count

        def reset_peak(self):
            self.ran.append("peaks count from here")

        def peak(self):
            return len(self.losses)

        def cpu(self):
            return {("here", ord(self.name) + len(ran)): 1.0}

    ran = []

    def open_one(name):
        ran.append(Program(name))
        return ran[-1]

    sides = [Apart(partial(open_one, name), 3) for name in "ab"]
    turns = take_turns(sides, 2, 4)
    assert [program.name for program in ran] == ["a", "b", "b", "a"]
    assert all(program.ran == [3, "peaks count from here", 4] for program in ran)
    assert [turn.seconds for turn in turns] == [((0.5,) * 4,) * 2] * 2
    assert (sides[0].losses, sides[0].peak(), len(sides[0].cpu())) == ([float(n) for n in range(7)], 7, 2)


def test_turns_that_others_disturbed_are_told():
    found = Programs("", 2, [Turn(((1,),) * 3, 1.5)], 1, (0, 0, 0), (1, 1, 1), WorkerTime(1, 0, 0, 0, 0))
    assert "WARNING: other programs ran in 1 of these turns: the ratios say little" in found.describe()


def test_where_workers_time_goes():
    """Two workers of one thread for ten seconds: a from 1 to 4, b needs it and runs from 6 to 9 on the other one."""

    def event(task, lane, start, end):
        return Event(0, "linear", "forward", "h.0", "h.0", 0, (0, 0), lane, start, end, 8, (0, task), task, task)

    events = (event("a", 0, 1.0, 3.0), event("a", 0, 3.5, 4.0), event("b", 1, 6.0, 9.0))
    graph = TaskGraph(("a", "b"), {"a": set(), "b": {"a"}}, {}, frozenset({"b"}))
    lanes, transfers = ("worker 0", "worker 1"), (Transfer(1, "worker 0", 5.0, 6.0, 8, 1),)
    shares = worker_time(Timeline("", lanes, events, (Window((0,), 0.0, 10.0),), graph, {}, transfers))
    # Scheduler: a's first second, and from a's end until its result is asked for.
    expected = WorkerTime(kernels=5.5 / 20, tasks=0.5 / 20, transfer=1 / 20, scheduler=2 / 20, idle=11 / 20)
    assert vars(shares) == pytest.approx(vars(expected))
