"""Tests of the simulation of steps: hand-made graphs with known times, and plans."""

import json
from dataclasses import replace
from itertools import product

import pytest

import daskgpt
from daskgpt import bench
from daskgpt.graph.calls import wait
from daskgpt.graph.nodes import task
from daskgpt.profiling import calibrate
from daskgpt.profiling.calibrate import Calibration, Times
from daskgpt.profiling.measure import job_from
from daskgpt.profiling.simulate import Demand, Process, Simulation, critical_path

FREE = Calibration(2, {}, (0.0, 0.0), [(1.0, 0.0, 0.0)], 0.0, 1.0, 1e9, 0.0, 100.0)


def seconds(alone, beside=None, **others):
    return Demand(alone, beside or alone, **others)


def process(needs, demands, threads=1):
    graph = {(name, 0): task((name, 0), wait, [(other, 0) for other in others]) for name, others in needs.items()}
    return Process(graph, list(graph), {(name, 0): demand for name, demand in demands.items()}, threads)


CHAIN = {"a": "", "b": "a", "c": "b"}
TWO_CHAINS = {"a": "", "b": "a", "c": "", "d": "c"}


@pytest.mark.parametrize(
    ("needs", "threads", "expected"), [(CHAIN, 1, 3), (CHAIN, 2, 3), (TWO_CHAINS, 1, 4), (TWO_CHAINS, 2, 2)]
)
def test_time_of_chains(needs, threads, expected):
    chains = process(needs, dict.fromkeys(needs, seconds(1.0)), threads)
    simulation = Simulation([chains], FREE, 2)
    assert simulation.seconds == pytest.approx(expected)
    assert simulation.busy == pytest.approx(len(needs))
    assert critical_path([chains], FREE) == (3 if needs is CHAIN else 2)


def test_cores_share_memory_and_are_shared():
    pair = process({"a": "", "b": ""}, {"a": seconds(1.0, 2.0), "b": seconds(2.0, 3.0)}, 2)
    # Together until a has ended after 2 s, when a third of b is left, which takes a third of its time alone.
    assert Simulation([pair], FREE, 2).seconds == pytest.approx(2 + 2 / 3)
    many = process(dict.fromkeys("abcd", ""), {name: seconds(1.0) for name in "abcd"}, 4)
    assert Simulation([many], FREE, 4).seconds == pytest.approx(1)
    assert Simulation([many], FREE, 2).seconds == pytest.approx(2)
    assert Simulation([many], replace(FREE, crowd=1.2), 2).seconds == pytest.approx(2.4)
    assert Simulation([many], replace(FREE, crowd=1.2), 4).seconds == pytest.approx(1)


def test_the_lock_limits_short_tasks():
    costs = replace(FREE, lock=0.1, tasks=[(1.0, 0.1, 0.15)], graph=(0.3, 0.01))
    short = process({str(number): "" for number in range(50)}, {str(number): seconds(0.01) for number in range(50)}, 4)
    simulation = Simulation([short], costs, 4)
    assert simulation.locked[0] == pytest.approx(0.3 + 50 * (0.01 + 0.1))
    assert simulation.locked[0] < simulation.seconds < simulation.locked[0] + 0.2
    alone = Simulation([replace(short, threads=1)], costs, 4)  # without a pool of threads
    assert alone.seconds == pytest.approx(simulation.locked[0] + 50 * 0.01)


def sender_and_receivers():
    sent = seconds(1.0, sends=[(1, "x", 100), (2, "x", 100)])
    receivers = [process({"a": ""}, {"a": seconds(1.0, receives=[(0, "x")])}) for _ in range(2)]
    return [process({"a": ""}, {"a": sent}), *receivers]


def test_tasks_cost_more_after_long_kernels():
    costs = replace(FREE, tasks=[(0.1, 1.0, 3.0), (0.3, 2.0, 5.0)], lock=1.5)
    assert costs.of_task(0.05, False) == (1.0, 0.0)
    assert costs.of_task(0.2, True) == pytest.approx((1.5, 2.5))
    assert costs.of_task(9.0, False) == (2.0, 0.0)


def test_messages_share_cores():
    costs, processes = replace(FREE, message=0.1), sender_and_receivers()
    simulation = Simulation(processes, costs, 4)
    # The second message begins 0.1 s after the first one; each is on two cores.
    assert [ends[-1] for ends in simulation.ends] == pytest.approx([1, 1 + 0.1 + 1 + 0.1 + 1, 1 + 0.2 + 1 + 0.1 + 1])
    assert Simulation(processes, costs, 4).ends == simulation.ends
    # On two cores both have half of their speed from 1.2 to 3 s, when the first one is done.
    assert [ends[-1] for ends in Simulation(processes, costs, 2).ends] == pytest.approx([1, 4.1, 4.2])
    assert critical_path(processes, costs) == pytest.approx(2 + 0.2 + 1)


def test_a_process_without_its_message_is_reported():
    with pytest.raises(RuntimeError, match="waiting"):
        Simulation(sender_and_receivers()[1:], FREE, 2)


def test_times_follow_operations_and_measured_ratios():
    kind = "float32 linear.forward btC,OC->btO"
    sizes = product((64, 128, 512), (64, 256))
    shapes = [{"b": 2, "t": 64, "C": channels, "O": outputs, "n": 1} for channels, outputs in sizes]
    operations = [shape["b"] * shape["t"] * shape["C"] * shape["O"] for shape in shapes]
    exact = Times(kind, [(shape, 1e-5 + count / 1e10) for shape, count in zip(shapes, operations)])
    larger = {"b": 4, "t": 64, "C": 1024, "O": 1024, "n": 1}
    assert exact(larger) == pytest.approx(1e-5 + 4 * 64 * 1024 * 1024 / 1e10, rel=1e-3)
    slow = [(shape, 2e-10 * count if shape["C"] == 512 else 1e-10 * count) for shape, count in zip(shapes, operations)]
    uneven = Times(kind, slow)
    assert all(uneven(shape) == pytest.approx(seconds_of_call, rel=0.01) for shape, seconds_of_call in slow)


MODEL = daskgpt.preset("tiny", blocks=1, channels=32)
DIALS = {"batch_chunk": 2, "sequence_chunk": 16, "grain": "block", "scheduler": "threads"}


def predicted(groups=4, **options):
    data = {"batch_size": 8, "sequence_length": 16, "groups": groups}
    return daskgpt.plan(MODEL, data, dataflow=DIALS, **options)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A calibration of this machine for a small model, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        job = job_from(MODEL, data={"batch_size": 8, "sequence_length": 16}, dataflow=DIALS)
        calibration = calibrate.of_job(job, (2, 16), None)
        calibrate.cache_path().parent.mkdir()
        assert calibration.save() == calibrate.cache_path()
        assert calibrate.load().samples == json.loads(json.dumps(calibration.samples))
        yield calibration


def test_a_calibration_has_a_place_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "sample", lambda *_: pytest.fail("kernels are measured"))
    calibrate.cache_path().mkdir(parents=True)
    with pytest.raises(ValueError, match="must name a file that can be written"):
        calibrate.calibrate()


def test_plans_of_threads_and_workers(calibrated):
    one, two, many = (predicted(threads=threads).forecast for threads in (1, 2, 64))
    assert one.work == pytest.approx(two.work) == pytest.approx(many.work)
    for plan in (one, two, many):
        assert plan.path <= plan.seconds
        assert plan.busy <= plan.seconds * plan.threads
    assert one.work + one.interpreter == pytest.approx(one.seconds), "one thread is never idle"
    assert repr(two) == repr(predicted(threads=2).forecast)
    assert not any("just now" in note for note in two.notes)
    assert predicted(workers=4, threads=2).forecast.threads == 8


def test_plans_of_workers_that_clip(calibrated):
    plan = predicted(workers=2, optimizer={"clip": 1.0})
    assert plan.forecast.seconds > 0
    assert not any("better" in note for note in plan.forecast.notes), "a calibration is stored, but lacks clipping"


def test_the_memory_of_this_machine_does_not_bound_others(calibrated, monkeypatch):
    wanted = predicted(threads=64).forecast.seconds
    monkeypatch.setattr("daskgpt.training.engine.available_memory", lambda: 1)
    assert predicted(threads=64).forecast.seconds == wanted


def test_the_steps_of_a_calibration_fit_their_models(tmp_path, monkeypatch, called):
    """Of which no step is run: together they take minutes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "sample", lambda jobs, *_: {f"alone {job}": [({"n": 1}, 1.0)] for job in jobs})
    monkeypatch.setattr(calibrate, "overheads", lambda samples, cores: replace(FREE, samples=samples, cores=cores))
    code, told = called(bench, "--calibrate")
    assert (code, told.splitlines()[-1]) == (0, f"calibration written to {calibrate.cache_path()}")
    assert len(calibrate.load().samples) >= sum(len(shapes) for *_, shapes in calibrate.MODELS.values())


def test_a_damaged_calibration_is_made_again(calibrated):
    calibrate.cache_path().write_text('{"cores": 1')
    assert calibrate.load() is None
    assert any("just now" in note for note in predicted(threads=2).forecast.notes)
    calibrated.save()
