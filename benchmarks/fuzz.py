"""Read damaged model and token files of every format: `python benchmarks/fuzz.py --cases 10000`.

Each must give one clear line within 2 s of processor time and 200 MB, or the content of the file. The first case that
fails is minimized by Hypothesis and shown.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from fuzz_cases import FORMATS, Example, damaged

SECONDS = 2.0  # of processor time


def main() -> None:
    """Run all cases, a share for each format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    values = parser.parse_args()
    begin, total, slowest, before = time.perf_counter(), Counter[str](), 0.0, _peak()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(FORMATS):
            share = values.cases // len(FORMATS) + (number < values.cases % len(FORMATS))
            counts, seconds = _fuzz(name, Path(folder) / str(number), share, values.seed)
            print(f"{name:24} {counts['refused']:6} refused, {counts['read']:6} read as they are", flush=True)
            total += counts
            slowest = max(slowest, seconds)
    print(f"the slowest took {slowest * 1000:.0f} ms; the process grew by {(_peak() - before) / 1e6:.0f} MB at most")
    took = time.perf_counter() - begin
    print(f"{total.total()} cases: {total['refused']} refused, {total['read']} read as they are, in {took:.0f} s")


def _fuzz(name: str, folder: Path, cases: int, start: int) -> tuple[Counter[str], float]:
    example, counts, slowest = Example(name, folder), Counter[str](), 0.0

    def case(data: st.DataObject) -> None:
        nonlocal slowest
        file, content = data.draw(damaged(example.whole))
        begin = time.process_time()
        counts[example.check(file, content)] += 1
        seconds = time.process_time() - begin
        assert seconds < SECONDS, f"{seconds} s"
        slowest = max(slowest, seconds)

    while (done := counts.total()) < cases:  # one round may end before its number, where it finds nothing new
        number = min(1000, cases - done)
        options = settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(start + done)(options(given(st.data())(case)))()
    return counts, slowest


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
