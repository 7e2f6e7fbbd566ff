"""Tests of the commands that README, `docs/` and `cluster/README.md` show: each runs, or a table says why not."""

import glob
import io
import re
import shutil
import sys
from importlib import import_module

import pytest
from command_lines import write_text
from conftest import GOLDEN
from documented import commands_of, documented
from documents import ROOT
from small_runs import FLAGS, losses_of

VERSIONS = [command for command in commands_of(ROOT / "docs" / "execution.md") if "--steps 8" in command.text]


def run(text: str) -> int:
    """A command line of this package, in this process."""
    module, *arguments = text.split()
    return import_module(f"daskgpt.{module}").main(arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What a reader of the pages has made or been given by then."""
    folder = tmp_path_factory.mktemp("documented")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = write_text(folder)
        for name in ("my-text.txt", "other.txt", "corpus/one.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(text, folder / name)
        (folder / "pairs.jsonl").write_text('{"prompt": "one and", "response": " two"}\n' * 20)
        for out in ("runs/first", "runs/long", "runs/tuned", "runs/other"):
            assert run(f"train --data my-text.txt --steps 4 --out {out} {FLAGS}") == 0
        assert run(f"train --init runs/first --lora 2 --data my-text.txt --steps 4 --out runs/adapted {FLAGS}") == 0
        assert run("convert runs/first first-hf") == 0
        shutil.copytree("first-hf", "gpt2-folder")
        assert run("prepare corpus --encoding learn:300 --out tokens") == 0
    (folder / "tests").mkdir()
    (folder / "tests" / "golden").symlink_to(GOLDEN)
    return folder


@pytest.mark.parametrize(
    "command", [command for command in documented() if not command.why_not], ids=lambda command: command.text
)
def test_documented_command_runs(command, made, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    shutil.copytree(made, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a line\n"))
    for given in re.findall(r"(?:--out|convert \S+) (\S+)", command.text):  # which a reader makes with this command
        shutil.rmtree(folder / given) if (folder / given).is_dir() else (folder / given).unlink(missing_ok=True)
    try:
        words = [path for word in command.arguments for path in (sorted(glob.glob(word)) if "*" in word else [word])]
        code = import_module(f"daskgpt.{command.module}").main(words)
    except SystemExit as end:  # --help
        code = end.code
    assert (bool(code), bool(capsys.readouterr().out)) == (False, True)


def test_versions_of_the_study_have_equal_losses(tmp_path):
    losses = set()
    for number, command in enumerate(VERSIONS):
        assert run(f"{command.text.partition('daskgpt.')[2]} --out {tmp_path / str(number)}") == 0
        losses.add(tuple(losses_of(tmp_path / str(number))))
    assert (len(VERSIONS), len(losses)) == (5, 1)


def test_documented_python_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "python.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(text.replace("steps=100", "steps=2, validation_batches=1"), "python.md", "exec"), {})
    assert (tmp_path / "model.safetensors").exists()
