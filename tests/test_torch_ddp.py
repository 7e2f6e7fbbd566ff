"""Tests of the arithmetic of three programs in turns: ours on a cluster, ours on threads, PyTorch's processes."""

from contextlib import contextmanager
from functools import partial

import pytest

from daskgpt.instruments.compare.apart import Apart
from daskgpt.instruments.compare.torch_ddp import Programs, WorkerTime
from daskgpt.instruments.compare.turns import Turn, take_turns


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
    monkeypatch.setattr("daskgpt.instruments.compare.turns._others_seconds", lambda sides: 0.0)


def test_three_take_turns_and_are_compared_within_one():
    order = []
    turns = take_turns([Program(seconds, order) for seconds in (2, 1, 4)], 4, 3)
    assert order == [(seconds, 3) for seconds in (2, 1, 4, 1, 4, 2, 4, 2, 1, 2, 1, 4)]
    assert turns[1].seconds == ((2, 2, 6), (1, 1, 3), (4, 4, 12))
    shares = WorkerTime(0.5, 0.2, 0.3)
    found = Programs("PyTorch 2", 2, turns, 5, (3 * 10**9, 10**9, 10**9), (5.5, 5.5, 5.5), shares)
    assert found.ratio(0, 2).median == 0.5
    assert found.longest(0) == 3
    record = found.record()
    assert (record["ratio"], record["throughput_of_threads"], record["left_out_turns"]) == (0.5, 0.5, 1)
    assert (record["workers_messages"], record["cluster_ms_q3"], record["theirs_peak_gb"]) == (0.2, 3333.333, 1)
    figures = {name: figure.median for name, figure in found.figures().items()}
    assert (figures["threads"], figures["cluster_longest"], figures["cluster_peak"]) == (1666.67, 3, 3)
    lines = found.describe().splitlines()
    assert lines[1].startswith("1 more turns left out")
    rows = {line[:18].strip(): line[18:].split() for line in lines[3:8]}
    assert rows["daskgpt, cluster"] == ["3,333.3", "3,333.3", "..", "3,333.3", "3.00", "3.00", "5.50000"]
    assert rows["cluster / DDP"][0] == rows["cluster / threads"][0] == "0.500"
    disturbed = Programs("", 2, [Turn(((1,),) * 3, 1.5)], 1, (0, 0, 0), (1, 1, 1), shares)
    assert "WARNING: other programs ran in 1 of" in disturbed.describe()


def test_of_programs_apart_one_is_open_at_a_time():
    opened, order = [], []

    @contextmanager
    def open_one(name):
        assert opened == [], "another one is in memory"
        opened.append(name)
        yield Program(name, order)
        opened.remove(name)

    sides = [Apart(partial(open_one, seconds), 3) for seconds in (1, 2)]
    turns = take_turns(sides, 2, 4)
    assert [own[0] for own in order[::3]] == [1, 2, 2, 1]
    assert order[:3] == [(1, 3), "peaks count from here", (1, 4)]
    assert [turn.seconds for turn in turns] == [((1, 1, 1, 3), (2, 2, 2, 6))] * 2
    assert (sides[0].losses, sides[0].peak(), len(sides[0].cpu())) == ([float(n) for n in range(7)], 7, 2)
