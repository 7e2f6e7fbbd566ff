"""A real Slurm (`slurm-wlm`) of one node on this machine, whose daemons end with the `with` statement."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from command_lines import PATIENCE
from machines import started, terminal, wait_until

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


def missing() -> str:
    """What of this machine prevents a Slurm, empty if nothing does."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def slurm_node(folder: Path) -> Iterator[dict[str, str]]:
    """Environment of a terminal that has a Slurm of one node; all of it ends with this."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [listener.getsockname()[1] for listener in (one, two)]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(node=NODE, ports=ports, folder=folder))
    environment = terminal(PATH=PATH, SLURM_CONF=str(folder / "slurm.conf"))
    munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--key-file={folder}/munge/key"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", NODE],
    ]
    with ExitStack() as running, (folder / "log").open("w") as log:
        for command in commands:
            running.enter_context(started(command, environment, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((folder / "munge" / "socket").exists, "munged")
        wait_until(lambda: "idle" in said(environment, "sinfo", "--noheader", "--format=%T"), "the node")
        yield environment


def said(environment: Mapping[str, str], *command: str, cwd: Path | None = None) -> str:
    """What a command prints."""
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    return done.stdout.strip()
