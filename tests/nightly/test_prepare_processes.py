"""Tests of preparing tokens in processes: killed ones, two at once, workers, and threads of other libraries."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_lines import SMALL, refused, run
from prepared_texts import files_of, prepared, write_corpus

from daskgpt.formats.encoding import read_vocabulary
from daskgpt.formats.token_files import JOURNAL, MANIFEST, VOCABULARY_FILE


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def _written(folder: Path) -> int:
    """Bytes of tokens, whole files and others."""
    size = 0
    for path in folder.glob("*.bin*"):
        with suppress(FileNotFoundError):  # renamed meanwhile
            size += path.stat().st_size
    return size


@pytest.mark.parametrize("scheduler", ["threads", "local"])
def test_killed_preparation_continues_to_the_same_bytes(scheduler, corpus, tmp_path):
    """Killed whenever the files have grown by some, until one process comes to the end."""
    learned = prepared(tmp_path, corpus, "--encoding", "learn:600", out="learned") / VOCABULARY_FILE
    many = [*[corpus] * 5, "--encoding", learned]
    whole, out = prepared(tmp_path, *many, out="whole"), tmp_path / "out"
    kills = 0
    for wanted in (1, 1_500_000, 3_000_000, 6_000_000):
        flags = [*map(str, many), "--scheduler", scheduler, "--out", str(out)]
        command = [sys.executable, "-m", "daskgpt.prepare", *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and _written(out) < wanted:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        assert not (out / MANIFEST).exists()
        assert "must be complete" in refused(run("train", "--data", out, *SMALL))
    assert kills == 4
    result = run("prepare", *many, "--out", out)
    assert result.returncode == 0, result.stderr
    assert files_of(out) == files_of(whole)
    assert {path.name for path in out.glob(".*")} == {JOURNAL}


def test_number_of_threads_does_not_change_a_learned_vocabulary(corpus, tmp_path):
    names = set()
    for threads in ("1", "2"):
        out = tmp_path / threads
        result = run("prepare", corpus / "below", "--encoding", "learn:500", "--out", out, RAYON_NUM_THREADS=threads)
        assert result.returncode == 0, result.stderr
        names.add(read_vocabulary(out / VOCABULARY_FILE))
    assert len(names) == 1
