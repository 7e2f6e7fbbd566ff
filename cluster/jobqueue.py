"""Train on workers that Slurm starts as jobs of their own, for as long as they live; more may be asked for at any time.

From the repository's folder, where `sbatch` works, with `pip install dask-jobqueue` (which has classes of the same kind
for PBS, LSF, SGE and HTCondor), and with a certificate, since other users can reach the workers:

    cluster/certificates.sh certificates
    export DASK_CONFIG=$PWD/certificates/dask.yaml
    python cluster/jobqueue.py
"""

from __future__ import annotations

from dask_jobqueue import SLURMCluster
from distributed import Client

import daskgpt

WORKERS = 2
JOB = {
    "cores": 1,  # threads of the one worker of a job
    "processes": 1,
    "memory": "4GB",
    "walltime": "01:00:00",
    # A worker leaves before Slurm ends its job, each at a time of its own, and hands on what it holds.
    "worker_extra_args": ["--lifetime", "55m", "--lifetime-stagger", "4m", "--dashboard-address", "127.0.0.1:0"],
    "scheduler_options": {"dashboard_address": "127.0.0.1:8787"},
    "protocol": "tls://",
}

if __name__ == "__main__":
    with SLURMCluster(**JOB) as cluster, Client(cluster) as client:
        cluster.scale(jobs=WORKERS)  # at any time, also while it trains
        client.wait_for_workers(WORKERS, timeout=600)
        run = daskgpt.RunConfig(steps=100, out="runs/jobqueue")
        daskgpt.fit(daskgpt.preset("tiny"), client=client, run=run)
