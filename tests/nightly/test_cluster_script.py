"""Tests of cluster/: start.sh, certificates, and the commands of the containers."""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import suppress

import dask
import psutil
import pytest
from command_lines import PATIENCE, run
from distributed import Client
from machines import ROOT, session_of, started, terminal, wait_until
from small_runs import FLAGS, tensors_of

from daskgpt.schedulers.connect import BETWEEN_TASKS
from daskgpt.schedulers.local import ENVIRONMENT

FOLDER = ROOT / "cluster"
START, CERTIFICATES, SSH = FOLDER / "start.sh", FOLDER / "certificates.sh", FOLDER / "ssh.py"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """Settings of two clusters' members: each has a certificate, of which the other knows nothing."""
    folder = tmp_path_factory.mktemp("it's safe")
    for name in ("one", "two"):
        subprocess.run([CERTIFICATES, folder / name], check=True)
        assert stat.S_IMODE((folder / name / "key.pem").stat().st_mode) == 0o600
    return [{"DASK_CONFIG": str(folder / name / "dask.yaml")} for name in ("one", "two")]


@pytest.fixture(scope="module")
def tls(certified, tmp_path_factory):
    """Address of a cluster that the script has started with the first of the certificates."""
    file = tmp_path_factory.mktemp("cluster") / "scheduler.json"
    command = [START, "--workers", "2", "--port", "0", "--scheduler-file", file]
    with started(command, terminal(**certified[0]), stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: "Ctrl-C" in process.stdout.readline(), "the cluster")
        yield json.loads(file.read_text())["address"]


def train(text, scheduler, out, **environment):
    return run(
        "train", *FLAGS.split(), "--data", text, "--steps", 3, "--scheduler", scheduler, "--out", out, **environment
    )


def test_script_starts_a_cluster_that_trains_and_leaves_nothing(small_text, tmp_path):
    file, folder = tmp_path / "the scheduler.json", tmp_path / "temporary"
    folder.mkdir()
    command = [START, "--workers", "2", "--port=0", "--scheduler-file", file]
    with started(command, terminal(TMPDIR=str(folder)), stderr=subprocess.DEVNULL) as process:
        said = [process.stdout.readline() for _ in range(5)]  # the last one is "Ctrl-C stops the cluster."
        assert shlex.split(said[3])[-1] == f"file:{file}"
        runs = [train(small_text, where, tmp_path / where[:4]) for where in ("threads", f"file:{file}")]
        assert [done.returncode for done in runs] == [0, 0], runs
        assert tensors_of(tmp_path / "thre") == tensors_of(tmp_path / "file")
        with Client(scheduler_file=str(file)) as client:
            for name, (_, ours) in BETWEEN_TASKS.items():
                here = client.run_on_scheduler(dask.config.get, name)
                assert {here, *client.run(dask.config.get, name).values()} == {ours}, name
            heap = client.run(lambda: dict(os.environ))
        assert all(variables.items() >= ENVIRONMENT.items() for variables in heap.values())
        members = session_of(process.pid)
        assert len(members) >= 5, "this script, a scheduler, a nanny, two workers"
        listening = []
        for member in members:
            with suppress(psutil.NoSuchProcess):  # a process of the script's own that has ended meanwhile
                listening += [socket.laddr.ip for socket in member.net_connections() if socket.status == "LISTEN"]
        assert set(listening) == {"127.0.0.1"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert session_of(process.pid) == []
    assert not file.exists()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("way", "keyword"), [("killed", "workers here ended"), ("slow", "got 0 of 1")])
def test_script_fails_if_its_workers_end(way, keyword, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    variables = {"DASK_DISTRIBUTED__WORKER__PRELOAD": str(tmp_path / "slow.py")} if way == "slow" else {}
    command = [START, "--workers", "1", "--port", "0", "--patience", "1" if way == "slow" else "300"]
    with started(command, terminal(**variables)) as process:
        if way == "killed":
            (worker,) = wait_until(lambda: [p for p in session_of(process.pid) if "worker" in p.cmdline()], "a worker")
            worker.kill()
        assert keyword in process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 1
        assert session_of(process.pid) == []


@pytest.mark.parametrize(
    ("script", "flags", "keyword"),
    [
        (START, "--wrokers 2", "--wrokers"),
        (START, "--workers", "must have a value"),
        (START, "--workers 0", "positive"),
        (START, "--patience 1m", "whole seconds"),
        (START, "--port http", "must be a number"),
        (START, "--port=99999", "up to 65535"),
        (START, "--dashboard 127.0.0.1:99999", "address, and a port"),
        (START, "--dashboard [::1]:8787", "IPv4"),
        (START, "--host ::1:x", "must be able to listen"),
        (START, f"--scheduler-file {ROOT}", "must be new"),
        (START, "node1", "must be able to reach"),
        (START, "--scheduler-file none/x.json", "in a folder that can be written"),
        (START, "--host nobody.invalid", "must be able to listen"),
        (CERTIFICATES, "", "must be named"),
        (CERTIFICATES, "new soon", "positive"),
        (CERTIFICATES, "new 99999999999", "up to 99999"),
        (CERTIFICATES, ".", "must be new"),
        (SSH, "node0", "workers"),
        (CERTIFICATES, "/proc/new", "must be one that can be made"),
    ],
)
def test_scripts_refuse_bad_flags(script, flags, keyword, tmp_path):
    command = [*([sys.executable] if script == SSH else []), script, *shlex.split(flags)]
    done = subprocess.run(command, env=terminal(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert keyword in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("settings", "keyword"), [("a: [1", "must be readable"), (None, "must name a file")])
def test_script_refuses_unusable_settings(settings, keyword, tmp_path):
    path = tmp_path / "dask.yaml"
    if settings:
        path.write_text(settings)
    environment = terminal(DASK_CONFIG=str(path))
    done = subprocess.run([START], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert keyword in done.stderr


@needs_openssl
def test_slurm_job_ends_if_its_scheduler_does(tmp_path):
    (tmp_path / "cluster").symlink_to(FOLDER)
    for name in ("dask", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o700)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    env = terminal(PATH=path, SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_NTASKS="2")
    done = subprocess.run(["cluster/slurm.sh"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, list((tmp_path / "runs").iterdir())) == (1, [])
    assert "the scheduler must start" in done.stderr


@needs_openssl
@pytest.mark.parametrize(
    ("left", "flags", "folders"),
    [
        (None, "--out runs/slurm-1 --steps 5", 0),
        ("metrics.jsonl", "--out runs/slurm-1 --steps 5", 1),
        ("step-00000003/state.json", "--resume runs/slurm-1", 1),
    ],
)
def test_slurm_job_that_is_queued_again_begins_or_continues(left, flags, folders, tmp_path):
    (tmp_path / "cluster").symlink_to(FOLDER)
    said = {"dask": 'echo there >"$7"', "srun": "", "python": 'echo "$@"'}
    for name, code in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o700)
    if left:
        (tmp_path / "runs/slurm-1" / left).parent.mkdir(parents=True)
        (tmp_path / "runs/slurm-1" / left).touch()
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    env = terminal(PATH=path, SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_NTASKS="2")
    command = ["cluster/slurm.sh", "--steps", "5"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"scheduler.json {flags}")
    assert len(list((tmp_path / "runs").iterdir())) == folders
    assert (tmp_path / "runs/slurm-1").exists() == ("--resume" in flags)


@needs_openssl
def test_tls_trains_the_same_model(tls, certified, small_text, tmp_path):
    assert tls.startswith("tls://127.0.0.1:")
    for number, (scheduler, variables) in enumerate([("threads", {}), (tls, certified[0]), ("local", certified[0])]):
        done = train(small_text, scheduler, tmp_path / str(number), **variables)
        assert done.returncode == 0, done.stderr
        assert not {"warning", "handshake"} & {*done.stderr.split()}
    assert len({tensors_of(tmp_path / str(number)) for number in range(3)}) == 1


@needs_openssl
def test_client_without_certificate_is_refused(tls, certified, small_text, tmp_path):
    plain = tls.replace("tls://", "tcp://")
    for scheduler, variables, keyword in (
        (tls, {}, "ssl_context"),
        (tls, certified[1], "TLS certificate does not match"),
        (plain, {}, "TCP (closed)"),
        (plain, certified[0], "encryption required"),
    ):
        done = train(small_text, scheduler, tmp_path / "run", **variables)
        assert done.returncode == 2
        assert keyword in done.stderr
        assert not (tmp_path / "run").exists()
        command = ["dask", "worker", scheduler, "--host", "127.0.0.1", "--death-timeout", "3", "--no-dashboard"]
        if variables != certified[0]:
            env = terminal(**variables)
            done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode != 0
            assert "Registered to" not in done.stderr
