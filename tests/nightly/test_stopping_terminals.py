"""Tests of signals that every process of a run gets, as Ctrl-C from a terminal and SIGTERM from `timeout`: with a
cluster, and before a run has begun.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from command_lines import PATIENCE, write_text
from machines import wait_until
from small_runs import FLAGS

import daskgpt
from daskgpt.config.stopping import STOPPED


def interrupted(begun, tmp_path, *flags, number=signal.SIGINT, **environment):
    """Exit code and output of a run that gets a signal once something holds, and its processes from before."""
    command = [sys.executable, "-m", "daskgpt.train", "--data", write_text(tmp_path), *FLAGS.split(), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command += ["--steps", "100000", "--out", tmp_path / "run"]
    process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **pipes)
    wait_until(lambda: begun() or process.poll() is not None, "the moment of the signal")
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    shown = process.communicate(timeout=PATIENCE)[0]
    return process.returncode, shown, children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_a_cluster_run(number, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    begun = lambda: metrics.exists() and metrics.read_text().count("\n") > 3  # noqa: E731
    code, shown, children = interrupted(begun, tmp_path, "--scheduler", "local", "--threads", "2", number=number)
    assert code == STOPPED, shown
    assert "Traceback" not in shown
    assert daskgpt.load(tmp_path / "run")
    assert len(children) >= 2
    assert not psutil.wait_procs(children, PATIENCE)[1]


def test_ctrl_c_during_compilation_ends_the_command(tmp_path):
    cache = tmp_path / "cache"
    code, shown, _ = interrupted(lambda: any(cache.rglob("*.nbc")), tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert (code, shown.splitlines()[-1]) == (130, "stopped")
    assert not (tmp_path / "run").exists()


SCRIPT = """
import daskgpt
config = daskgpt.preset("tiny", blocks=1, heads=1, channels=8, vocabulary=257, positions=16)
data = daskgpt.DataConfig(data={text!r}, batch_size=2, sequence_length=16)
dataflow = daskgpt.DataflowConfig(scheduler="local", threads=2)
daskgpt.fit(config, data=data, dataflow=dataflow, run=daskgpt.RunConfig(steps=2))
"""


def test_script_without_main_guard_is_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(text=str(write_text(tmp_path))))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "__main__" in done.stderr.splitlines()[-1]
    guarded = script.read_text().replace("\n", "\n    ")
    script.write_text(f'if __name__ == "__main__":{guarded}\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
