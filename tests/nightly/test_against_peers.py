"""Tests of steps beside PyTorch, its DistributedDataParallel, and transformers: one model, and none stays behind."""

from dataclasses import replace

import against
import numpy as np
import pytest
from compare.pipes import TorchOptions
from compare.processes import TorchSide
from conftest import SMALL
from records import read_records
from tolerances import TOLERANCES

from daskgpt.config.model import preset
from daskgpt.config.run import DataflowConfig
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.schedulers.opening import open_scheduler

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'daskgpt[test-peers]'")
MODEL = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]
FEW = ["--steps", "2", "--warmup", "1", "--recorded", "1"]
JOB = job_of(SMALL, BenchConfig(batch_size=4, sequence_length=16), DataflowConfig(grain="block"))


def record_of(tmp_path, *flags):
    assert against.main([*flags, "--record", str(tmp_path / "record")]) == 0
    (record,) = read_records(tmp_path / "record")
    return record, {name: figure.median for name, figure in record.figures.items()}


@pytest.mark.parametrize("rank", [0, 4], ids=["", "adapters"])
@pytest.mark.parametrize(("processes", "bf16"), [(1, False), (1, True), (2, False), (2, True), (4, False)])
def test_processes_and_threads_train_the_same_model(processes, bf16, rank):
    job = replace(JOB, config=replace(SMALL, lora=rank))
    with TorchSide(job, 3, 1, TorchOptions(bf16=bf16), processes) as torch:
        assert len(torch.run(10)) == len(torch.losses) == 10
        assert len(torch.cpu()) == processes
        assert torch.peak() > processes * 5e7
    with open_scheduler("threads", 2) as scheduler:
        steps = TimedEngine(job, scheduler, 3)
        steps.run(10)
    np.testing.assert_allclose(torch.losses, steps.losses, **TOLERANCES["bfloat16 losses" if bf16 else "golden losses"])


@pytest.mark.parametrize("choices", [{}, {"bias": "qkv", "head_size": 24}])
@pytest.mark.parametrize("name", ["smollm2-135m", "nanochat-d4"])
def test_llamas_train_as_in_pytorch(name, choices):
    sizes = {"blocks": 2, "heads": 6, "kv_heads": 2, "head_size": 16, "channels": 96, "hidden": 256, "vocabulary": 500}
    job = replace(JOB, config=preset(name, **sizes | {"padded_vocabulary": 0} | choices))
    with TorchSide(job, 3, 1, TorchOptions()) as torch, open_scheduler("threads", 2) as scheduler:
        torch.run(20)
        steps = TimedEngine(job, scheduler, 3)
        steps.run(20)
    np.testing.assert_allclose(torch.losses, steps.losses, **TOLERANCES["golden losses"])


def test_error_names_the_process_that_ended():
    """The others give up, and are ended: the error names the first that did not answer."""
    with pytest.raises(ValueError, match="batch_size=4, processes=3"):
        TorchSide(JOB, 0, 1, TorchOptions(), 3)
    torch = TorchSide(JOB, 0, 1, TorchOptions(), 2)
    with torch:
        torch.run(1)
        torch.processes[1].process.kill()
        with pytest.raises(RuntimeError, match="exit code="):
            torch.run(1)
    assert all(process.process.poll() is not None for process in torch.processes)


@pytest.mark.parametrize("flags", [[], ["--apart"]])
def test_three_programs_run_in_turns(tmp_path, monkeypatch, flags):
    monkeypatch.setattr("compare.turns.DISTURBED", float("inf"))
    monkeypatch.setattr("compare.programs.LONGEST_TURN", 1.0)
    record, figures = record_of(tmp_path, "torch-ddp", *MODEL, *FEW, *flags)
    assert (record.settings["scheduler"], record.figures["cluster"].n) == ("local", 2)
    loss = pytest.approx(figures["theirs_first_loss"], TOLERANCES["golden losses"]["rtol"])
    assert figures["cluster_first_loss"] == figures["threads_first_loss"] == loss
    assert sum(share for name, share in figures.items() if name.startswith("workers_")) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("other", ["torch", "transformers"])
def test_another_program_runs_in_turns(tmp_path, other):
    pytest.importorskip(other)
    flags = ["--positions", "40"] if other == "transformers" else []
    record, figures = record_of(tmp_path, other, *MODEL, *flags, *FEW)
    assert other in record.against.lower().replace("pytorch", "torch")
    assert figures["theirs"] > 0
