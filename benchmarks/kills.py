"""Kill a training process at random moments and resume it until it is done: `python benchmarks/kills.py --kills 50`.

A checkpoint is written after each step. After each kill the newest checkpoint must be good, and no file with a final
name may be incomplete; at the end model, moments and losses must be those of an undisturbed run. Half of the kills come
while steps run, the others at any moment after the start of the process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from daskgpt.audit import Audit
from daskgpt.training.checkpoint import STATE, checked_state, checkpoints, newest_good, step_folder

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from command_lines import PATIENCE, run, write_text
from small_runs import FLAGS, losses_of, steps_in, tensors_of

STEPS = 400
LIVES = ("--scheduler threads --threads 2", "--scheduler sync --batch-chunk 2", "--barrier none --window 3")


def kill_and_resume(folder: Path, kills: int, seed: int, steps: int = STEPS) -> str:
    """All of it; what was done, in words.

    Errors   AssertionError with the seed
    """
    text, draw = write_text(folder), random.Random(seed)
    common = ["--data", text, *FLAGS.split(), "--steps", steps, "--save-every", 1]
    common += ["--validate-every", 3]
    whole, out = folder / "whole", folder / "run"
    done = run("train", *common, "--out", whole)
    assert done.returncode == 0, done.stderr
    killed, started_anew, at = 0, 0, []
    while killed < kills:
        resuming = bool(checkpoints(out))
        if not resuming:
            shutil.rmtree(out, ignore_errors=True)
            started_anew += 1
        dials = draw.choice(LIVES).split()
        arguments = ["--resume", out, *dials] if resuming else [*common, "--out", out, *dials]
        if not _killed(out, arguments, draw):  # it was done before
            _check_done(out, whole, seed)
            shutil.rmtree(out)
            continue
        killed += 1
        at.append(_check(out, f"seed={seed}, kill {killed}"))
    if not checkpoints(out):
        shutil.rmtree(out, ignore_errors=True)
    last = run("train", *(["--resume", out] if checkpoints(out) else [*common, "--out", out]))
    assert last.returncode == 0, f"seed={seed}: {last.stderr}"
    _check_done(out, whole, seed)
    return (
        f"{killed} kills (seed {seed}), after steps {', '.join(map(str, at))}; begun {started_anew} times; "
        f"the model and its moments after {steps} steps are those of an undisturbed run"
    )


def _killed(out: Path, arguments: list[object], draw: random.Random) -> bool:
    """Start a process and kill it; False where it was done before."""
    command = [sys.executable, "-m", "daskgpt.train", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        if draw.random() < 0.5:
            before, end = steps_in(out), time.monotonic() + PATIENCE
            while steps_in(out) == before and process.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.2))
        else:
            time.sleep(draw.uniform(0, 4))
        done = process.poll() is not None
    finally:
        process.kill()
        said = process.communicate()[1]
    assert not done or process.returncode == 0, said
    return not done


def _check_done(out: Path, whole: Path, seed: int) -> None:
    """Compare a run that is done with an undisturbed one."""
    assert tensors_of(out) == tensors_of(whole), f"seed={seed}: other bits"
    assert losses_of(out) == losses_of(whole), f"seed={seed}: other losses"
    assert os.readlink(out / "best") == os.readlink(whole / "best"), f"seed={seed}: another best checkpoint"
    assert not list(out.glob(".*.tmp")), f"seed={seed}: leftovers"
    assert Audit(out, {}).faults == [], f"seed={seed}: a broken chain"


def _check(out: Path, where: str) -> int:
    """What a killed process has left: the step of its newest checkpoint, which must be good, as all others."""
    folders = checkpoints(out)
    if not folders:
        return 0
    said: list[str] = []
    newest = newest_good(out, said.append)
    assert newest is not None, where
    assert (said, newest[0]) == ([], folders[-1]), f"{where}: {said}"
    for folder in folders:
        assert checked_state(folder)["step"] == int(folder.name[5:]), where
    latest = out / "latest"
    # It follows the newest one, which a kill may prevent.
    assert not latest.is_symlink() or (latest / STATE).is_file(), where
    assert os.path.lexists(latest) or len(folders) == 1, where
    if best := newest[1].get("best"):  # it is there, although its name may be that of the one before
        assert checked_state(step_folder(out, best["step"]))["step"] == best["step"], where
    assert not (out / "best").is_symlink() or (out / "best" / STATE).is_file(), where
    return int(newest[1]["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0 = 40 a kill")
    values = parser.parse_args()
    print(f"seed {values.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(kill_and_resume(Path(folder), values.kills, values.seed, values.steps or 40 * values.kills))


if __name__ == "__main__":
    main()
