"""Tests of cluster/slurm.sh as a job of a real Slurm of one node on this machine (`slurm-wlm`)."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_lines import PATIENCE, run, write_text
from machines import ROOT, started, terminal, wait_until
from small_runs import FLAGS, tensors_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
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
AuthInfo=socket={tmp_path}/munge/socket
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName={node} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What of this machine prevents a Slurm, empty if nothing does."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    return f"not installed: {', '.join(absent)}" if absent else ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def slurm(tmp_path):
    """Environment of a terminal that has a Slurm of one node, whose daemons end with the test."""
    for name in ("munge", "state", "spool"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "munge" / "key").write_bytes(os.urandom(128))
    (tmp_path / "munge" / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [listener.getsockname()[1] for listener in (one, two)]
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(node=NODE, ports=ports, tmp_path=tmp_path))
    environment = terminal(PATH=PATH, SLURM_CONF=str(tmp_path / "slurm.conf"))
    munge = [f"--{name}={tmp_path}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--key-file={tmp_path}/munge/key"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", NODE],
    ]
    with ExitStack() as running, (tmp_path / "log").open("w") as log:
        for command in commands:
            running.enter_context(started(command, environment, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((tmp_path / "munge" / "socket").exists, "munged")
        wait_until(lambda: "idle" in said(environment, "sinfo", "--noheader", "--format=%T"), "the node")
        running.callback(said, environment, "scancel", "--full", "--signal=KILL", "--user=root")
        yield environment


def said(environment, *command, cwd=None):
    """What a command prints."""
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    return done.stdout.strip()


def test_stopped_job_requeues_and_trains_the_same_model(slurm, tmp_path):
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    # A window of steps on a cluster ends at each recovery point, however fast the machine is.
    flags = [*FLAGS.split(), "--steps", "600", "--snapshot-every", "20", "--data", str(write_text(tmp_path))]
    job = said(slurm, "sbatch", "--parsable", "--ntasks=2", "cluster/slurm.sh", *flags, cwd=tmp_path)
    out, log = tmp_path / "runs" / f"slurm-{job}", tmp_path / f"slurm-{job}.out"
    metrics, queue = out / "metrics.jsonl", ("squeue", "--noheader", "--format=%T")
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "steps")
    said(slurm, "scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: said(slurm, *queue) == "PENDING", "the job that queues again")
    assert "stopped after " in log.read_text()
    said(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: not said(slurm, *queue), "the end of the job")
    assert f"resumed    runs/slurm-{job}/step-" in log.read_text()
    assert "scheduler  cluster at tls://127.0.0.1:" in log.read_text()
    assert not Path(f"{out}-cluster").exists(), "its certificate is gone with the job"
    done = run("train", *flags, "--scheduler", "threads", "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert tensors_of(out) == tensors_of(tmp_path / "here")
