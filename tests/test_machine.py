"""Tests of what this process may use of the machine: cores and memory, by affinity and control groups."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from control_groups import control_groups

from daskgpt.config.model import ModelConfig
from daskgpt.generation.decoder import Decoder, Weights
from daskgpt.model.parameters import initial_parameters
from daskgpt.schedulers import machine
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.opening import open_scheduler

LIMITS = [
    ("", {}, None),
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000", "memory.max": "2000000"}, 1_000_000),
    ("0::/of/the/host\n", {"memory.max": "3000000"}, 3_000_000),
    ("2:cpu:/x\n1:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4000000", "memory.max": "5"}, 4_000_000),
    ("1:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ("0::/a\n", {"unified/a/memory.max": "5000000"}, 5_000_000),
    ("0::/a\n", {"a/memory.max": "6000000", "a/memory.high": "5000000"}, 5_000_000),
]


@pytest.mark.parametrize(("own", "files", "limit"), LIMITS)
def test_container_limits_memory(tmp_path, monkeypatch, own, files, limit):
    physical = control_groups(tmp_path, monkeypatch, own, files)
    assert machine.memory_limit() == ((limit, "this container") if limit else (physical, "this machine"))


OF_A = {"a/memory.max": "5000", "a/memory.current": "2000", "a/memory.stat": "anon 1\ninactive_file 500\n"}
ALL = {"memory.max": "9000", "memory.current": "2000"}


LEFT = [("0::/\n", {}, 70 << 10), ("0::/\n", ALL, 7000), ("0::/a\n", ALL | OF_A, 3500)]
LEFT += [("0::/\n", ALL | {"memory.current": "9900"}, 0)]


@pytest.mark.parametrize(("own", "files", "left"), LEFT)
def test_available_memory_of_machine_and_container(tmp_path, monkeypatch, own, files, left):
    control_groups(tmp_path, monkeypatch, own, files)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=70 << 10))
    assert machine.available_memory() == left


MAX, HALF_MORE = "max 100000", "150000 100000"
VERSION_1 = {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}
# This process may run on 16 cores; the quota, and the cores that it may use.
QUOTAS = [
    ("", {}, None, 16),
    ("0::/a\n", {"a/cpu.max": MAX, "cpu.max": MAX}, None, 16),
    ("0::/\n", {"cpu.max": HALF_MORE}, 1.5, 2),
    ("0::/\n", {"cpu.max": "400000"}, 4, 4),
    ("0::/a/b\n", {"a/b/cpu.max": MAX, "a/cpu.max": "300000 100000", "cpu.max": "500000 100000"}, 3, 3),
    ("0::/of/the/host\n", {"cpu.max": "50000 50000"}, 1, 1),
    ("0::/../outside\n", {"cpu.max": "240000 100000"}, 2.4, 2),
    ("0::/a\n", {"unified/a/cpu.max": HALF_MORE}, 1.5, 2),
    ("0::/\n", {"cpu.max": "20000 100000"}, 0.2, 1),
    ("0::/\n", {"cpu.max": "6400000 100000"}, None, 16),
    ("0::/\n", {"cpu.max": "1 0"}, None, 16),
    ("0::/\n", {"cpu.max": ""}, None, 16),
    ("3:cpu,cpuacct:/a\n0::/a\n", {f"cpu,cpuacct/a/{name}": text for name, text in VERSION_1.items()}, 2.5, 3),
    ("3:cpuacct,cpu:/of/the/host\n", {f"cpu/{name}": text for name, text in VERSION_1.items()}, 2.5, 3),
    ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "700000"}, 7, 7),
    ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1"}, None, 16),
    ("3:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "100000"}, None, 16),
]


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("own", "files", "quota", "cores"), QUOTAS)
def test_quota_limits_cores(tmp_path, monkeypatch, own, files, quota, cores):
    control_groups(tmp_path, monkeypatch, own, files)
    assert machine.usable_cores() == cores
    assert machine.quota_note(cores) == (f": quota of {quota:g} of 16 cores" if quota else "")
    assert machine.quota_note(cores - 1) == ""


def test_affinity_below_a_quota(tmp_path, monkeypatch):
    control_groups(tmp_path, monkeypatch, "0::/\n", {"cpu.max": "400000 100000"})
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert (machine.usable_cores(), machine.quota_note(3)) == (3, "")
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


MOUNTS = """22 1 0:5 / /proc rw - proc proc rw
31 22 0:28 / {0} rw,relatime shared:9 - tmpfs tmpfs rw,mode=755
32 31 0:29 {1} {0}/here rw,relatime shared:4 - {2}
"""


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("own", "top", "kind", "name"),
    [
        ("0::/docker/7f/inner\n", "/docker/7f", "cgroup2 cgroup rw,nsdelegate", "here/inner/cpu.max"),
        ("0::/docker/7f/inner\n", "/docker/7f", "cgroup2 rw", "here/cpu.max"),
        ("4:cpuacct,cpu:/docker/7f\n", "/docker", "cgroup cgroup rw,cpu,cpuacct", "here/7f/cpu.max"),
        ("0::/other\n", "/docker/7f", "cgroup2 cgroup2 rw", "here/cpu.max"),
    ],
)
def test_quota_where_groups_are_mounted(tmp_path, monkeypatch, own, top, kind, name):
    files = {name: HALF_MORE, "mounts": MOUNTS.format(tmp_path, top, kind)}
    control_groups(tmp_path, monkeypatch, own, files)
    assert machine.usable_cores() == 2


@pytest.mark.usefixtures("sixteen_cores")
def test_threads_and_decoding_follow_the_quota(tmp_path, monkeypatch):
    control_groups(tmp_path, monkeypatch, "0::/\n", {"cpu.max": HALF_MORE})
    with open_scheduler("threads") as scheduler:
        assert (scheduler.threads, "2 threads: quota of 1.5 of 16 cores" in scheduler.description) == (2, True)
    with open_scheduler("threads", 1) as scheduler:
        assert "quota" not in scheduler.description
    config = ModelConfig(blocks=2, heads=2, channels=512)
    weights = Weights(config, initial_parameters(config, 0), "float32")
    assert Decoder(weights, 1, 64, 0).threads == 2


QUOTA_FILES = {"cpu/{}/cpu.cfs_quota_us": "100000", "{}/cpu.max": "100000 100000"}


@pytest.fixture
def group():
    """Make a control group with a quota of one core, and one in it, which is returned."""
    for name, text in QUOTA_FILES.items():
        with suppress(OSError):
            file = Path("/sys/fs/cgroup") / name.format(f"daskgpt-{os.getpid()}")
            inner = file.parent / "inner"
            inner.mkdir(parents=True)
            try:
                file.write_text(text)
                yield inner
                return
            finally:
                inner.rmdir()
                file.parent.rmdir()
    pytest.skip("the system lets root make control groups")


@pytest.mark.skipif(usable_cores() < 2, reason="a quota of one core limits only processes that have more")
def test_quota_of_the_system(group):
    code = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
    code += "from daskgpt.schedulers.machine import *; print(usable_cores(), quota_note(1))"
    command = [sys.executable, "-c", code, group / "cgroup.procs"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"1 : quota of 1 of {usable_cores()} cores\n"
