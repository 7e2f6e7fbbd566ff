"""Tests of Ctrl-C and SIGTERM: a run ends after a step, with its model, and no interrupt is missed."""

import math
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from command_lines import PATIENCE
from machines import wait_until
from small_runs import FLAGS
from watched_run import WatchedRun

import daskgpt
from daskgpt.config.stopping import STOPPED, delayed_interrupts, finishing_first, heeding_interrupts
from daskgpt.kernels.compilation import compile_all


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_after_a_step(number, tmp_path):
    """As a process of its own."""
    compile_all(np.float32)
    run, lines = WatchedRun(tmp_path, FLAGS), []
    with run.start("auto", "--keep-best", "0", steps=100_000, heard=lines.append):
        wait_until(lambda: run.step > 3 or run.process.poll() is not None, "three steps")
        run.process.send_signal(number)
        code = run.process.wait(PATIENCE)
    shown = "\n".join([*lines, run.errors.read_text()])
    assert code == STOPPED, shown
    assert re.search(r"stopped after \d+ of 100,?000 steps", shown)
    assert "daskgpt.train --resume" in shown
    assert not re.search(r"\bnan\b|Traceback|KeyboardInterrupt", shown)
    assert all(np.isfinite(value).all() for value in daskgpt.load(run.out)[1].values())


def swallowed():
    """An interrupt in a callback from C, which ctypes prints and forgets."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_swallowed_interrupt_is_raised_again():
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
def test_second_signal_interrupts(number, monkeypatch):
    """`timeout` sends one to its child, and one to all processes of its group."""
    said, before = [], signal.getsignal(number)
    monkeypatch.setattr("daskgpt.config.stopping.TOGETHER", math.inf)
    with finishing_first(said.append) as asked:
        assert not asked()
        signal.raise_signal(number)
        assert asked()
        assert len(said) == 1
        signal.raise_signal(number)
        monkeypatch.setattr("daskgpt.config.stopping.TOGETHER", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with finishing_first(print) as asked:
        signal.raise_signal(signal.SIGTERM)
        assert not asked()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_handler_from_outside_of_python_stays(monkeypatch):
    """Of a program that Python runs in: its handler reads as None, and could not be set again."""
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with finishing_first(print) as asked:
        signal.raise_signal(signal.SIGTERM)
        assert not asked()
    assert heard == [signal.SIGTERM]


def test_other_threads_leave_signals_alone():
    def entered():
        with finishing_first(print) as asked, heeding_interrupts() as check:
            check()
            return asked()

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(entered).result()


def test_started_process_ignores_interrupts():
    with delayed_interrupts():
        process = subprocess.Popen(["sh", "-c", "read line; echo lived"], stdin=-1, stdout=-1, text=True)
    process.send_signal(signal.SIGINT)
    assert process.communicate("\n")[0] == "lived\n"


def test_interrupt_is_delayed_in_any_thread():
    over, order = threading.Event(), []
    threading.Thread(target=over.wait, daemon=True).start()

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        order.append("after the signal")

    with pytest.raises(KeyboardInterrupt), delayed_interrupts():
        interrupt()
    assert order == ["after the signal"]
    over.set()
