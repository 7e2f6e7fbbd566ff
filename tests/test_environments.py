"""Tests of systems and settings in which nothing can be computed, and of names that are not UTF-8."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import PATIENCE, refused, run, write_text
from small_runs import fit, tensors_of

from daskgpt import DataConfig, RunConfig, prepare, train
from daskgpt.config.flags import run_command
from daskgpt.training.start import open_dataset

WINDOWS = "import sys; sys.platform = 'win32'; "
WITHOUT_LOCKS = "import sys; sys.modules['fcntl'] = None; "
MODULE = "sys.argv = ['-m', '--help']; import runpy; runpy.run_module('daskgpt.train', run_name='__main__')"
PROGRAM = "sys.argv = ['/bin/daskgpt', 'train', '--help']; from daskgpt.__main__ import console; console()"


def python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | environment)


def test_commands_need_numba():
    for result in (
        run("train", "--help", NUMBA_NUM_THREADS="0"),
        python(f"import sys; {PROGRAM}", NUMBA_NUM_THREADS="0"),
    ):
        line = refused(result)
        assert line.startswith("daskgpt: Numba must compile kernels; got ")
        assert "NUMBA_NUM_THREADS" in line


def test_python_needs_numba():
    result = python("import daskgpt; daskgpt.fit", NUMBA_NUM_THREADS="0")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("RuntimeError: daskgpt: Numba must compile kernels; got ")


def test_what_computes_needs_a_compiler(tmp_path):
    without = {"NUMBA_DISABLE_JIT": "1"}
    assert all(run(name, "--help", **without).returncode == 0 for name in ("train", "generate", "bench"))
    text = write_text(tmp_path)
    assert run("prepare", text, "--encoding", "bytes", "--out", tmp_path / "tokens", **without).returncode == 0
    fit(text, tmp_path / "run")
    assert run("convert", tmp_path / "run", tmp_path / "model.safetensors", **without).returncode == 0
    begun = ("--data", tmp_path / "none"), ("--resume", tmp_path / "run"), ("--resume", tmp_path / "none")
    for result in (*(run("train", *flags, **without) for flags in begun), run("generate", tmp_path / "run", **without)):
        assert refused(result).startswith("daskgpt: Numba must compile kernels; got NUMBA_DISABLE_JIT=1.")


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


NAME = os.fsdecode(b"caf\xe9")  # not UTF-8


@pytest.fixture
def inside(small_text, tmp_path, monkeypatch):
    """A working folder with a text and a folder, both with names that are not UTF-8, and a file that is no text."""
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir()
    shutil.copy(small_text, Path(NAME, f"{NAME}.txt"))
    Path(NAME, f"{NAME}.pdf").write_bytes(b"%PDF-1.7\n")
    monkeypatch.setattr("daskgpt.data.source.look", lambda *_: pytest.fail("nothing is to be read"))
    return tmp_path


WRITTEN = ["--data", "--out", "--init", "--validation-data", "--resume"]


@pytest.mark.parametrize("flag", WRITTEN)
def test_names_that_cannot_be_written_down_are_refused_first(flag, inside):
    rest = [] if flag == "--resume" else ["--out", "run"] * (flag != "--out")
    with pytest.raises(ValueError, match=r"must be UTF-8; got \w+=.*caf\\udce9. Rename"):
        train.main([flag, NAME, *rest])
    assert list(inside.iterdir()) == [inside / NAME]


def test_prepared_folders_have_names_that_training_takes(inside):
    with pytest.raises(ValueError, match=r"must be UTF-8; got out=.*caf\\udce9"):
        prepare.main([NAME, "--out", f"{NAME}/tokens"])


def test_a_working_folder_is_a_part_of_names(inside, small_text, monkeypatch):
    monkeypatch.chdir(NAME)
    with pytest.raises(ValueError, match=r"must be UTF-8; got data=.*caf\\udce9/text.txt"):
        DataConfig(data="text.txt")
    with pytest.raises(ValueError, match=r"must be UTF-8; got out=.*caf\\udce9/runs"):
        train.main(["--data", str(small_text)])
    assert DataConfig().data == "stdlib"
    assert RunConfig(out=str(inside)).out == str(inside)


def test_python_that_does_not_read_utf8_is_named(small_text, tmp_path):
    text = shutil.copy(small_text, tmp_path / "café.txt")
    settings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    line = refused(run("train", "--data", text, **settings))
    assert "Set PYTHONUTF8=1" in line


def test_names_that_are_too_long_are_refused_first(small_text, tmp_path):
    with pytest.raises(OSError, match="File name too long.*shorter name"):
        train.main(["--data", str(small_text), "--out", str(tmp_path / ("a" * 300))])


def test_names_below_a_folder_may_be_any(inside, small_text, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(inside)
    Path(NAME).rename("folder")
    fit(Path("folder"), inside / "run")
    assert tensors_of(inside / "run") == tensors_of_text(small_text, inside)
    data = DataConfig(data="folder", sequence_length=16)
    told = open_dataset(data, 257).description
    assert "2 files, 1 left out: caf\\udce9.pdf" in told
    assert prepare.main(["folder", "--encoding", "bytes", "--out", "tokens"]) == 0
    assert b"\xe9" not in b"".join(path.read_bytes() for path in Path("tokens").glob("*.json"))


def tensors_of_text(small_text, folder):
    fit(small_text, folder / "of-text")
    return tensors_of(folder / "of-text")


def test_text_that_is_not_utf8_is_named(inside, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate", "--prompt", NAME])
    with pytest.raises(SystemExit) as end:
        run_command(lambda arguments: len(arguments[1].encode()))
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == r"daskgpt: text must be UTF-8; got text='caf\udce9'. Convert or rename it (iconv, convmv)."
        "\n"
    )
