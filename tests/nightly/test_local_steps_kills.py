"""Tests of local steps on a cluster that loses a worker at any of their tasks."""

import pytest
from distributed import Client
from machines import KillItself
from test_local_steps import same, train

from daskgpt.training import local_steps

STEPS = 30


@pytest.mark.parametrize("kind", ["inner.steps", "outer.step", "inner.end", "recovery.copy"])
def test_a_worker_that_is_killed_costs_no_bit(kind, cluster, small_text, tmp_path, monkeypatch):
    monkeypatch.setattr(local_steps, "TASK_SECONDS", 1e-3)  # several tasks a round, and recovery points inside of one
    train(small_text, tmp_path / "whole", steps=STEPS)
    cluster.have(3)
    plugin = KillItself(kind, 4, tmp_path / "killed")
    with Client(cluster.address) as client:
        client.register_plugin(plugin)
        try:
            train(small_text, tmp_path / "run", steps=STEPS, scheduler=cluster.address, snapshot_every=3, save_every=10)
        finally:
            client.unregister_worker_plugin(plugin.name)
    assert (tmp_path / "killed").exists(), "nobody was killed"
    assert same(tmp_path / "run", tmp_path / "whole")
