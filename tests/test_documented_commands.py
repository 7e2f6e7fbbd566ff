"""Every command that README, `docs/` and `cluster/README.md` show runs, or why it does not stands in a table."""

from __future__ import annotations

import glob
import io
import re
import shutil
import sys
from importlib import import_module

import pytest
from command_lines import write_text
from conftest import GOLDEN
from documented import NOT_RUN, ROOT, SHORTER, commands_of, documented
from measurements import DATA, pages
from small_runs import FLAGS

from daskgpt.instruments.records import read_records

COMMANDS = documented()
RUN = [command for command in COMMANDS if not command.why_not]
QUESTION = '{"ctx": "a line", "label": 0, "endings": ["of text", "to the sea", "of a hat", "and on"], "ind": 1}\n'


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
        for name in ("shakespeare.txt", "other.txt", "corpus/one.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(text, folder / name)
        (folder / "hellaswag_val.jsonl").write_text(QUESTION)
        for out in ("runs/first", "runs/long"):
            assert run(f"train --data shakespeare.txt --steps 4 --out {out} {FLAGS}") == 0
        assert run("convert runs/first first-hf") == 0
        shutil.copytree("first-hf", "gpt2-folder")
        assert run("prepare corpus --learn-vocabulary 300 --out tokens") == 0
    (folder / "tests").mkdir()
    (folder / "tests" / "golden").symlink_to(GOLDEN)
    return folder


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text)
def test_a_command_that_a_page_shows_runs(command, made, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    shutil.copytree(made, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a line\n"))
    for given in re.findall(r"(?:--out|convert \S+) (\S+)", command.text):
        remove(folder / given)  # which a reader makes with this command
    try:
        words = [found for word in command.arguments for found in (sorted(glob.glob(word)) if "*" in word else [word])]
        code = import_module(f"daskgpt.{command.module}").main(words)
    except SystemExit as end:  # --help
        code = end.code
    assert not code
    assert capsys.readouterr().out


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_pages_have_commands():
    assert all(commands_of(page) for page in pages() if page.name in ("README.md", "training.md", "files.md"))
    assert len(RUN) > 25
    assert all(command.module for command in RUN), "a command that is no module's needs a reason in NOT_RUN"


def test_every_reason_is_needed_and_names_what_there_is():
    shown = [command.text for command in COMMANDS]
    later = {"sphinx-build ", "scancel ", "tensorboard "}  # of pages that others may write
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, text) for text in shown)]
    assert set(unused) <= later
    for why in NOT_RUN.values():
        for path in re.findall(r"[\w./]+\.(?:py|md)\b", why):
            assert (ROOT / path).exists() or "test_docs" in path
    assert all(any(re.search(pattern, text) for text in shown) for pattern in SHORTER)


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "python.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(text.replace("steps=100", "steps=2, validation_batches=1"), "python.md", "exec"), {})
    assert (tmp_path / "model.safetensors").exists()
    assert "wte" not in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jsonl")), ids=lambda path: path.stem)
def test_commands_of_measurements_are_understood(path):
    for record in read_records(path):
        words = record.command.split()
        module = import_module(words[2]) if words[1:2] == ["-m"] and words[2].startswith("daskgpt.") else None
        if hasattr(module, "parser"):
            module.parser().parse_args(words[3:])


def test_files_that_readme_names_are_there():
    for page in pages():
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_readme_is_for_people_who_have_a_minute():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
