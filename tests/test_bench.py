"""Tests of `bench`: its output and records, and predictions of a step."""

import gc
import re
import tracemalloc
from dataclasses import replace
from uuid import UUID

import numpy as np
import pytest
from conftest import SMALL
from control_groups import control_groups
from records import Record
from steps import step_of

from daskgpt import bench, train
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.nodes import is_leaf
from daskgpt.model.parameters import step_operations
from daskgpt.profiling.measure import TimedEngine, measure_steps
from daskgpt.profiling.plan import fits, predict
from daskgpt.schedulers import machine
from daskgpt.schedulers.opening import open_scheduler

SIZE = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]
FLAGS = [*SIZE, "--steps", "3", "--warmup", "1", "--recorded", "1"]


def job_of(config=SMALL, batch_size=4, sequence_length=12, groups=0, **dataflow):
    asked = bench.BenchConfig(batch_size=batch_size, sequence_length=sequence_length, groups=groups)
    return bench.job_of(config, asked, DataflowConfig(**dataflow))


def printed(capsys, *arguments):
    assert bench.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--grain", "auto"], ["--scheduler", "sync"]], ids=str)
def test_measurement_record(capsys, flags):
    record = Record.of_line(printed(capsys, *FLAGS, *flags, "--sequence-chunk", "16", "--json").encode())
    figures, settings = {name: figure.median for name, figure in record.figures.items()}, record.settings
    step, config = record.figures["step"], ModelConfig(blocks=2, heads=2, channels=32)
    assert 0 < step.least <= step.median <= step.largest
    assert len(step.turns) == 3
    assert record.command == " ".join(["python -m daskgpt.bench", *FLAGS, *flags, "--sequence-chunk", "16"])
    assert min(figures["forward"], figures["backward"], figures["update"]) > 0
    assert figures["tokens"] == pytest.approx(4 * 32 / step.median * 1e3, rel=1e-3)
    assert figures["rate"] == pytest.approx(step_operations(config, 4, 32) / step.median / 1e6, rel=1e-2)
    assert 0 <= figures["overhead"] < 1
    assert 0 < figures["critical_path"] <= step.largest
    assert figures["peak"] > 0.03
    assert settings["threads"] == (1 if "sync" in flags else machine.usable_cores())
    assert (settings["batch_size"], settings["sequence_length"], settings["sequence_chunk"]) == (4, 32, 16)
    chunk, grain = (settings["batch_chunk"], 16), settings["grain"]  # what the machine chose
    dials = {"grain": grain, "in_place": True, "threads": settings["threads"]}
    step = step_of(config, (4, 32), chunk, job_of().optimizer, **dials)
    assert settings["tasks"] == sum(not is_leaf(node) for node in step.graph.values())
    assert record.versions["numpy"] == np.__version__


def test_worker_kernels_are_counted(cluster):
    cluster.have(1)
    with open_scheduler(cluster.address) as scheduler:
        steps = TimedEngine(job_of(scheduler=cluster.address), scheduler, 0)
        measured = measure_steps(steps, warmup=1, timed=2, recorded=1)
        assert len(steps.cpu()) == 3  # this process, the worker and the scheduler
    figures = {name: spread.median for name, (spread, _) in measured.items()}
    assert 0 < figures["overhead"] < 1
    assert min(figures[name] for name in ("forward", "backward", "update")) > 0
    assert figures["peak"] * 1e9 > machine.resident_memory()  # this process, and the worker


def test_process_and_machine_information(tmp_path, monkeypatch):
    before = machine.busy_seconds()
    files = {"STATUS": "VmHWM:  7 kB\nVmRSS:\t3 kB\n", "CPU_INFO": "processor: 0\nmodel name\t: a chip\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, name, tmp_path / name)
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path / "clear")
    assert (machine.peak_memory(), machine.processor()) == (7 << 10, "a chip")
    assert machine.busy_seconds() >= before > 0
    assert machine.busy_cores(0.01) >= 0
    machine.reset_peak_memory()
    assert (tmp_path / "clear").read_text() == "5"
    monkeypatch.setattr(machine, "STATUS", tmp_path / "none")
    assert machine.resident_memory() > 1e7
    assert machine.peak_memory() > 1e7


# What a step will take.

PARAMETER_BYTES = 4 * (32 * 16 + 16 * 16 + 2 * (32 + 48 * 17 + 16 * 17 + 32 + 64 * 17 + 16 * 65) + 32)
# A token's values, in channels: the embedding, the last layernorm twice (it is computed again in the backward pass),
# and two gradients. In a block, forward: layernorm 1, qkv 3, attention 1, projection 1, sum 1, layernorm 1, hidden 4,
# gelu 4, projection 1, sum 1; as many backward; layernorms and gelu again 6. One log-sum-exp a head, the loss, its
# gradient, and the logits' gradient.
ACTIVATION_BYTES = 4 * (48 * (16 * (5 + 2 * 42) + 2 * 2 + 2 + 32) + 1)


@pytest.mark.parametrize("grain", ["kernel", "block", "chunk"])
def test_bytes_of_a_step_match_a_hand_count(grain):
    plan = predict(job_of(grain=grain))
    first_gradient = 4 * 32 * 16  # the sum of the unembedding's chunks, which the embedding's continues from
    expected = {"parameters": PARAMETER_BYTES, "gradients": PARAMETER_BYTES + first_gradient}
    assert dict(plan.made) == expected | {"optimizer": 2 * PARAMETER_BYTES, "activations": ACTIVATION_BYTES}
    assert plan.grain == grain
    assert 3 * PARAMETER_BYTES < plan.peak < sum(plan.made.values())
    beside = predict(job_of(scheduler="local", engine="tasks", grain=grain))  # the new state comes beside the old
    assert (beside.made["parameters"], beside.made["optimizer"]) == (2 * PARAMETER_BYTES, 4 * PARAMETER_BYTES)
    assert beside.peak > 6 * PARAMETER_BYTES


DATAFLOWS = [{"grain": "kernel", "sequence_chunk": 16}, {"grain": "chunk", "batch_chunk": 8}]
DATAFLOWS += [{"grain": "block", "barrier": "phase"}, {"grain": "block", "barrier": "none", "window": 3}]
DATAFLOWS += [{"grain": "block", "batch_chunk": 1, "groups": 8}, {"grain": "block", "precision": "bfloat16"}]


@pytest.mark.parametrize("dataflow", DATAFLOWS, ids=str)
def test_predicted_peak_matches_a_real_step(dataflow, monkeypatch):
    monkeypatch.setattr("daskgpt.model.tape.uuid4", lambda: UUID(int=0))  # the same keys, so the same order of tasks
    # So wide that arrays, not the 1.2 MB of Python's own objects for a run's tasks, are what is compared.
    job = job_of(replace(SMALL, channels=256, positions=64), 8, 64, scheduler="sync", **dataflow)
    with open_scheduler("sync") as scheduler:
        TimedEngine(job, scheduler, 0).run(1)  # what is imported, compiled and kept
        gc.collect()
        tracemalloc.start()
        steps = TimedEngine(job, scheduler, 0)
        state = sum(value.nbytes for pack in steps.engine.state().packs for value in pack)
        graph = tracemalloc.get_traced_memory()[0] - state
        tracemalloc.reset_peak()
        steps.run(1)
        peak = tracemalloc.get_traced_memory()[1] - graph
        tracemalloc.stop()
    plan = predict(job)
    assert plan.peak == pytest.approx(peak, rel=0.1)
    assert plan.made["parameters"] + plan.made["optimizer"] == state  # packed matrices too


def test_plan_table(capsys, small_text):
    assert train.main(["--plan", "--data", str(small_text), *SIZE, "--grain", "chunk", "--batch-chunk", "2"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "no step was run"
    assert max(map(len, out.splitlines())) <= 80
    for words in ("parameters: 2 blocks, 2 heads, 32 channels", "4 x 32 tokens", "2 of 2 x 32"):
        assert words in " ".join(out.split())
    plan = predict(job_of(grain="chunk", batch_chunk=2))
    assert f"{plan.peak / 1e6:,.1f} MB" in str(plan)


GRAINS = [({}, "block", "assumed"), ({"barrier": "layer"}, "kernel", "auto")]
GRAINS += [({"scheduler": "local", "engine": "tasks"}, "block", "auto")]


@pytest.mark.parametrize(("flags", "grain", "word"), GRAINS)
def test_plan_shows_its_grain(flags, grain, word):
    job = job_of(**flags)
    plan = predict(job)
    assert (plan.grain, plan.tasks) == (grain, predict(job_of(grain=grain, **flags)).tasks)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("grain")]
    assert {grain, word} <= set(re.findall(r"\w+", line))


def test_plan_shows_whether_the_peak_fits(tmp_path, monkeypatch):
    physical, resident = control_groups(tmp_path, monkeypatch), machine.resident_memory()
    assert fits(job_of(), 0, resident).startswith("fits: 0 MB and ")
    assert fits(job_of(), physical - resident // 2, resident).startswith("DOES NOT FIT: ")
    assert "of 4 processes" in fits(job_of(scheduler="local", threads=3), 0, resident)
    assert fits(job_of(scheduler="tcp://host:1"), 10**9, resident).startswith("1.0 GB are needed by the cluster's")


def test_a_model_beyond_memory_is_not_measured(tmp_path, monkeypatch):
    control_groups(tmp_path, monkeypatch, "0::/\n", {"memory.max": "100000"})
    with pytest.raises(ValueError, match="must fit into the 0.000 GB of this container"):
        bench.main(FLAGS)


def test_a_measurement_is_printed(capsys):
    with pytest.raises(ValueError, match="steps=0"):
        bench.main(["--steps", "0"])
    lines = dict(line.split(maxsplit=1) for line in printed(capsys, *FLAGS, "--scheduler", "sync").splitlines())
    assert all(lines[name].endswith(unit) for name, unit in (("step", ")"), ("update", " ms"), ("peak", " GB")))
