"""cluster/slurm.sh as a job of a real Slurm on this machine: skipped where Slurm is not installed (`slurm-wlm`)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from command_lines import PATIENCE
from test_cluster import ROOT, started, training, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
missing = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons are started as root"),
]
NODE = socket.gethostname().split(".")[0]
CONFIGURATION = """
ClusterName=here
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName={node} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment of a terminal that has a Slurm of one node; all of it ends with the tests."""
    folder = tmp_path_factory.mktemp("slurm")
    for name, mode in (("munge", 0o755), ("state", 0o755), ("spool", 0o755)):
        (folder / name).mkdir(mode=mode)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(node=NODE, ports=ports, folder=folder))
    own = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    own |= {"PATH": PATH, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--key-file={folder}/munge/key"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", NODE],
    ]
    with ExitStack() as running, (folder / "log").open("w") as log:
        for command in commands:
            running.enter_context(started(command, own, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((folder / "munge" / "socket").exists)
        wait_until(lambda: "idle" in said(own, "sinfo", "--noheader", "--format=%T"))
        yield own


def said(environment, *command, cwd=None):
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    return done.stdout


def test_a_job_that_is_stopped_queues_again_and_ends_with_the_same_model(slurm, tmp_path):
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    flags = training(text, "threads", "out", 60)[5:]  # behind the scheduler
    flags = [flag for flag in flags if flag not in ("--out", "out")]
    job = said(slurm, "sbatch", "--parsable", "--ntasks=2", "cluster/slurm.sh", *flags, cwd=tmp_path).strip()
    run, log = tmp_path / "runs" / f"slurm-{job}", tmp_path / f"slurm-{job}.out"
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    said(slurm, "scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: said(slurm, "squeue", "--noheader", "--format=%T").strip() == "PENDING")
    assert "stopped after " in log.read_text()
    said(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: said(slurm, "squeue", "--noheader", "--format=%T").strip() == "")
    assert f"resumed    runs/slurm-{job}/step-" in log.read_text()
    assert "scheduler  cluster at file:" in log.read_text()
    assert not Path(f"{run}-cluster").exists(), "its certificate is gone with the job"
    here = subprocess.run(training(text, "threads", tmp_path / "here", 60), env=slurm, capture_output=True, text=True)
    assert here.returncode == 0, here.stderr
    models = [path / "latest" / "model.safetensors" for path in (run, tmp_path / "here")]
    assert len({sha256(path.read_bytes()).hexdigest() for path in models}) == 1
