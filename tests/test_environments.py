"""Tests of environments in which nothing can be computed: each is named in one line, before anything else is done."""

import os
import subprocess
import sys

import pytest
from command_lines import PATIENCE, refused, run

WINDOWS = "import sys; sys.platform = 'win32'; "
WITHOUT_LOCKS = "import sys; sys.modules['fcntl'] = None; "
MODULE = "sys.argv = ['-m', '--help']; import runpy; runpy.run_module('daskgpt.train', run_name='__main__')"
PROGRAM = "sys.argv = ['/bin/daskgpt', 'train', '--help']; from daskgpt.__main__ import console; console()"


def python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | environment)


@pytest.mark.parametrize(("name", "value"), [("NUMBA_DISABLE_JIT", "1"), ("NUMBA_NUM_THREADS", "0")])
def test_commands_need_numba(name, value):
    for result in (run("train", "--help", **{name: value}), python(f"import sys; {PROGRAM}", **{name: value})):
        line = refused(result)
        assert line.startswith("daskgpt: Numba must compile kernels; got ")
        assert name in line


def test_python_needs_numba():
    result = python("import daskgpt; daskgpt.fit", NUMBA_DISABLE_JIT="1")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("RuntimeError: daskgpt: Numba must compile kernels; got NUMBA_DIS")


def test_plots_need_no_numba():
    assert run("plot", "--help", NUMBA_DISABLE_JIT="1").returncode == 0


@pytest.mark.parametrize("system", [WINDOWS, WITHOUT_LOCKS])
@pytest.mark.parametrize("command", [MODULE, PROGRAM])
def test_commands_on_other_systems(system, command):
    line = refused(python(system + command))
    assert "the system must be Linux" in line
    assert "WSL" in line


def test_python_on_other_systems():
    result = python(WINDOWS + "import daskgpt")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("RuntimeError: daskgpt: the system must be Linux")
