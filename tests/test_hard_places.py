"""Where the system refuses: a full disk, output that nobody takes, two at once, settings of a user's own.

Each ends in a result or in one clear line, and nothing that is half-written passes as whole.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import PATIENCE, refused, run, write_text
from conftest import GOLDEN

from daskgpt.kernels.compilation import compile_all
from daskgpt.training.run_folder import load

LITTLE = "--blocks 1 --heads 2 --channels 32 --batch-size 2 --sequence-length 16 --validation-batches 2"
LITTLE = [*LITTLE.split(), "--sample-tokens", "5", "--steps", "20"]
FULL = Path("/dev/full")
MODEL = Path("latest") / "model.safetensors"
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compile_all("float32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    """The model that a run ends with."""
    out = tmp_path_factory.mktemp("expected") / "run"
    result = run("train", "--data", text, *LITTLE, "--out", out)
    assert result.returncode == 0, result.stderr
    return (out / MODEL).read_bytes()


def in_shell(script, *arguments, **environment):
    """What a shell makes of a script, in which $RUN is a command line of the package, with its exit code."""
    command = shlex.join([sys.executable, "-m", f"daskgpt.{arguments[0]}", *map(str, arguments[1:])])
    return subprocess.run(
        ["bash", "-c", script.replace("$RUN", command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def last_line(result):
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_disk_that_is_full_at_the_model_leaves_no_model(text, tmp_path):
    """As a limit on the size of a file, which the system refuses in the same way."""
    out = tmp_path / "run"
    result = in_shell("ulimit -f 16; $RUN", "train", "--data", text, *LITTLE, "--out", out)
    assert last_line(result) == (
        f"train: the last checkpoint must be written; got path={out / 'step-00000020'} (File too large). "
        "Make room there and go on with --resume."
    )
    assert sorted(path.name for path in out.iterdir()) == [".lock", "config.toml", "metrics.jsonl"]


def test_a_disk_that_is_full_at_the_metrics_leaves_whole_lines(text, tmp_path):
    out = tmp_path / "run"
    # Room for the configuration, of some 1.1 kB, and not for the metrics, of some 4.
    result = in_shell("ulimit -f 2; $RUN", "train", "--data", text, *LITTLE, "--out", out)
    assert "train: the last checkpoint must be written; got path=" in last_line(result)
    waits = f"metrics    {out / 'metrics.jsonl'} waits for room: File too large; training goes on"
    assert result.stdout.count(waits) == 1
    lines = (out / "metrics.jsonl").read_text()
    assert lines.endswith("\n")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(lines.count("\n")))


def test_a_disk_that_is_full_at_the_start_leaves_no_run(text, tmp_path):
    out = tmp_path / "run"
    result = in_shell("ulimit -f 0; $RUN", "train", "--data", text, *LITTLE, "--out", out)
    assert f"got path={out / 'config.toml'} (File too large)" in refused(result)
    assert run("train", "--data", text, *LITTLE, "--out", out).returncode == 0, "the folder is free for a run"


def test_a_timeline_that_cannot_be_written_costs_no_model(text, tmp_path, expected):
    out = tmp_path / "run"
    script = "ulimit -f 200; $RUN"  # a model has 89 kB, its moments twice that, a timeline more
    result = in_shell(script, "train", "--data", text, *LITTLE, "--out", out, "--timeline", "first")
    assert f"timeline: all of the file must be written; got path={out / 'first.'}" in last_line(result)
    assert (out / MODEL).read_bytes() == expected
    assert not list(out.glob("*.tmp")) + list(out.glob(".*.tmp")), "no part of a file"
    assert not (out / "first.html").exists()


@pytest.mark.parametrize(
    "script",
    ["$RUN | head -1", "$RUN 2>&1 | head -1", "$RUN >&-", "$RUN >&- 2>&-", "$RUN <&- >/dev/null", "$RUN >/dev/full"],
)
def test_a_run_that_nobody_watches_goes_on_to_its_end(script, text, tmp_path, expected):
    if "full" in script and not FULL.exists():
        pytest.skip("the system has no device that is always full")
    out = tmp_path / "run"
    result = in_shell(script, "train", "--data", text, *LITTLE, "--out", out)
    assert (out / MODEL).read_bytes() == expected, result.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 20
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert "Errno 32" not in result.stderr
    if "full" in script:
        assert last_line(result) == (
            "stdout: what is printed must have somewhere to go; got No space left on device. "
            "Make room where it goes, or send it elsewhere."
        )


@pytest.mark.parametrize("arguments", [["--tokens", 3000], ["--help"]])
def test_text_that_nobody_reads_any_more_ends_without_a_word(arguments):
    script = "set -o pipefail; $RUN | head -c 5"
    result = in_shell(script, "generate", GOLDEN / "gpt2_small.bin", *arguments)
    assert result.stderr == ""
    assert result.returncode in (0, 128 + 13), "whether it was quicker than its reader"


@needs_full
def test_text_that_does_not_fit_is_one_line():
    result = in_shell("$RUN > /dev/full", "generate", GOLDEN / "gpt2_small.bin", "--tokens", 3)
    assert refused(result).startswith("stdout: what is printed must have somewhere to go; got No space")


def test_of_three_runs_into_one_folder_one_has_it(text, tmp_path, expected):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "daskgpt.train", "--data", str(text), *LITTLE, "--out", str(out)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    ended = [(process.communicate(timeout=PATIENCE)[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ended) == [0, 2, 2]
    taken = f"RunFolder: the folder must not hold a run already; got out={out}. Give another --out.\n"
    assert [stderr for stderr, code in ended if code] == [taken, taken]
    assert (out / MODEL).read_bytes() == expected
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "best",
        "config.toml",
        "latest",
        "metrics.jsonl",
        "step-00000020",
    ]


SETTINGS = {
    "DASK_SCHEDULER": "processes",
    "DASK_ARRAY__CHUNK_SIZE": "1KiB",
    "DASK_OPTIMIZATION__FUSE__ACTIVE": "False",
    "DASK_NUM_WORKERS": "1",
    "DASK_TEMPORARY_DIRECTORY": "/nowhere",
    "DASK_TOKENIZE__ENSURE_DETERMINISTIC": "True",
}


def test_a_user_s_own_settings_of_dask_change_no_bit(text, tmp_path, expected):
    out = tmp_path / "run"
    result = run("train", "--data", text, *LITTLE, "--out", out, **SETTINGS)
    assert result.returncode == 0, result.stderr
    assert (out / MODEL).read_bytes() == expected


def test_array_expressions_are_refused(text, tmp_path):
    out = tmp_path / "run"
    result = run("train", "--data", text, *LITTLE, "--out", out, DASK_ARRAY__QUERY_PLANNING="True")
    assert refused(result) == (
        "daskgpt: Dask's array expressions must be off; got array.query-planning=True. "
        "Unset DASK_ARRAY__QUERY_PLANNING before Python starts."
    )
    assert not out.exists()


def test_a_run_on_one_core_has_the_same_bits(text, tmp_path, expected):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "daskgpt.train", "--data", str(text), *LITTLE, "--out", str(out)]
    core = min(os.sched_getaffinity(0))
    pinned = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.executable, sys.argv[1:])"
    result = subprocess.run([sys.executable, "-c", pinned, *command], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert "1 threads" in result.stdout
    assert (out / MODEL).read_bytes() == expected


def test_a_configuration_with_a_number_beyond_all_is_refused(text, tmp_path):
    out = tmp_path / "run"
    assert run("train", "--data", text, *LITTLE, "--out", out).returncode == 0
    written = out / "config.toml"
    written.write_text(written.read_text().replace("batch_size = 2", "batch_size = inf"))
    result = run("generate", out, "--tokens", 3)
    assert refused(result).startswith(f"load: config.toml must be that of a run; got path={written} (OverflowError).")
    load(out)
