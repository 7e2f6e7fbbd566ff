"""Train on workers that are started through ssh, and end with the run; cluster/start.sh starts such that stay.

From the repository's folder, with `pip install asyncssh`; every host has the same Python environment at the same path,
daskgpt installed in it, and the folder of the certificate; ssh must not ask for a password:

    cluster/certificates.sh certificates
    export DASK_CONFIG=$PWD/certificates/dask.yaml
    python cluster/ssh.py node0 node1 node2      # the first host gets the scheduler, the others workers
"""

from __future__ import annotations

import argparse
import sys

from distributed import Client, SSHCluster

import daskgpt

WORKERS = 2  # processes of one thread, on each host

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("scheduler", help="host of the scheduler")
    parser.add_argument("workers", nargs="+", help="hosts of workers")
    hosts = parser.parse_args()
    with (
        SSHCluster(
            [hosts.scheduler, *hosts.workers],
            scheduler_options={"dashboard_address": "127.0.0.1:8787"},
            worker_options={"nthreads": 1, "n_workers": WORKERS, "dashboard_address": "127.0.0.1:0"},
            remote_python=sys.executable,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(WORKERS * len(hosts.workers), timeout=60)
        daskgpt.fit(daskgpt.preset("tiny"), client=client, run=daskgpt.RunConfig(steps=100, out="runs/ssh"))
