"""Tests of systems and settings in which nothing can be computed, and of names that are not UTF-8."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import PATIENCE, refused, run, write_text
from small_runs import FLAGS, fit

import daskgpt
from daskgpt import DataConfig, train
from daskgpt.config.flags import run_command
from daskgpt.training.start import open_dataset

WINDOWS = "import sys; sys.modules['fcntl'] = None; "
MODULE = "sys.argv = ['-m', '--help']; import runpy; runpy.run_module('daskgpt.train', run_name='__main__')"
PROGRAM = "sys.argv = ['/bin/daskgpt', 'train', '--help']; from daskgpt.__main__ import console; console()"


NUMBA = r"daskgpt: Numba must compile kernels; got .*NUMBA_NUM_THREADS"
LINUX = r"daskgpt: the system must be Linux.*WSL"


@pytest.mark.parametrize(
    ("code", "threads", "said"),
    [
        ("import sys; " + MODULE, "0", NUMBA),
        ("import sys; " + PROGRAM, "0", NUMBA),
        ("import daskgpt; daskgpt.fit", "0", f"RuntimeError: {NUMBA}"),
        ("import ctypes, sys; ctypes.CDLL = lambda *_: open('/'); " + MODULE, "1", NUMBA),
        (WINDOWS + MODULE, "1", LINUX),
        (WINDOWS + PROGRAM, "1", LINUX),
        (WINDOWS + "import daskgpt", "1", f"RuntimeError: {LINUX}"),
    ],
)
def test_what_a_system_lacks_is_one_line_of_commands_and_an_error_in_python(code, threads, said):
    variables = os.environ | {"NUMBA_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=variables)
    line = done.stderr.splitlines()[-1] if said.startswith("RuntimeError") else refused(done)
    assert re.match(said, line)
    assert done.returncode == (1 if said.startswith("RuntimeError") else 2)


def test_what_computes_needs_a_compiler(tmp_path):
    without = {"NUMBA_DISABLE_JIT": "1"}
    assert all(run(name, "--help", **without).returncode == 0 for name in ("train", "generate", "bench", "plot"))
    text = write_text(tmp_path)
    assert run("prepare", text, "--encoding", "bytes", "--out", tmp_path / "tokens", **without).returncode == 0
    fit(text, tmp_path / "run")
    assert run("convert", tmp_path / "run", tmp_path / "model.safetensors", **without).returncode == 0
    begun = ("--data", tmp_path / "none"), ("--resume", tmp_path / "run"), ("--resume", tmp_path / "none")
    for result in (*(run("train", *flags, **without) for flags in begun), run("generate", tmp_path / "run", **without)):
        assert refused(result).startswith("daskgpt: Numba must compile kernels; got NUMBA_DISABLE_JIT=1.")


NAME = os.fsdecode(b"caf\xe9")  # not UTF-8


def test_names_of_files_may_have_any_bytes(small_text, tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path / NAME)
    Path("texts").mkdir()
    shutil.copy(small_text, f"texts/{NAME}.txt")
    Path(f"texts/{NAME}.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3")
    fit(f"texts/{NAME}.txt", NAME)
    assert len(daskgpt.fit(resume=NAME, run={"steps": 13}).losses) == 13
    fit("texts", "tuned", init=NAME)
    assert r"caf\udce9.txt" in Path(NAME, "config.toml").read_text()
    told = open_dataset(DataConfig(data="texts", sequence_length=16), 257).description
    assert "2 files, 1 left out: caf\\udce9.pdf" in told
    result = run("prepare", "texts", "--encoding", "bytes", "--out", f"{NAME}/tokens")
    assert result.returncode == 0, result.stderr
    assert b"\xe9" not in b"".join(path.read_bytes() for path in Path(NAME, "tokens").glob("*.json"))


def test_names_in_a_language_that_python_does_not_read(small_text, tmp_path):
    text = shutil.copy(small_text, tmp_path / "café.txt")
    settings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    result = run("train", *FLAGS.split(), "--steps", 1, "--data", text, "--out", tmp_path / "run", **settings)
    assert result.returncode == 0, result.stderr


def test_names_that_are_too_long_are_refused_first(small_text, tmp_path):
    with pytest.raises(OSError, match="File name too long.*shorter name"):
        train.main(["--data", str(small_text), "--out", str(tmp_path / ("a" * 300))])


def test_text_that_is_not_utf8_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate", "--prompt", NAME])
    with pytest.raises(SystemExit) as end:
        run_command(lambda arguments: len(arguments[1].encode()))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == r"daskgpt: text must be UTF-8; got text='caf\udce9'. Convert or rename it (iconv, convmv)."
