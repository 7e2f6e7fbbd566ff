"""How fast text becomes files of tokens, beside tiktoken alone: `python tests/prepare_rate.py --text FILE --turns 3`.

In turns, each in a process of its own: `daskgpt.prepare` of the text with Dask's threads, and tiktoken's
`encode_ordinary_batch` of the same text with as many, in documents of 1 MiB, 64 at a time, since its lists of Python's
numbers take 8 bytes a token and more. Of tiktoken only the encoding counts, of prepare all but the start of Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

TIKTOKEN = """
import json, sys, time
from daskgpt.data.encodings import get_encoding
path, encoding, threads = sys.argv[1], get_encoding(sys.argv[2]), int(sys.argv[3])
text = open(path, encoding="utf-8", newline="").read()
seconds, tokens = 0.0, 0
for start in range(0, len(text), 2**26):
    documents = [text[low : low + 2**20] for low in range(start, min(start + 2**26, len(text)), 2**20)]
    begin = time.perf_counter()
    found = encoding.encode_ordinary_batch(documents, num_threads=threads)
    seconds += time.perf_counter() - begin
    tokens += sum(map(len, found))
print(json.dumps({"seconds": seconds, "tokens": tokens}))
"""

PREPARE = """
import json, resource, sys, time
begin = time.perf_counter()
from daskgpt.prepare import main
main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps({"seconds": time.perf_counter() - begin, "peak": peak}))
"""


def told(script: str, *arguments: object) -> dict[str, float]:
    """What a script says in its last line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text")
    parser.add_argument("--encoding", default="gpt2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    values = parser.parse_args()
    size = values.text.stat().st_size / 1e6
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        flags = ["--encoding", values.encoding, "--scheduler", "threads", "--threads", values.threads, "--out", out]
        ratios = []
        for turn in range(values.turns):
            alone = told(TIKTOKEN, values.text, values.encoding, values.threads)
            ours = told(PREPARE, values.text, *flags)
            shutil.rmtree(out)
            ratios.append(alone["seconds"] / ours["seconds"])
            print(
                f"turn {turn}: prepare {size / ours['seconds']:.2f} MB/s, tiktoken {size / alone['seconds']:.2f} MB/s, "
                f"ratio {ratios[-1]:.2f}, peak {ours['peak']:.2f} GB",
                flush=True,
            )
    print(f"median ratio {median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}), {time.strftime('%F')}")


if __name__ == "__main__":
    main()
