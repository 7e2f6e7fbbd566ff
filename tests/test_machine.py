"""Tests of what this process may use of the machine: cores and memory, by affinity and control groups; and its heap."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command_lines import PATIENCE
from control_groups import control_groups

from daskgpt.config.model import ModelConfig
from daskgpt.generation.decoder import Decoder, Weights
from daskgpt.model.parameters import initial_parameters
from daskgpt.schedulers import machine
from daskgpt.schedulers.opening import open_scheduler

LIMITS = [
    ("", {}, None),
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000", "memory.max": "2000000"}, 1_000_000),
    ("0::/of/the/host\n", {"memory.max": "3000000"}, 3_000_000),
    ("2:cpu:/x\n1:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4000000", "memory.max": "5"}, 4_000_000),
    ("1:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ("0::/a\n", {"a/memory.max": "6000000", "a/memory.high": "5000000"}, 5_000_000),
]


@pytest.mark.parametrize(("cgroup", "files", "limit"), LIMITS)
def test_container_limits_memory(tmp_path, monkeypatch, cgroup, files, limit):
    physical = control_groups(tmp_path, monkeypatch, cgroup, files)
    assert machine.memory_limit() == ((limit, "this container") if limit else (physical, "this machine"))


OF_A = {"a/memory.max": "5000", "a/memory.current": "2000", "a/memory.stat": "anon 1\ninactive_file 500\n"}
ALL = {"memory.max": "9000", "memory.current": "2000"}


LEFT = [("0::/\n", {}, 70 << 10), ("0::/\n", ALL, 7000), ("0::/a\n", ALL | OF_A, 3500)]
LEFT += [("0::/\n", ALL | {"memory.current": "9900"}, 0)]


@pytest.mark.parametrize(("cgroup", "files", "left"), LEFT)
def test_available_memory_of_machine_and_container(tmp_path, monkeypatch, cgroup, files, left):
    control_groups(tmp_path, monkeypatch, cgroup, files)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=70 << 10))
    assert machine.available_memory() == left


def test_threads_and_decoding_take_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr("daskgpt.schedulers.local.usable_cores", lambda: 2)
    with open_scheduler("threads") as scheduler:
        assert scheduler.threads == 2
    config = ModelConfig(blocks=2, heads=2, channels=512)
    weights = Weights(config, initial_parameters(config, 0), "float32")
    assert Decoder(weights, 1, 64, 0).threads == 2


@pytest.mark.parametrize(
    ("siblings", "order"),
    [
        (("0-1", "0-1", "2-3", "2-3"), [0, 2, 1, 3]),
        (("0,2", "1,3", "0,2", "1,3"), [0, 1, 2, 3]),
        (("0", "1", "2", "3"), [0, 1, 2, 3]),
        ((), [0, 1, 2, 3]),
    ],
)
def test_runs_on_few_processors_have_different_cores(siblings, order, tmp_path, monkeypatch):
    for number, text in enumerate(siblings):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    chosen = []
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine.os, "sched_setaffinity", lambda _process, cores: chosen.append(cores), raising=False)
    for count in (1, 2, 4):
        with machine.on_cores(count):
            assert list(chosen[-1]) == order[:count]
        assert chosen[-1] == {0, 1, 2, 3}, "then on all again"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_memory_that_is_kept_is_not_asked_for_again():
    """The second of two large arrays lies where the first one was, whose pages are there."""
    code = """
import resource, numpy
from daskgpt.schedulers.local import keep_memory
keep_memory()
counts = [(numpy.ones(1 << 24), resource.getrusage(resource.RUSAGE_SELF).ru_minflt)[1] for _ in range(2)]
print(counts[1] - counts[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert int(done.stdout) < 50, f"page faults: {done.stdout} {done.stderr}"
