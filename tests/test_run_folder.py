"""The folder of a run: when it is written, what its files say, and what it refuses."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from command_lines import SMALL, refused, run, write_text

import daskgpt
from daskgpt.training.run_folder import RunFolder

MODEL = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, positions=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def fit(text, **settings):
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    dataflow = daskgpt.DataflowConfig(**settings.pop("dataflow", {}))
    run = daskgpt.RunConfig(**{"steps": 3, "validation_batches": 1} | settings)
    return daskgpt.fit(MODEL, data, dataflow=dataflow, run=run)


def test_a_folder_that_is_named_is_written_and_none_otherwise(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fit(text).checkpoint is None
    assert list(tmp_path.iterdir()) == []
    result = fit(text, out="named")
    assert result.checkpoint == Path("named/step-00000003")
    names = {".lock", "config.toml", "metrics.jsonl", "latest", "best", "step-00000003"}
    assert {path.name for path in Path("named").iterdir()} == names
    with pytest.raises(FileExistsError, match="RunFolder: the folder must not hold a run already; got out=named"):
        fit(text, out="named")


def test_the_command_line_names_a_folder_itself(text, tmp_path):
    result = run("train", "--data", text, *SMALL, "--steps", 1, "--sample-tokens", 0, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"\nrun written to runs/{folder.name}\n" in result.stdout
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["out"] == str(folder.resolve())


def test_the_configuration_is_what_was_used(text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    folder = tmp_path / "run"
    fit("text.txt", out=os.path.relpath(folder), dataflow={"precision": "auto"})
    written = tomllib.loads((folder / "config.toml").read_text())
    dataflow, data = written["dataflow"], written["data"]
    assert dataflow["grain"] in ("segment", "block", "chunk")
    assert dataflow["threads"] == len(os.sched_getaffinity(0))
    assert (dataflow["batch_chunk"], dataflow["sequence_chunk"]) == (4, 16)
    assert dataflow["precision"] == "float32"  # too few channels for auto to choose bfloat16
    assert data["encoding"] == "bytes"
    assert data["data"] == str(text.resolve())
    assert written["run"]["out"] == str(folder.resolve())
    assert written["model"]["padded_vocabulary"] == 257


def test_the_configuration_of_a_run_on_one_thread(text, tmp_path):
    fit(text, out=str(tmp_path / "sync"), dataflow={"scheduler": "sync", "grain": "kernel", "threads": 8})
    dataflow = tomllib.loads((tmp_path / "sync" / "config.toml").read_text())["dataflow"]
    assert (dataflow["scheduler"], dataflow["grain"], dataflow["threads"]) == ("sync", "kernel", 1)


def test_the_configuration_of_a_run_on_a_cluster(text, tmp_path):
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        path = tmp_path / "scheduler.json"
        path.write_text(json.dumps(cluster.scheduler.identity()))
        fit(text, out=str(tmp_path / "run"), dataflow={"scheduler": f"file:{path}", "threads": 7})
        dataflow = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["dataflow"]
        assert dataflow["scheduler"] == cluster.scheduler_address
        assert (dataflow["threads"], dataflow["grain"]) == (2, "chunk")


def test_names_that_toml_has_to_escape_come_back(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    names = {"a": 'quote " backslash \\ tab \t', "b": "\x7f delete, \u2028 line, 😀 beyond the first plane", "c": "ü"}
    folder.begin({"data": names})
    folder.close()
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))["data"] == names


def test_two_runs_into_one_folder(tmp_path):
    first, second = RunFolder(str(tmp_path / "run")), RunFolder(str(tmp_path / "run"))  # neither is written yet
    first.begin({"run": {"seed": 1}})
    with pytest.raises(FileExistsError, match="RunFolder: the folder must not hold a run already; got out="):
        second.begin({"run": {"seed": 2}})
    first.logs.log({"step": 0})
    first.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == {"run": {"seed": 1}}


@pytest.mark.parametrize("below", ["file", "file/run", "file/a/b"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(text, tmp_path, below):
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / below
    line = refused(run("train", "--data", text, *SMALL, "--steps", 1, "--out", out))
    assert line == (
        f"RunFolder: the path must be a folder or new; got out={out}. "
        f"{tmp_path / 'file'} is a file: give another --out."
    )


def test_data_that_cannot_be_read_is_refused(tmp_path):
    unreadable = Path("/proc/self/mem")  # a file that even root cannot read from its start
    if not unreadable.exists():
        pytest.skip("needs /proc")
    (tmp_path / "link.txt").symlink_to(unreadable)
    for source in (tmp_path / "link.txt", tmp_path):
        line = refused(run("train", "--data", source, *SMALL, "--out", tmp_path / "out"))
        assert line == (
            f"read_text: the file must be readable; got source={source}, file={tmp_path / 'link.txt'} "
            "(Input/output error). Check its permissions and its disk."
        )
    assert not (tmp_path / "out").exists()
