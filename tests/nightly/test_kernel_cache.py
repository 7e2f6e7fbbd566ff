"""Tests of the cache of compiled kernels between processes: those that write it at once, and the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import daskgpt

SOURCE = """
import numpy as np
from daskgpt.kernels.compilation import kernel

@kernel("r1 f w1")
def scaled(x, factor, y):
    for i in range(x.size):
        y[i] = factor * x[i]

for dtype in ("float32", "float64"):
    x, y = np.arange(5, dtype=dtype), np.empty(5, dtype)
    scaled(x, 2.0, y)
    assert y.tolist() == [0, 2, 4, 6, 8], y
dispatchers = [scaled.compile(kind) for kind in "fd"]
print([dispatcher.stats.cache_hits[dispatcher.signatures[0]] for dispatcher in dispatchers])
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(daskgpt.__file__).parents[1]), str(folder)])
    command = [sys.executable, "-c", "import scaled_module"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(tmp_path):
    (tmp_path / "scaled_module.py").write_text(SOURCE)
    processes = [start(tmp_path) for _ in range(3)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert start(tmp_path).communicate()[0].strip() == "[1, 1]"
