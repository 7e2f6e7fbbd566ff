"""Tests of runs under difficult conditions: a full disk, closed output, a user's own settings."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import PATIENCE, run

from daskgpt.kernels.compilation import compile_all

LITTLE = "--blocks 1 --heads 2 --channels 32 --batch-size 2 --sequence-length 16 --validation-batches 2"
LITTLE = [*LITTLE.split(), "--sample-tokens", "5", "--steps", "20"]
FULL = Path("/dev/full")
MODEL = Path("latest") / "model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compile_all("float32")


@pytest.fixture(scope="module")
def expected(small_text, tmp_path_factory):
    """The model that a run ends with."""
    out = tmp_path_factory.mktemp("expected") / "run"
    result = run("train", "--data", small_text, *LITTLE, "--out", out)
    assert result.returncode == 0, result.stderr
    return (out / MODEL).read_bytes()


def training(small_text, out):
    """The words of a training's command line."""
    return [sys.executable, "-m", "daskgpt.train", "--data", str(small_text), *LITTLE, "--out", str(out)]


@pytest.mark.parametrize(
    "script",
    ["$RUN | head -1", "$RUN 2>&1 | head -1", "$RUN >&-", "$RUN >&- 2>&-", "$RUN <&- >/dev/null", "$RUN >/dev/full"],
)
def test_run_completes_with_closed_output(script, small_text, tmp_path, expected):
    if "full" in script and not FULL.exists():
        pytest.skip("the system has no device that is always full")
    out = tmp_path / "run"
    command = ["bash", "-c", script.replace("$RUN", shlex.join(training(small_text, out)))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (out / MODEL).read_bytes() == expected, result.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 20
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert "Errno 32" not in result.stderr
    if "full" in script:
        assert result.returncode == 2
        assert "stdout: " in result.stderr.splitlines()[-1]


SETTINGS = {"DASK_SCHEDULER": "processes", "DASK_OPTIMIZATION__FUSE__ACTIVE": "False", "DASK_NUM_WORKERS": "1"}
SETTINGS |= {"DASK_TEMPORARY_DIRECTORY": "/nowhere", "DASK_TOKENIZE__ENSURE_DETERMINISTIC": "True"}


def test_one_core_and_dask_settings_change_no_bit(small_text, tmp_path, expected, monkeypatch):
    out = tmp_path / "run"
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    core = min(os.sched_getaffinity(0))
    pinned = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", pinned, *training(small_text, out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert "synchronous scheduler\n" in result.stdout
    assert (out / MODEL).read_bytes() == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_kernels_without_room_are_compiled_at_each_start(small_text, tmp_path, expected, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        out = tmp_path / "run"
        result = run("train", "--data", small_text, *LITTLE, "--out", out)
        assert (result.returncode, (out / MODEL).read_bytes()) == (0, expected), result.stderr
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("kernels are compiled at each start")]
        assert "No space left on device" in line
    finally:
        subprocess.run(["umount", folder], check=True)
