"""Tests of local steps on a cluster that loses a worker at any of their tasks."""

import pytest
from distributed import Client
from machines import KillInKernel, KillItself
from small_runs import same
from test_local_steps import train

from daskgpt.training import rank_steps

STEPS = 30


@pytest.mark.parametrize("kind", ["attention.forward", "rank.window", "state.rows", "recovery.copy"])
def test_killed_worker_changes_no_bit(kind, cluster, small_text, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_steps, "WINDOW_SECONDS", 1e-3)  # many windows a round
    train(small_text, tmp_path / "whole", steps=STEPS)
    cluster.have(3)
    plugin = (KillInKernel if kind == "attention.forward" else KillItself)(kind, 4, tmp_path / "killed")
    with Client(cluster.address) as client:
        client.register_plugin(plugin)
        try:
            train(small_text, tmp_path / "run", steps=STEPS, scheduler=cluster.address, snapshot_every=3, save_every=10)
        finally:
            client.unregister_worker_plugin(plugin.name)
    assert (tmp_path / "killed").exists(), "nobody was killed"
    assert same(tmp_path / "run", tmp_path / "whole")
