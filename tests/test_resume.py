"""A run that is gone on with: the same bits as one that was never stopped, in the same folder, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_lines import refused, run, write_text
from small_runs import FLAGS, MODEL, OPTIMIZER, STEPS, fit, losses_of, steps_in, stopping_at, tensors_of

import daskgpt
from daskgpt.training.run_folder import RunFolder

THREADS = {"scheduler": "threads", "threads": 2, "batch_chunk": 2, "sequence_chunk": 16}
CLUSTER = {"scheduler": "local", "threads": 2, "batch_chunk": 1, "sequence_chunk": 8}
SYNC = {"scheduler": "sync", "batch_chunk": 4, "sequence_chunk": 4, "grain": "kernel"}
OVERLAPPING = {"scheduler": "threads", "threads": 3, "batch_chunk": 2, "barrier": "none", "window": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that is not stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(text, out, dataflow=THREADS)
    return out


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """One that is, with two checkpoints."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    fit(text, out, save_every=5, on_step=stopping_at(7))
    return out


def test_on_step_ends_a_run_that_is_gone_on_with(text, whole, tmp_path):
    out, seen = tmp_path / "run", []

    def stop(step, metrics):
        seen.append(step)
        return step + 1 == 7

    result = fit(text, out, on_step=stop)
    assert result.stopped
    assert seen == list(range(7))
    assert steps_in(out) == [7]
    result = daskgpt.fit(resume=out, on_step=lambda step, metrics: "not True", quiet=True)
    assert not result.stopped
    assert losses_of(out) == losses_of(whole)
    assert tensors_of(out) == tensors_of(whole)


@pytest.fixture
def copy(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (THREADS, SYNC),
        (SYNC, THREADS),
        (OVERLAPPING, SYNC),
        (THREADS, OVERLAPPING),
        pytest.param(THREADS, CLUSTER, marks=pytest.mark.slow),
        pytest.param(CLUSTER, THREADS, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_under_other_dials_is_the_run_that_was_not_stopped(text, tmp_path, whole, first, then):
    out = tmp_path / "run"
    begun = fit(text, out, dataflow=first, save_every=6, on_step=stopping_at(6))
    assert begun.stopped
    result = daskgpt.fit(resume=out, dataflow=then, quiet=True)
    assert tensors_of(out) == tensors_of(whole)
    assert losses_of(out) == losses_of(whole) == result.losses
    assert (result.first, result.stopped, result.checkpoint) == (6, False, out / f"step-{STEPS:08}")
    assert math.isfinite(result.validation_loss)
    assert f"Result of {STEPS} steps ({STEPS - 6} of them now)" in repr(result)
    dataflow = tomllib.loads((out / "config.toml").read_text())["dataflow"]
    assert dataflow["scheduler"] == then["scheduler"]


@pytest.mark.parametrize(
    ("optimizer", "dataflow"),
    [
        (OPTIMIZER, {"precision": "bfloat16"}),
        ({"optimizer": "momentum", "warmup": 2}, {}),
        ({"optimizer": "muon", "warmup": 2}, {}),
    ],
    ids=["bfloat16", "momentum", "muon"],
)
def test_other_arithmetic_and_another_optimizer(text, tmp_path, optimizer, dataflow):
    fit(text, tmp_path / "whole", optimizer=optimizer, dataflow=dataflow)
    fit(text, tmp_path / "run", optimizer=optimizer, dataflow=dataflow, on_step=stopping_at(5))
    daskgpt.fit(resume=tmp_path / "run", dataflow={"batch_chunk": 1}, quiet=True)
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "whole")


def test_a_run_that_is_stopped_again_and_again(text, tmp_path, whole):
    fit(text, tmp_path / "run", on_step=stopping_at(2))
    for step in (3, 7):
        result = daskgpt.fit(resume=tmp_path / "run", on_step=stopping_at(step), quiet=True)
        assert (result.stopped, len(result.losses)) == (True, step)
    assert daskgpt.fit(resume=str(tmp_path / "run"), quiet=True).first == 7
    assert tensors_of(tmp_path / "run") == tensors_of(whole)
    assert losses_of(tmp_path / "run") == losses_of(whole)


def test_metrics_beyond_the_checkpoint_are_not_counted_twice(copy, whole):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 9.0}\n{"step": 8, "loss": 9.0}\n{"step": 9, "lo')
    shutil.rmtree(copy / "step-00000007")
    result = daskgpt.fit(resume=copy, quiet=True)
    assert result.first == 5
    assert losses_of(copy) == losses_of(whole) == result.losses


def test_metrics_that_are_gone_are_told(copy, whole, capfd):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]))
    result = daskgpt.fit(resume=copy)
    assert "metrics    2 of 7 steps are missing" in capfd.readouterr().out
    assert [math.isnan(loss) for loss in result.losses] == [False, False, True, True] + [False] * 8
    assert tensors_of(copy) == tensors_of(whole)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", lambda content: content[:-4], "model.safetensors has "),
        ("optimizer.safetensors", lambda content: content[:-9] + b"x" + content[-8:], "has another SHA-256"),
        ("optimizer.safetensors", None, "optimizer.safetensors cannot be read (No such file or directory)"),
        ("state.json", lambda content: content[:300], "state.json is no JSON"),
        (
            "state.json",
            lambda content: content.replace(b'"step": 7', b'"step": 8'),
            "state.json is not what was written",
        ),
        ("state.json", lambda content: b"", "state.json is no JSON"),
        ("state.json", None, "state.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_passed_over_and_kept(copy, whole, capfd, name, damage, said):
    folder = copy / "step-00000007"
    content = (folder / name).read_bytes()
    if damage:
        (folder / name).write_bytes(damage(content))
    else:
        (folder / name).unlink()
    result = daskgpt.fit(resume=copy, run={"save_every": 1, "keep": 1})
    assert result.first == 5
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if "is damaged" in line]
    assert line.startswith(f"checkpoint {folder} is damaged and passed over: ")
    assert said in line
    assert f"resumed    {copy / 'step-00000005'}: 5 of {STEPS} steps are done" in lines
    assert tensors_of(copy) == tensors_of(whole)
    assert steps_in(copy) == [STEPS]
    aside = copy / "step-00000007.damaged-1"
    assert {path.name for path in aside.iterdir()} == {path.name for path in folder.parent.glob("step-*12/*")} - (
        set() if damage else {name}
    )
    assert not damage or (aside / name).read_bytes() == damage(content)


def test_where_every_checkpoint_is_damaged(copy):
    for folder in copy.glob("step-*"):
        (folder / "state.json").write_text("{}")
    line = refused(run("train", "--resume", copy))
    assert line == (
        f"train: the run must have a good checkpoint; got resume={copy} (2 damaged); "
        f"checkpoint {copy / 'step-00000007'} is damaged and passed over: state.json is not what was written; "
        f"checkpoint {copy / 'step-00000005'} is damaged and passed over: state.json is not what was written. "
        "Nothing of it can be gone on with: start again with another --out."
    )
    assert steps_in(copy) == [5, 7]
    with pytest.raises(FileNotFoundError, match=r"All of its checkpoints are damaged: name another model, or start"):
        daskgpt.load(copy)


def test_a_run_without_a_checkpoint_is_refused(copy, tmp_path, whole):
    for folder in copy.glob("step-*"):
        shutil.rmtree(folder)
    line = refused(run("train", "--resume", copy))
    assert line == (
        f"train: the run must have a good checkpoint; got resume={copy} (none). "
        "It ended before its first: start again with another --out."
    )
    shutil.copy(whole / "latest" / "model.safetensors", copy)
    line = refused(run("train", "--resume", copy))
    assert line.endswith("An older version wrote it: start a new run from its model with --init.")
    for path in (tmp_path / "nowhere", tmp_path):
        line = refused(run("train", "--resume", path))
        assert line == (
            f"RunFolder: the folder must hold a run (config.toml and metrics.jsonl); got resume={path}. "
            "Check the path of --resume."
        )
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / ".lock").exists()


def test_a_finished_run_has_nothing_left(whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    line = refused(run("train", "--resume", whole))
    assert line == (
        f"train: the run must have steps left; got steps={STEPS}, resume={whole} ({STEPS} done). Give more --steps."
    )
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != ".lock")


LIST = (
    "May change: --learning-rate, --schedule, --warmup, --cooldown, --final-learning-rate, --clip, --skip-outliers, "
    "--scheduler, --threads, --batch-chunk, --sequence-chunk, --grain, --barrier, --window, --steps, --tokens, "
    "--minutes, --validate-every, --validation-batches, --sample-tokens, --sample-every, --save-every, --save-minutes, "
    "--keep, --keep-best, --keep-every, --snapshot-every, --worker-minutes, --worker-seconds, --log."
)


@pytest.mark.parametrize(
    ("flag", "value", "got"),
    [
        ("--batch-size", 8, "batch_size=8 (its own: 4)"),
        ("--seed", 1, "seed=1 (its own: 0)"),
        ("--precision", "bfloat16", "precision=bfloat16 (its own: float32)"),
        ("--optimizer", "momentum", "optimizer=momentum (its own: adamw)"),
        ("--weight-decay", 0.2, "weight_decay=0.2 (its own: 0.1)"),
        ("--blocks", 2, "blocks=2 (its own: 1)"),
        ("--preset", "gpt2", "preset=gpt2"),
        ("--data", "stdlib", "data=stdlib (its own: "),
    ],
)
def test_what_a_run_keeps_is_refused_with_a_list_of_what_may_change(copy, flag, value, got):
    line = refused(run("train", "--resume", copy, flag, value))
    assert line.startswith(f"train: --resume keeps the run's own settings; got {got}")
    assert line.endswith(f", resume={copy}. {LIST}")


def test_what_is_given_as_it_was_is_no_change(copy, text):
    same = ("--data", text, "--batch-size", 4, "--out", copy, "--encoding", "auto", "--precision", "auto")
    result = run("train", "--resume", copy, *same, cwd=copy.parent)
    assert result.returncode == 0, result.stderr


def test_the_same_configurations_with_resume_are_no_change(text, copy, whole):
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    result = daskgpt.fit(MODEL, data, OPTIMIZER, run=daskgpt.RunConfig(steps=STEPS), resume=copy, quiet=True)
    assert (result.first, len(result.losses)) == (7, STEPS)
    assert tensors_of(copy) == tensors_of(whole)


def test_only_a_run_folder_is_gone_on_with(copy):
    for path in (copy / "latest", copy / "step-00000005"):
        line = refused(run("train", "--resume", path))
        assert line == (
            f"train: --resume must name the folder of a run; got resume={path}. "
            "It goes on from the newest checkpoint there."
        )


def test_steps_and_learning_rate_may_change(copy, whole, stopped):
    daskgpt.fit(resume=copy, run={"steps": 15}, optimizer={"learning_rate": 1e-2}, quiet=True)
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert losses_of(copy)[:8] == losses_of(whole)[:8]  # the eighth is that of the checkpoint's parameters
    assert losses_of(copy)[8] != losses_of(whole)[8]
    assert len(records) == 15
    assert records[7]["learning_rate"] > 5e-3
    written = tomllib.loads((copy / "config.toml").read_text())
    assert (written["run"]["steps"], written["optimizer"]["learning_rate"]) == (15, 1e-2)
    # The next one takes them over.
    shutil.rmtree(copy / "step-00000015")
    assert len(daskgpt.fit(resume=copy, run=daskgpt.RunConfig(steps=16, save_every=5), quiet=True).losses) == 16


def test_a_run_folder_may_be_moved(copy, whole, tmp_path):
    copy.rename(tmp_path / "elsewhere")
    result = run("train", "--resume", "elsewhere", "--sample-tokens", 0, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "run written to elsewhere" in result.stdout
    assert f"{STEPS - 7} of {STEPS} steps in " in result.stdout
    assert tensors_of(tmp_path / "elsewhere") == tensors_of(whole)
    written = tomllib.loads((tmp_path / "elsewhere" / "config.toml").read_text())
    assert written["run"]["out"] == str(tmp_path / "elsewhere")


def test_a_run_folder_may_be_copied_by_what_follows_links(stopped, whole, tmp_path):
    copy = shutil.copytree(stopped, tmp_path / "run")
    assert (copy / "latest" / "state.json").is_file()
    assert not (copy / "latest").is_symlink()
    daskgpt.fit(resume=copy, quiet=True)
    assert tensors_of(copy) == tensors_of(whole)
    assert (copy / "latest.copy-1" / "state.json").is_file()


def test_data_that_have_changed_are_refused(text, tmp_path):
    other = shutil.copy(text, tmp_path / "text.txt")
    fit(other, tmp_path / "run", on_step=stopping_at(3))
    with Path(other).open("a") as file:
        file.write("one more line\n")
    with pytest.raises(ValueError, match="train: the data must be those that the run was trained on; got data="):
        daskgpt.fit(resume=tmp_path / "run", quiet=True)
    shutil.copy(text, other)
    daskgpt.fit(resume=tmp_path / "run", quiet=True)


def test_two_processes_do_not_train_one_run(copy, whole):
    script = (
        "import sys, time\nfrom daskgpt.training.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1], resumed=True)\nprint('held', flush=True)\ntime.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(copy)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        line = refused(run("train", "--resume", copy))
        assert line == (
            f"RunFolder: no other process must train this run; got resume={copy}, process={holder.pid}. "
            "Wait for its end, or stop it."
        )
        holder.kill()  # nobody has to clear a lock away
        holder.wait()
        daskgpt.fit(resume=copy, quiet=True)
    finally:
        holder.kill()
        holder.communicate()
    assert tensors_of(copy) == tensors_of(whole)


def test_a_run_is_held_while_it_trains(text, tmp_path):
    refusals = []

    def on_step(step, metrics):
        with pytest.raises(RuntimeError, match="no other process must train this run") as refusal:
            RunFolder(str(tmp_path / "run"), resumed=True)
        refusals.append(refusal)

    fit(text, tmp_path / "run", steps=2, on_step=on_step)
    assert len(refusals) == 2
    RunFolder(str(tmp_path / "run"), resumed=True).close()


def test_what_killed_processes_have_left_is_removed(copy, whole):
    for name in (".step-00000009.1-ab.tmp", ".step-00000003.1-ab.tmp"):
        (copy / name).mkdir()
        (copy / name / "model.safetensors").write_bytes(b"half")
    (copy / ".config.toml.1-ab.tmp").write_text("half")
    (copy / ".latest.1-ab.tmp").symlink_to("step-00000009")
    daskgpt.fit(resume=copy, quiet=True)
    assert not list(copy.glob(".*.tmp"))
    assert tensors_of(copy) == tensors_of(whole)


def test_another_unit_is_told(text, tmp_path):
    flags = (*FLAGS.split(), "--steps", 4, "--precision", "bfloat16", "--out", tmp_path / "run")
    result = run("train", "--data", text, *flags, DASKGPT_MATMUL="portable")
    assert result.returncode == 0, result.stderr
    state = tmp_path / "run" / "latest" / "state.json"
    assert json.loads(state.read_text())["arithmetic"] == {"precision": "bfloat16", "unit": "portable"}
    same = run("train", "--resume", tmp_path / "run", "--steps", 5, DASKGPT_MATMUL="portable")
    assert (same.returncode, "arithmetic" in same.stdout) == (0, False), same.stderr
    other = run("train", "--resume", tmp_path / "run", "--steps", 6, DASKGPT_MATMUL="avx512")
    if "the processor must have the unit" in other.stderr:
        pytest.skip("there is only one unit here")
    line = "arithmetic bfloat16 by portable -> bfloat16 by avx512: from here on other bits than there"
    assert line in other.stdout.splitlines()


def test_python_s_arguments_are_looked_at(copy):
    with pytest.raises(ValueError, match="fit: a run that is gone on with has its own parameters; got resume="):
        daskgpt.fit(resume=copy, parameters=daskgpt.initial_parameters(MODEL, 0))
    with pytest.raises(ValueError, match="fit: a new run must have the size of a model; got config=None"):
        daskgpt.fit()
    message = re.escape("train: --resume keeps the run's own settings; got channels=32 (its own: 16)")
    with pytest.raises(ValueError, match=message):
        daskgpt.fit(daskgpt.preset("tiny", blocks=1, heads=2, channels=32), resume=copy)
    result = daskgpt.fit(MODEL, resume=copy, data={"batch_size": 4}, quiet=True)
    assert len(result.losses) == STEPS
