"""Tests of what pip installs, and of what is left where a system has not what Linux and x86 have."""

import os
import subprocess
import sys
from zipfile import ZipFile

import pytest
from command_lines import PATIENCE
from documents import ROOT
from small_runs import FLAGS

import daskgpt

# As on a Mac: hides what only Linux has, and x86's instructions, from this package (other libraries come before).
ELSEWHERE = """
import os, pathlib, platform, sys, sysconfig
import dask.array, distributed, numba, tiktoken
sysconfig.get_config_vars()
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "setpriority"):
    delattr(os, name)
sys.platform, platform.system = "darwin", lambda: "Darwin"
platform.machine, platform.libc_ver = lambda: "arm64", lambda: ("", "")
for name in ("read_text", "write_text"):
    def call(path, *arguments, own=getattr(pathlib.Path, name), **options):
        return own(pathlib.Path("nowhere") if path.parts[:2] in (("/", "proc"), ("/", "sys")) else path, *arguments)
    setattr(pathlib.Path, name, call)
from daskgpt import train
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def call(tmp_path):
    """Run a program in a folder and an environment that know nothing of the repository; return what it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DASKGPT_"))}

    def result(*words, **more):
        words = [str(word) for word in words]
        done = subprocess.run(words, cwd=tmp_path, env=own | more, capture_output=True, text=True, timeout=PATIENCE)
        if "No matching distribution" in done.stderr:
            pytest.skip("there is no package index")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return result


def test_a_wheel_trains_and_generates_in_an_environment_of_its_own(call, tmp_path):
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", ".", ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    others = [name for name in names if not (name.startswith("daskgpt/") and name.endswith(".py"))]
    assert sorted(name.rpartition("/")[2] for name in others) == sorted(
        ["py.typed", "METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"]
    )
    call(sys.executable, "-m", "venv", "own")
    call("own/bin/pip", "install", wheel)
    assert "go on with: daskgpt generate run " in call("own/bin/daskgpt", "train", "--steps", 50, "--out", "run")
    assert call("own/bin/daskgpt", "generate", "run", "--prompt", "def ", "--tokens", 20).startswith("def ")


def test_without_linux_and_x86_a_run_ends_with_the_same_bits(call, tmp_path):
    flags = [*FLAGS.split(), "--steps", 5, "--groups", 2]
    call(sys.executable, "-m", "daskgpt.train", *flags, "--out", "here", PYTHONPATH=str(ROOT))
    call(sys.executable, "-c", ELSEWHERE, *flags, "--out", "there", PYTHONPATH=str(ROOT), NUMBA_CACHE_DIR="cache")
    here, there = (daskgpt.digest(daskgpt.load(tmp_path / name)[1]) for name in ("here", "there"))
    assert here == there
