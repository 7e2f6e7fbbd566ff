"""Tests of `bench` beside PyTorch, its DistributedDataParallel, and transformers: one model, and none stays behind."""

import json

import numpy as np
import pytest
from conftest import SMALL
from tolerances import TOLERANCES

from daskgpt import bench
from daskgpt.config.run import DataflowConfig
from daskgpt.instruments.compare.messages import TorchOptions
from daskgpt.instruments.compare.torch_process import Place, TorchSide
from daskgpt.instruments.measure import Steps
from daskgpt.schedulers.connect import open_scheduler

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'daskgpt[compare]'")
MODEL = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]
FEW = ["--steps", "2", "--warmup", "1", "--recorded", "1", "--json"]
JOB = bench.job_of(SMALL, bench.BenchConfig(batch_size=4, sequence_length=16), DataflowConfig(grain="block"))


def record_of(capsys, *flags):
    assert bench.main(list(flags)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("processes", "bf16"), [(1, False), (1, True), (2, False), (2, True), (4, False)])
def test_processes_together_train_what_threads_train(processes, bf16):
    with TorchSide(JOB, 3, 1, TorchOptions(bf16=bf16), [Place()] * processes) as torch:
        assert len(torch.run(10)) == len(torch.losses) == 10
        assert len(torch.cpu()) == processes
        assert torch.peak() > processes * 5e7
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(JOB, scheduler, 3)
        steps.run(10)
    np.testing.assert_allclose(torch.losses, steps.losses, **TOLERANCES["bfloat16 losses" if bf16 else "golden losses"])


def test_what_ends_while_others_wait_for_it_is_said():
    """The others give up, and are ended: the error names the first that did not answer."""
    with pytest.raises(ValueError, match="batch_size=4, processes=3"):
        TorchSide(JOB, 0, 1, TorchOptions(), [Place()] * 3)
    torch = TorchSide(JOB, 0, 1, TorchOptions(), [Place()] * 2)
    with torch:
        torch.run(1)
        torch.processes[1].process.kill()
        with pytest.raises(RuntimeError, match="exit code="):
            torch.run(1)
    assert all(process.process.poll() is not None for process in torch.processes)


@pytest.mark.parametrize("flags", [[], ["--apart"]])
def test_three_programs_in_turns(capsys, monkeypatch, flags):
    monkeypatch.setattr("daskgpt.instruments.compare.turns.DISTURBED", float("inf"))
    monkeypatch.setattr("daskgpt.instruments.compare.turns.LONGEST_TURN", 1.0)
    found = record_of(capsys, "--against", "torch-ddp", *MODEL, *FEW, *flags)
    assert (found["workers"], found["scheduler"], found["turns"]) == (2, "local", 2)
    loss = pytest.approx(found["theirs_first_loss"], TOLERANCES["golden losses"]["rtol"])
    assert found["cluster_first_loss"] == found["threads_first_loss"] == loss
    assert sum(share for name, share in found.items() if name.startswith("workers_")) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("other", ["torch", "transformers"])
def test_another_program_in_turns(capsys, other):
    pytest.importorskip(other)
    flags = ["--generation", "--positions", "40"] if other == "transformers" else []
    found = record_of(capsys, "--against", other, *MODEL, *flags, *FEW)
    assert other in found["against"].lower().replace("pytorch", "torch")
    assert found["theirs_ms"] > 0
