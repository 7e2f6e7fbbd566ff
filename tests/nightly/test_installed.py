"""Tests of what pip installs, and of a run where a system has not what Linux and x86 have."""

import os
import subprocess
import sys
from zipfile import ZipFile

import pytest
from command_lines import PATIENCE
from documents import ROOT
from small_runs import FLAGS

import daskgpt

OTHERS = {"py.typed", "METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}  # of a wheel, beside modules
# As on a Mac: what only Linux has is hidden, and x86's instructions, once the libraries have been imported.
ELSEWHERE = """
import os, platform, sys, sysconfig, dask.array, distributed, numba, tiktoken
sysconfig.get_config_vars()
del os.sched_getaffinity, os.sched_setaffinity, os.posix_fadvise, os.setpriority
sys.platform, platform.system, platform.machine = "darwin", lambda: "Darwin", lambda: "arm64"
platform.libc_ver = lambda: ("", "")
from daskgpt import train
sys.exit(train.main(sys.argv[1:]))
"""


def call(folder, *words, **more):
    """Run a program in a folder and an environment that know nothing of the repository; return what it prints."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DASKGPT_"))
    } | more
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if "No matching distribution" in done.stderr:
        pytest.skip("there is no package index")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_trains_and_generates_in_an_environment_of_its_own(tmp_path):
    call(tmp_path, sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", ".", ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert {name.rpartition("/")[2] for name in names if not name.endswith(".py")} == OTHERS
    assert {name.partition("/")[0] for name in names if name.endswith(".py")} == {"daskgpt"}
    call(tmp_path, sys.executable, "-m", "venv", "own")
    call(tmp_path, "own/bin/pip", "install", wheel)
    trained = call(tmp_path, "own/bin/daskgpt", "train", "--steps", "50", "--out", "run")
    assert "write text with it: daskgpt generate run " in trained
    assert call(tmp_path, "own/bin/daskgpt", "generate", "run", "--prompt", "def ").startswith("def ")


def test_without_linux_and_x86_a_run_ends_with_the_same_bits(tmp_path):
    flags = [*FLAGS.split(), "--steps", "5", "--groups", "2", "--out"]
    call(tmp_path, sys.executable, "-m", "daskgpt.train", *flags, "here", PYTHONPATH=str(ROOT))
    call(tmp_path, sys.executable, "-c", ELSEWHERE, *flags, "there", PYTHONPATH=str(ROOT), NUMBA_CACHE_DIR="cache")
    here, there = (daskgpt.digest(daskgpt.load(tmp_path / name)[1]) for name in ("here", "there"))
    assert here == there
