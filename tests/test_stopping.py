"""Ctrl-C in a terminal, which every process of a run gets, and SIGTERM: a run ends after a step, with its model."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from command_lines import PATIENCE

import daskgpt
from daskgpt.config.stopping import STOPPED, delayed_interrupts, finishing_first, heeding_interrupts
from daskgpt.kernels.compilation import compile_all

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 2 --sequence-length 16 --validate-every 0 --sample-tokens 0"


class Terminal:
    """A command as the foreground of a terminal of its own: what it shows, and its keyboard."""

    def __init__(self, *command, **environment):
        self.shown = ""
        pid, self.keyboard = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execvpe(command[0], [str(word) for word in command], os.environ | environment)
        self.process = psutil.Process(pid)

    def read_until(self, holds):
        """Read what is shown until something holds, or the command ends; whether it held."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self.shown
            if select.select([self.keyboard], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.keyboard, 1 << 16).decode(errors="replace")
                except OSError:  # the other side is closed
                    return holds()
        return True

    def control_c(self):
        os.write(self.keyboard, b"\x03")

    def ended(self):
        """The exit code."""
        self.read_until(lambda: False)
        return os.waitstatus_to_exitcode(os.waitpid(self.process.pid, 0)[1])


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compile_all(np.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(__file__).read_text())
    return path


def train(text, out, *flags):
    return (sys.executable, "-m", "daskgpt.train", *MODEL.split(), "--data", text, "--out", out, *flags)


def steps_of(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("scheduler", ["local", "threads"])
def test_ctrl_c_in_a_terminal_saves_the_model(scheduler, text, tmp_path):
    out = tmp_path / "run"
    terminal = Terminal(*train(text, out, "--steps", 100000, "--scheduler", scheduler, "--threads", 2))
    assert terminal.read_until(lambda: steps_of(out) > 3), terminal.shown
    children = terminal.process.children(recursive=True)
    terminal.control_c()
    assert terminal.ended() == STOPPED, terminal.shown
    assert re.search(r"stopped after \d+ of 100,?000 steps", terminal.shown)
    assert not re.search(r"\bnan\b|Traceback|KeyboardInterrupt", terminal.shown), terminal.shown
    config, parameters = daskgpt.load(out)
    assert config.blocks == 1
    assert all(np.isfinite(value).all() for value in parameters.values())
    assert len(children) >= 2 or scheduler == "threads"
    assert not psutil.wait_procs(children, PATIENCE)[1]


def test_sigterm_saves_the_model_too(text, tmp_path):
    out = tmp_path / "run"
    terminal = Terminal(*train(text, out, "--steps", 100000))
    assert terminal.read_until(lambda: steps_of(out) > 3), terminal.shown
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == STOPPED, terminal.shown
    assert "go on with: python -m daskgpt.train --resume" in terminal.shown
    assert daskgpt.load(out)


def test_ctrl_c_while_kernels_are_compiled_ends_the_command(text, tmp_path):
    out = tmp_path / "run"
    terminal = Terminal(*train(text, out, "--steps", 2), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    compiled = lambda: any((tmp_path / "cache").rglob("*.nbc"))  # noqa: E731
    assert terminal.read_until(compiled), terminal.shown
    terminal.control_c()
    assert terminal.ended() == 130, terminal.shown
    assert terminal.shown.splitlines()[-1].removeprefix("^C") == "stopped"
    assert not out.exists()


def swallowed():
    """An interrupt in a callback from C, which ctypes prints and forgets."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_a_callback_swallows_is_raised_again():
    with heeding_interrupts() as check:
        check()
    heeding, reached = heeding_interrupts(), []
    with pytest.raises(KeyboardInterrupt), heeding:
        reached.append(swallowed())
    assert reached == [None]
    with suppress(KeyboardInterrupt), heeding_interrupts() as check:
        swallowed()
        check()
        reached.append("not heard")
    assert reached == [None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number):
    said, before = [], signal.getsignal(number)
    with finishing_first(said.append) as asked:
        assert not asked()
        signal.raise_signal(number)
        assert asked()
        assert said == ["stopping after this step, and saving; once more stops at once and saves nothing more"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_another_thread_trains_without_a_say_in_signals():
    found = []

    def enter():
        with finishing_first(found.append) as asked, heeding_interrupts() as check:
            check()
            found.append(asked())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_process_started_without_interrupts_ignores_them():
    with delayed_interrupts():
        process = subprocess.Popen([sys.executable, "-c", "input(); print('lived')"], stdin=-1, stdout=-1, text=True)
    process.send_signal(signal.SIGINT)
    assert process.communicate("\n")[0] == "lived\n"


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupt_is_delayed_whichever_thread_takes_it(others):
    over, found = threading.Event(), []
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        found.append("after the signal")

    with pytest.raises(KeyboardInterrupt), delayed_interrupts():
        interrupt()
    assert found == ["after the signal"]
    over.set()
    for thread in threads:
        thread.join()


SCRIPT = """
import daskgpt
config = daskgpt.preset("tiny", blocks=1, heads=1, channels=8, vocabulary=257, positions=16)
data = daskgpt.DataConfig(data={text!r}, batch_size=2, sequence_length=16)
dataflow = daskgpt.DataflowConfig(scheduler="local", threads=2)
daskgpt.fit(config, data=data, dataflow=dataflow, run=daskgpt.RunConfig(steps=2))
"""


def test_a_script_that_each_worker_would_start_again_is_told_so(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(text=str(text)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: open_scheduler: the worker processes of a local cluster must start; got Nanny failed to start. "
        'Each of them imports the script that is running: what it does must stand under `if __name__ == "__main__":`.'
    )
    assert "bootstrapping" not in done.stderr
    script.write_text("def main():" + SCRIPT.format(text=str(text)).replace("\n", "\n    ") + "\n\n")
    script.write_text(script.read_text() + 'if __name__ == "__main__":\n    main()\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["numpy", "daskgpt.config.run", "dask.array"])
def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_word(module):
    """Python itself says which module it has imported, at that moment."""
    command = [sys.executable, "-X", "importtime", "-m", "daskgpt.train", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in said
