"""Time preparing tokens of a text beside tiktoken alone: `python benchmarks/prepare_rate.py --text FILE --turns 3`.

Two programs take turns, each in its own process: `daskgpt.prepare` of the text with Dask's threads, and tiktoken's
`encode_ordinary_batch` of the same text with as many, in documents of 1 MiB, 64 at a time, since its lists of Python
integers take at least 8 bytes per token. For tiktoken only the encoding counts, for prepare all but the start of
Python.

--gather BYTES first makes the text, unless it exists: the text files below --from (by default, this Python's packages),
each content once, in an order that does not follow folders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from records import Figure, add_record_flag, check_record, record

from daskgpt.config.settings import count
from daskgpt.profiling.measure import Spread

TIKTOKEN = """
import json, sys, time
from daskgpt.data.tokenizer import encoding_named, get_encoding
path, encoding, threads = sys.argv[1], get_encoding(encoding_named(sys.argv[2])), int(sys.argv[3])
seconds, tokens = 0.0, 0
with open(path, encoding="utf-8", newline="") as file:
    while text := file.read(2**26):
        documents = [text[low : low + 2**20] for low in range(0, len(text), 2**20)]
        begin = time.perf_counter()
        found = encoding.tiktoken.encode_ordinary_batch(documents, num_threads=threads)
        seconds += time.perf_counter() - begin
        tokens += sum(map(len, found))
        del found
print(json.dumps({"seconds": seconds, "tokens": tokens}))
"""

PREPARE = """
import json, resource, sys, time
begin = time.perf_counter()
from daskgpt.prepare import main
if __name__ == "__main__":
    main(sys.argv[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": time.perf_counter() - begin, "peak": peak}))
"""

TEXT = {".py", ".pyi", ".pyx", ".txt", ".md", ".rst", ".html", ".css", ".c", ".cpp", ".h", ".hpp", ".rs", ".po", ".tex"}
LONGEST, SHORTEST = 2**22, 2**8  # bytes of a file: what is longer is a table, what is shorter says nothing


def told(script: str, *arguments: object) -> dict[str, float]:
    """What a script says in its last line."""
    ended = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def gather(folders: list[Path], size: int, out: Path) -> int:
    """Write this many bytes of different documents, or all that exist; return the number of documents.

    Errors   ValueError if less than half is found
    """
    seen: set[bytes] = set()
    part = out.with_name(f"{out.name}.part")
    with part.open("wb") as file:
        for content in _documents(folders):
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                file.write(content + b"\n")
            if file.tell() >= size:
                break
        found = file.tell()
    if found < size / 2:
        raise ValueError(f"only {found:,} bytes of text below {', '.join(map(str, folders))}: name more with --from")
    part.rename(out)
    return len(seen)


def _documents(folders: list[Path]) -> Iterator[bytes]:
    """Contents of the files of text, folders mixed."""
    paths = {path for folder in folders for path in folder.rglob("*") if path.suffix in TEXT}
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        if not path.is_file() or not SHORTEST <= path.stat().st_size <= LONGEST:
            continue
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        yield content


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text")
    parser.add_argument("--gather", type=count, metavar="BYTES", help="make it of so many, such as 1000M")
    parser.add_argument("--from", dest="folders", type=Path, action="append", metavar="FOLDER", help="to gather from")
    parser.add_argument("--encoding", default="gpt2", help="gpt2, or the file of a learned vocabulary")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    add_record_flag(parser)
    values = parser.parse_args(arguments)
    check_record(values.record)
    if values.gather and not values.text.exists():
        documents = gather(values.folders or [Path(sysconfig.get_path("stdlib"))], values.gather, values.text)
        print(f"gathered {documents:,} documents", flush=True)
    size = values.text.stat().st_size / 1e6
    ours, theirs, peaks = [], [], []
    with tempfile.TemporaryDirectory(dir=values.text.absolute().parent) as place:
        folder = Path(place)
        flags = ["--encoding", values.encoding, "--scheduler", "threads", "--threads", values.threads]
        for turn in range(values.turns):
            shutil.rmtree(folder / "out", ignore_errors=True)
            alone = told(TIKTOKEN, values.text, values.encoding, values.threads)
            own = told(PREPARE, values.text, *flags, "--out", folder / "out")
            ours.append(size / own["seconds"])
            theirs.append(size / alone["seconds"])
            peaks.append(own["peak"])
            print(
                f"turn {turn}: prepare {ours[-1]:.2f} MB/s, tiktoken {theirs[-1]:.2f} MB/s, "
                f"ratio {ours[-1] / theirs[-1]:.2f}, peak {peaks[-1]:.2f} GB",
                flush=True,
            )
        ratios = Spread.of(a / b for a, b in zip(ours, theirs))
        ends = f"({min(ratios.values):.2f} .. {max(ratios.values):.2f})"
        print(f"{size:,.0f} MB: median ratio {ratios.median:.2f} {ends}", flush=True)
    figures = {"prepare": Figure.of(Spread.of(ours), "MB/s"), "tiktoken": Figure.of(Spread.of(theirs), "MB/s")}
    figures |= {"ratio": Figure.of(ratios, ""), "peak": Figure.of(Spread.of(peaks), "GB")}
    what = f"Text to tokens, {size:,.0f} MB, {values.threads} threads"
    record(values.record, "benchmarks/prepare_rate.py", arguments, figures, what, "tiktoken's encode_ordinary_batch")


if __name__ == "__main__":
    main(sys.argv[1:])
