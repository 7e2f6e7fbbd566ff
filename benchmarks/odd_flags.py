"""Give every flag of training odd values and check the response: `python benchmarks/odd_flags.py`.

Each value is one run of one step in a process that is forked after the imports. The run must succeed, refuse the value
in one line within `--seconds` with exit code 2, train until it is ended (`--steps 1000000000`), or train until a number
is not finite (`--learning-rate 1000000000`).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from daskgpt import train
from daskgpt.config.flags import run_command

VALUES = ("0", "-1", "1000000000", "99999999999999999999999", "nan", "", "word")
SMALL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16 --warmup 1 --validation-batches 1"
SMALL += " --sample-tokens 0 --save-minutes 0 --steps 1 --scheduler sync"
LEFT_OUT = {"--help", "--plan"}  # they take no value
PATIENCE = 20  # seconds, after which a run is ended


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="in which a refusal must come")
    parser.add_argument("--verbose", action="store_true", help="print every response")
    given = parser.parse_args()
    flags = [name for action in train.parser()._actions for name in action.option_strings if name.startswith("--")]
    wrong, refused = 0, list[float]()
    cases = [f"{flag}={value}" for flag in flags if flag not in LEFT_OUT for value in VALUES]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        # The first run loads the kernels.
        for number, case in enumerate(["--seed=0", *cases]):
            code, lines, seconds = _run([*SMALL.split(), "--data=text.txt", f"--out=run-{number}", case])
            said = f"{case}: exit code {code} after {seconds:.1f} s: {' / '.join(lines)[-400:]}"
            right = code == 0 or (code is None and "loss" in Path("stdout").read_text() + "".join(lines))
            right = right or (code == 2 and "stay finite" in said)
            right = right or (code == 2 and len(lines) == 1 and seconds <= given.seconds)
            refused += [seconds] if code == 2 else []
            wrong += not right
            if given.verbose or not right:
                print(said if right else f"WRONG {said}", flush=True)
    print(f"{len(cases)} values, {len(refused)} refused in {max(refused):.1f} s at most, {wrong} with a wrong response")
    sys.exit(bool(wrong))


def _run(arguments: list[str]) -> tuple[int | None, list[str], float]:
    """Return exit code (None if there is none in time), the lines of stderr, and the seconds of a command."""
    begin = time.monotonic()
    with open("stderr", "w+") as errors, open("stdout", "w") as output:
        process = os.fork()
        if not process:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv[1:] = arguments
            try:
                run_command(train.main)
            except SystemExit as ended:
                os._exit(int(ended.code or 0))
            finally:
                os._exit(1)
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() - begin > PATIENCE:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
        errors.seek(0)
        return code, [line for line in errors.read().splitlines() if line], time.monotonic() - begin


if __name__ == "__main__":
    main()
