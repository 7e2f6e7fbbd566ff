"""A worker that would compute other bits is refused: as a run begins, or as it comes to one that goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_lines import refused, run, write_text
from distributed import Client
from machines import Machines, wait_until
from small_runs import FLAGS, fit, losses_of

import daskgpt
from daskgpt.kernels.compilation import compile_all

RULE = "daskgpt: a worker must have the versions and the arithmetic of the run; got worker=tcp://127.0.0.1:"
ADVICE = "Start it in an equal environment."


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    compile_all(np.float32)  # or a command would say that it does
    with Machines(tmp_path_factory.mktemp("machines"), 1) as found:
        found.have(1)
        yield found


@pytest.mark.slow
def test_a_worker_of_other_sources_is_refused_as_a_run_begins(machines, tmp_path):
    """Another copy of the package, of the same version."""
    copy = tmp_path / "other" / "daskgpt"
    shutil.copytree(Path(daskgpt.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "kernels" / "add.py").open("a") as file:
        file.write("\n# another line\n")
    before = dict(machines.environment)
    machines.environment["PYTHONPATH"] = os.pathsep.join([str(copy.parent), before["PYTHONPATH"]])
    other = machines.start_worker()
    machines.environment = before
    try:
        machines.have(2)
        text = write_text(tmp_path)
        flags = ["--data", text, *FLAGS.split(), "--steps", 3, "--scheduler", machines.address]
        line = refused(run("train", *flags, "--out", tmp_path / "run"))
        assert line.startswith(RULE)
        assert line.endswith(ADVICE)
        assert f"daskgpt={daskgpt.__version__} (" in line
        assert "numpy" not in line
        assert not (tmp_path / "run").exists()
    finally:
        machines.kill(other)


def test_a_worker_of_another_arithmetic_does_not_join_a_run(machines, tmp_path):
    machines.have(1)
    text, joined = write_text(tmp_path), []

    def join(step, metrics):
        if step == 3:
            machines.environment["DASKGPT_BLAS"] = "numpy"
            joined.append(machines.start_worker())
            del machines.environment["DASKGPT_BLAS"]
            wait_until(lambda: joined[0] not in machines.alive(), "the worker's end")

    fit(text, tmp_path / "run", dataflow={"scheduler": machines.address}, on_step=join)
    assert len(losses_of(tmp_path / "run")) == 12
    said = machines.said()
    assert RULE in said
    assert f"float32 products=library (the run: fused). {ADVICE}" in said


@pytest.mark.slow
def test_when_the_run_is_over_every_worker_may_come(machines, tmp_path):
    machines.have(1)
    fit(write_text(tmp_path), tmp_path / "run", dataflow={"scheduler": machines.address})
    with Client(machines.address) as client:
        wait_until(lambda: not client.run_on_scheduler(_plugins), "the end of the run's admission")
    machines.environment["DASKGPT_BLAS"] = "numpy"
    other = machines.start_worker()
    del machines.environment["DASKGPT_BLAS"]
    machines.have(2)
    machines.kill(other)


def _plugins(dask_scheduler):
    """What of a run's admission is left."""
    return [name for name in [*dask_scheduler.worker_plugins, *dask_scheduler.plugins] if "admission" in name]
