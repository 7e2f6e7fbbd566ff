"""Real clusters: started by hand as cluster/README.md says, and by cluster/start.sh."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
from chromium import PATH, visit
from command_lines import PATIENCE
from distributed import Client, get_task_stream

from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.cluster import BETWEEN_TASKS

ROOT = Path(__file__).parents[1]
START = ROOT / "cluster" / "start.sh"
README = ROOT / "cluster" / "README.md"
MODEL = "--blocks 2 --channels 32 --heads 2 --batch-size 4 --batch-chunk 2 --sequence-length 16 --sequence-chunk 8"
RUN = "--schedule constant --validate-every 0 --validation-batches 1 --sample-tokens 0"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What a terminal has: this Python first on the PATH, this checkout's package, a folder for temporary files."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TMPDIR": str(tmp_path_factory.mktemp("temporary")),
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Something to learn from."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(__file__).read_text())
    return path


def members(leader):
    """What still runs of a process and all that it started; what has ended and waits to be noticed does not count."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # ended meanwhile
    return found


@contextmanager
def started(command, environment, **options):
    """The process, of which nothing is left afterwards."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            for member in members(process.pid):
                member.kill()


def wait_until(holds, process=None):
    """What `holds` returns as soon as that is something."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := holds():
            return found
        assert process is None or process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.1)
    raise AssertionError(f"not within {PATIENCE} seconds")


def training(text, scheduler, out, steps):
    """The command line of a short run."""
    flags = [*shlex.split(f"{MODEL} {RUN}"), "--steps", str(steps), "--data", str(text), "--out", str(out)]
    return [sys.executable, "-m", "daskgpt.train", "--scheduler", scheduler, *flags]


def losses(text, scheduler, out, steps, environment, *flags):
    """Train, and read the losses back."""
    command = [*training(text, scheduler, out, steps), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def commands():
    """The command lines of the README's first section, in its order."""
    by_hand = README.read_text().split("## By hand")[1].split("\n## ")[0]
    return [shlex.split(block) for block in re.findall(r"```bash\n(.*)\n```", by_hand)]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory, environment):
    """Address and scheduler file of a scheduler and two workers, as in the README but for the port."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    scheduler, worker, _ = commands()
    with (
        (folder / "log").open("w") as log,
        started(
            [*scheduler, "--port", "0", "--scheduler-file", str(file)], environment, stdout=log, stderr=log
        ) as process,
    ):
        wait_until(lambda: file.exists() and file.stat().st_size, process)
        address = json.loads(file.read_text())["address"]
        worker = [address if word == "tcp://127.0.0.1:8786" else word for word in worker]
        with (
            started([*worker, "--local-directory", str(folder / "1")], environment, stdout=log, stderr=log) as first,
            started([*worker, "--local-directory", str(folder / "2")], environment, stdout=log, stderr=log) as second,
        ):
            wait_until(lambda: (folder / "log").read_text().count("Register worker") == 2, first)
            assert second.poll() is None
            yield address, file


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiled once, before many processes would do it at the same time."""
    compile_all(np.float32)


@pytest.fixture(scope="module", autouse=True)
def refused(kernels, tmp_path_factory, text, environment):
    """A run on a cluster that is not there, and its folder; begun first, for it waits ten seconds for an answer."""
    out = tmp_path_factory.mktemp("refused") / "run"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(training(text, "tcp://127.0.0.1:1", out, 2), environment, **pipes) as process:
        yield process, out


@pytest.fixture(scope="module")
def threads(tmp_path_factory, text, environment):
    """Losses of 20 steps under the threaded scheduler."""
    return losses(text, "threads", tmp_path_factory.mktemp("threads") / "run", 20, environment)


@pytest.mark.slow
def test_readme_starts_a_scheduler_a_worker_and_a_run():
    scheduler, worker, train = commands()
    assert scheduler[:2] == ["dask", "scheduler"]
    assert worker[:3] == ["dask", "worker", "tcp://127.0.0.1:8786"]
    assert worker[worker.index("--nthreads") + 1] == "1"
    assert train == ["python", "-m", "daskgpt.train", "--scheduler", "tcp://127.0.0.1:8786", "--steps", "100"]


def test_two_workers_give_the_bits_of_the_threaded_scheduler(by_hand, threads, text, environment, tmp_path):
    address, _ = by_hand
    with Client(address) as client, get_task_stream(client) as stream:
        assert losses(text, address, tmp_path / "run", 20, environment) == threads
    assert len({task["worker"] for task in stream.data}) == 2, "both workers had a part in it"
    assert len(set(threads)) == 20


REPORTED = """(() => {
    const names = Bokeh.documents.flatMap((d) => [...d._all_models.values()])
        .filter((m) => m.type === "ColumnDataSource" && m.data.name).flatMap((m) => [...m.data.name])
    return [...new Set(names)].join(" ")
})()"""


def test_dasks_own_report_speaks_of_layers_and_passes(by_hand, text, environment, tmp_path):
    address, _ = by_hand
    report = tmp_path / "report.html"
    flags = ["--grain", "kernel", "--performance-report", str(report)]
    losses(text, address, tmp_path / "run", 2, environment, *flags)
    page = report.read_text()
    for name in ("embedding.forward", "linear.forward", "attention.backward", "crossentropy.backward", "adamw"):
        assert name in page
    assert not re.search(r"<script[^>]+src=", page), "a page without network shows all of it"
    if PATH:
        found = visit(report, tmp_path / "profile", "!!(window.Bokeh && Bokeh.documents.length)", (REPORTED,))
        asked = [url for url in found.requests if url.startswith("http")]
        assert all(url.endswith("favicon.ico") for url in asked), "nothing that the page needs"
        assert "attention.backward" in found.values[0]
        assert len(found.picture) > 20_000


def test_a_scheduler_file_names_the_cluster(by_hand, threads, text, environment, tmp_path):
    _, file = by_hand
    assert losses(text, f"file:{file}", tmp_path / "run", 3, environment) == threads[:3]


def test_processes_started_by_hand_listen_at_the_loopback_address_alone(by_hand, environment):
    listening = [
        connection.laddr.ip
        for process in psutil.process_iter()
        if _temporary_folder(process) == environment["TMPDIR"]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 6, "two addresses of each of three processes"
    assert set(listening) == {"127.0.0.1"}


def _temporary_folder(process):
    try:
        return process.environ().get("TMPDIR")
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return None  # not one of ours


def test_where_nobody_listens_one_line_is_said_and_nothing_made(refused):
    process, out = refused
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert re.fullmatch(
        r"open_scheduler: a Dask scheduler must answer; got scheduler=tcp://127\.0\.0\.1:1 \(.+\)\. "
        r"Start one with `dask scheduler` and check the address\.\n",
        said,
    )
    assert not out.exists()


@pytest.mark.slow
def test_a_scheduler_that_dies_ends_a_run_with_one_line(text, environment, tmp_path):
    file, out = tmp_path / "scheduler.json", tmp_path / "run"
    scheduler, worker, _ = commands()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    command = [*scheduler, "--port", "0", "--scheduler-file", str(file)]
    with started(command, environment, **quiet) as killed:
        wait_until(lambda: file.exists() and file.stat().st_size, killed)
        address = json.loads(file.read_text())["address"]
        worker = [address if word == "tcp://127.0.0.1:8786" else word for word in worker]
        with (
            started([*worker, "--local-directory", str(tmp_path / "1")], environment, **quiet),
            started(training(text, address, out, 100_000), environment, **pipes) as process,
        ):
            metrics = out / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, process)
            killed.kill()
            _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "Traceback" not in said
    assert re.fullmatch(
        r"ClusterScheduler: the scheduler must live until the end of a run; got \w+, nobody who knows where the "
        r"parameters are\. Start again: there is no checkpoint\.",
        said.splitlines()[-1],
    )
    assert sorted(path.name for path in out.iterdir()) == [".lock", "config.toml", "metrics.jsonl"]


@pytest.mark.slow
def test_two_runs_share_a_cluster_and_each_has_its_own_bits(by_hand, threads, text, environment, tmp_path):
    address, _ = by_hand
    outs = [tmp_path / str(number) for number in range(2)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with (
        started(training(text, address, outs[0], 20), environment, **pipes) as first,
        started(training(text, address, outs[1], 20), environment, **pipes) as second,
    ):
        for process in (first, second):
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
    for out in outs:
        assert [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()] == threads


@pytest.mark.slow
def test_script_starts_a_cluster_that_trains_and_leaves_nothing(threads, text, environment, tmp_path):
    file = tmp_path / "scheduler.json"
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [START, "--workers", "2", "--port", "0", "--scheduler-file", file]
    with started(command, environment | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        assert re.fullmatch(r"scheduler  tcp://127\.0\.0\.1:\d+\n", lines[0])
        assert lines[1] == "workers    2, of one thread each\n"
        assert re.fullmatch(r"dashboard  http://127\.0\.0\.1:\d+/status\n", lines[2])
        assert lines[3:] == [
            f"train      python -m daskgpt.train --scheduler file:{file}\n",
            "Ctrl-C stops the cluster.\n",
        ]
        assert losses(text, f"file:{file}", tmp_path / "run", 2, environment) == threads[:2]
        with Client(scheduler_file=str(file)) as client:
            for name, (_, own) in BETWEEN_TASKS.items():
                here = client.run_on_scheduler(dask.config.get, name)
                assert {here, *client.run(dask.config.get, name).values()} == {own}, name
        assert len(members(process.pid)) >= 5, "this script, a scheduler, a nanny, two workers"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert members(process.pid) == []
    assert not file.exists()
    assert list(folder.iterdir()) == []


def test_script_stops_in_the_middle_of_its_start(environment, tmp_path):
    with started([START, "--port", "0"], environment | {"TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: len(members(process.pid)) >= 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGINT
        assert members(process.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_script_says_so_when_the_workers_end(environment, tmp_path):
    command = [START, "--workers", "1", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, environment | {"TMPDIR": str(tmp_path)}, **pipes) as process:
        (worker,) = wait_until(lambda: [p for p in members(process.pid) if "worker" in p.cmdline()], process)
        worker.kill()
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert said.splitlines()[-1] == (
            "start.sh: the scheduler and all workers must keep running; the workers here ended. "
            "Read what it said above."
        )
        assert members(process.pid) == []


def test_script_says_so_when_a_worker_does_not_register(environment, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(2)\n")
    command = [START, "--workers", "1", "--port", "0", "--patience", "1"]
    late = environment | {"DASK_DISTRIBUTED__WORKER__PRELOAD": str(slow)}
    with started(command, late, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        shown, said = process.communicate(timeout=PATIENCE)
        assert (process.returncode, shown) == (1, "")
        assert "start.sh: all workers must register in 1 seconds; got 0 of 1. Try a longer --patience.\n" in said
        assert members(process.pid) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--wrokers 2", "start.sh: a flag must be known; got --wrokers. Try --help.\n"),
        ("--workers", "start.sh: --workers must have a value; got none. Try --help.\n"),
        ("--workers 0", "start.sh: --workers must be a positive number; got 0. Try --workers 2.\n"),
        ("--patience 1m", "start.sh: --patience must be whole seconds; got 1m. Try --patience 60.\n"),
        ("--port http", "start.sh: --port must be a number; got http. Try --port 8786.\n"),
        (
            f"--scheduler-file {README}",
            f"start.sh: --scheduler-file must be new; got {README}. Remove it if the cluster that wrote it is gone.\n",
        ),
        (
            "node1",
            "start.sh: node1 must be able to reach the scheduler; got --host 127.0.0.1. "
            "Give --host an address of this machine.\n",
        ),
        (
            "--port 99999",
            "start.sh: the scheduler must be able to listen; got --host 127.0.0.1 --port 99999 "
            "(bind(): port must be 0-65535.). "
            "Give --host an address of this machine, and a --port that is free (0 for any).\n",
        ),
    ],
)
def test_script_refuses_flags_in_one_line(flags, said, environment):
    done = subprocess.run(
        [START, *shlex.split(flags)], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_script_needs_a_python_with_dask(environment, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run([START], env=environment | {"PATH": path}, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr == (
        f"start.sh: Python must have Dask; got python={bare}. Activate the environment that daskgpt is installed in.\n"
    )


def test_script_shows_its_flags(environment):
    done = subprocess.run([START, "--help"], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    for flag in (
        "--workers N",
        "--port PORT",
        "--host ADDRESS",
        "--scheduler-file FILE",
        "--patience SECONDS",
        "HOST ...",
    ):
        assert flag in done.stdout
