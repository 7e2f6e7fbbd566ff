"""Give every flag of training odd values and check the response: `python benchmarks/odd_flags.py`.

Each value is one run of one step in a process. The run must succeed, or refuse the value in one line with exit code 2;
a refusal must come within `--seconds` after the import of the package.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from daskgpt import train

VALUES = ("0", "-1", "1000000000", "99999999999999999999999", "nan", "", "word")
SMALL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16 --warmup 1 --validation-batches 1"
SMALL += " --sample-tokens 0 --save-minutes 0 --steps 1 --scheduler sync"
LEFT_OUT = {"--help", "--plan"}  # they take no value
PATIENCE = 60  # seconds


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="in which a refusal must come")
    given = parser.parse_args()
    known = [name for action in train.parser()._actions for name in action.option_strings if name.startswith("--")]
    wrong = count = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        imports = _seconds([sys.executable, "-c", "import daskgpt.train"])
        for flag in [flag for flag in known if flag not in LEFT_OUT]:
            for value in VALUES:
                count += 1
                out = Path(folder) / f"run-{count}"
                command = [
                    sys.executable,
                    "-m",
                    "daskgpt.train",
                    *SMALL.split(),
                    "--data",
                    str(text),
                    "--out",
                    str(out),
                ]
                found = _answer([*command, f"{flag}={value}"], given.seconds + imports)
                if found:
                    wrong += 1
                    print(f"{flag}={value!r}: {found}", flush=True)
    print(f"{count} values, {wrong} not answered as they should be; the import takes {imports:.1f} s")
    sys.exit(bool(wrong))


def _seconds(command: list[str]) -> float:
    times = []
    for _ in range(3):
        begin = time.monotonic()
        subprocess.run(command, check=True)
        times.append(time.monotonic() - begin)
    return max(times)


def _answer(command: list[str], seconds: float) -> str:
    """Say what is wrong with the answer to a command; nothing where it is as it should be."""
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE} s"
    took = time.monotonic() - begin
    lines = [line for line in done.stderr.splitlines() if line]
    if done.returncode == 0:
        return ""
    if done.returncode != 2 or len(lines) != 1:
        return f"exit code {done.returncode}, {len(lines)} lines: {' / '.join(lines)[-300:]}"
    return f"refused after {took:.1f} s: {lines[0][:200]}" if took > seconds else ""


if __name__ == "__main__":
    main()
