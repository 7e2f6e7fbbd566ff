"""Tests of cluster/slurm.sh as a job of a real Slurm on this machine (`slurm-wlm`)."""

from pathlib import Path

import pytest
from command_lines import run, write_text
from machines import ROOT, wait_until
from slurm_node import missing, said, slurm_node
from small_runs import FLAGS, tensors_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def slurm(tmp_path):
    with slurm_node(tmp_path) as environment:
        yield environment


def test_stopped_job_requeues_and_trains_the_same_model(slurm, tmp_path):
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    # A window of steps on a cluster ends at each recovery point, however fast the machine is.
    flags = [*FLAGS.split(), "--steps", "2000", "--snapshot-every", "20", "--data", str(write_text(tmp_path))]
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
    assert "scheduler  cluster at file:" in log.read_text()
    assert not Path(f"{out}-cluster").exists(), "its certificate is gone with the job"
    done = run("train", *flags, "--scheduler", "threads", "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert tensors_of(out) == tensors_of(tmp_path / "here")
