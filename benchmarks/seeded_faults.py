"""Seed faults into a copy of the package, one at a time, and run the quick tests on each.

`python benchmarks/seeded_faults.py --seed 1 --faults 60 --record benchmarks/seeded_faults.jsonl`

A fault is one of five kinds at a random place: a comparison reversed, a term dropped, an integer off by one, a missing
wait, two arguments swapped. The kinds take turns; the place depends on the seed and the fault's number alone, for the
same sources. Each fault is one line of JSON: commit, place, the text before and after, the first test that failed, and
the seconds until it did. The test files that mention the changed module run first, then all others (`--ring near`
leaves these out). A test that takes more than `--hang` seconds is ended and counts as failed.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import psutil

ROOT = Path(__file__).parents[1]
TURNED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# Tests of each folder of the package, which run after those that mention the changed module.
NEAR = {
    "config": "flags wrong_arguments command_lines start",
    "data": "data_dataset data_encodings data_source pairs prepare tokenizers",
    "formats": (
        "formats_huggingface formats_run_model formats_gguf formats_llama convert fuzz data_dataset data_encodings "
        "tokenizers prepare"
    ),
    "generation": "generating sampling evaluate readable model_choices",
    "graph": "grain chunks groups clipping one_number distribute timeline",
    "kernels": "kernels_layers kernels_optimizers kernels_attention kernels_products kernels_vectors layers",
    "kernels/bfloat16": "kernels_bfloat16",
    "kernels/decoding": "generating sampling model_choices",
    "model": "model layers model_choices dropout schedules one_number",
    "profiling": "study timeline notebooks bench measurements dashboard plot layers",
    "schedulers": "schedulers cluster distribute bench",
    "training": "checkpoints resume run_folder schedules wrong_arguments cluster stopping logs command_lines start "
    "audit rewind",
}
WAITS = {"wait", "join", "result", "acquire", "release", "wait_for", "barrier", "notify_all"}


@dataclass(frozen=True)
class Fault:
    """One change of the source: `before` at `line` of `file` becomes `after`."""

    kind: str
    file: str
    line: int
    before: str
    after: str
    start: int
    end: int

    def apply(self, source: str) -> str:
        """Return the source with the fault in it."""
        encoded = source.encode()
        return (encoded[: self.start] + self.after.encode() + encoded[self.end :]).decode()


def compared(node: ast.AST) -> Iterator[ast.AST]:
    """Turn one comparison: < becomes <=, == becomes !=."""
    if isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [TURNED[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def dropped(node: ast.AST) -> Iterator[ast.AST]:
    """Drop one term of a sum, a difference, a product, or a condition."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        yield node.left
        if not isinstance(node.op, ast.Sub):
            yield node.right
    elif isinstance(node, ast.BoolOp):
        for position in range(len(node.values)):
            rest = node.values[:position] + node.values[position + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    """Add one to an integer, or take one from it."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        if node.value > 0:
            yield ast.Constant(node.value - 1)


def unwaited(node: ast.AST) -> Iterator[ast.AST]:
    """Leave out a statement that waits, or that lets another thread continue."""
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in WAITS:
            yield ast.Pass()


def swapped(node: ast.AST) -> Iterator[ast.AST]:
    """Swap two neighboring arguments of a call; those of min and max may stand in any order."""
    if (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) not in ("min", "max")
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ):
        for at in range(len(node.args) - 1):
            first, second = node.args[at : at + 2]
            if ast.unparse(first) != ast.unparse(second):
                yield ast.Call(node.func, [*node.args[:at], second, first, *node.args[at + 2 :]], node.keywords)


KINDS = {
    "comparison": compared,
    "term": dropped,
    "off by one": off_by_one,
    "wait": unwaited,
    "arguments": swapped,
}


def places(package: Path) -> dict[str, list[Fault]]:
    """List every fault that could be seeded, by kind, in the order of files and lines."""
    faults: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        begins = [0]
        for line in source.encode().splitlines(keepends=True):
            begins.append(begins[-1] + len(line))
        for node in _running_code(ast.parse(source)):
            for kind, change in KINDS.items():
                for changed in change(node):
                    start = begins[node.lineno - 1] + node.col_offset
                    end = begins[node.end_lineno - 1] + node.end_col_offset
                    after = ast.unparse(changed)
                    if isinstance(changed, ast.BinOp | ast.BoolOp | ast.Compare):
                        after = f"({after})"
                    before = source.encode()[start:end].decode()
                    file = str(path.relative_to(package.parent))
                    faults[kind].append(Fault(kind, file, node.lineno, before, after, start, end))
    return faults


def _running_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotations, no docstrings, no text of f-strings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                if hasattr(node, "lineno"):
                    yield node
                yield from _running_code(node)


def chosen(package: Path, seed: int, numbers: Sequence[int]) -> dict[int, Fault]:
    """Return the faults of some numbers: kinds in turn as far as each has places, places at random, none twice."""
    by_kind = places(package)
    for kind, faults in by_kind.items():
        random.Random(f"{seed} {kind}").shuffle(faults)
    in_turn = [fault for turn in zip_longest(*by_kind.values()) for fault in turn if fault]
    return {number: in_turn[number] for number in numbers}


class Copy:
    """A copy of the repository, whose kernels are compiled once; a fault is in it for one run of the tests."""

    def __init__(self, folder: Path, hang: int, processes: str, ring: str) -> None:
        """processes   that share the tests out, as of pytest-xdist
        ring        "near" runs the test files that mention the changed module, "both" all others after them
        """
        self.folder, self.hang, self.processes, self.ring = folder, hang, processes, ring
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "NUMBA_CACHE_DIR": str(folder / "numba"),
        }

    def run_tests(self, *files: str) -> tuple[str, float]:
        """Run tests, all quick ones by default, until one fails: which, empty if none did, and the seconds."""
        begin = time.monotonic()
        flags = ["-x", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={self.hang}"]
        flags += [f"--basetemp={self.folder / 'temporary'}"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *flags,
                f"--numprocesses={self.processes}",
                "--max-worker-restart=0",
                *files,
            ],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        seconds = time.monotonic() - begin
        for process in psutil.process_iter(["cmdline"]):  # of a cluster that a test which was ended has left behind
            if any(str(self.folder) in word for word in process.info["cmdline"] or ()):
                process.kill()
        if done.returncode == 0:
            return "", seconds
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return (failure.group(1) if failure else done.stdout.strip().rpartition("\n")[2][:200]), seconds

    def near(self, file: str, most: int = 3) -> list[str]:
        """List the test files that mention a module of the package, most often first, then those of its folder."""
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        counts = Counter[str]()
        for path in (self.folder / "tests").glob("test_*.py"):
            text = path.read_text()
            said = 3 * text.count(module) + len(re.findall(rf"\b{module.rpartition('.')[2]}\b", text + path.stem[5:]))
            counts[path.stem] = said
        stems = [name for name, said in counts.most_common(most) if said]
        folders = sorted((name for name in NEAR if file.startswith(f"daskgpt/{name}/")), key=len, reverse=True)
        stems += [f"test_{name}" for folder in folders for name in NEAR[folder].split()]
        files = [f"tests/{name}.py" for name in dict.fromkeys(stems)]
        missing = [file for file in files if not (self.folder / file).exists()]  # pytest would fail without any fault
        assert not missing, f"NEAR names tests that are gone: {missing}"
        return files

    def with_fault(self, fault: Fault) -> tuple[str, float]:
        """Run the tests on the package with the fault, and take the fault out again."""
        path = self.folder / fault.file
        source, times = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_text(fault.apply(source))
        try:
            files = self.near(fault.file)
            failed, seconds = self.run_tests(*files)
            if not failed and self.ring != "near":
                failed, more = self.run_tests("tests", *(f"--ignore={name}" for name in files))
                seconds += more
            return failed, seconds
        finally:
            path.write_text(source)
            os.utime(path, ns=times)  # Numba's cache compares the time of the file


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=60, help="how many")
    parser.add_argument("--only", type=int, nargs="*", help="the faults of these numbers alone")
    parser.add_argument("--hang", type=int, default=100, help="seconds after which a test counts as failed")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at the same time, each in a copy")
    parser.add_argument("--processes", default="auto", help="that share the tests of a fault out; 0 = one process")
    text = "near: the test files that mention the changed module; both: all others after them"
    parser.add_argument("--ring", choices=("both", "near"), default="both", help=text)
    parser.add_argument("--unchecked", action="store_true", help="do not run all tests without a fault first")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--record", type=Path, help="a file of JSON lines, added to")
    arguments = parser.parse_args()
    numbers = arguments.only or range(arguments.faults)
    faults = chosen(ROOT / "daskgpt", arguments.seed, numbers)
    if arguments.list:
        for number, fault in faults.items():
            print(f"{number:3} {fault.kind:10} {fault.file}:{fault.line}  {fault.before!r} -> {fault.after!r}")
        return
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = head.stdout.strip()  # of the copies; the sources may change while faults are tried
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        made = [
            Copy(Path(folder) / str(job), arguments.hang, arguments.processes, arguments.ring)
            for job in range(arguments.jobs)
        ]
        if not arguments.unchecked:
            _check(made, pool)
        copies = SimpleQueue[Copy]()
        for copy in made:
            copies.put(copy)

        def tried(number: int) -> tuple[int, str, float]:
            copy = copies.get()
            failed, seconds = copy.with_fault(faults[number])
            copies.put(copy)
            return number, failed, seconds

        verdicts = []
        try:
            for running in as_completed([pool.submit(tried, number) for number in faults]):
                number, failed, seconds = running.result()
                verdicts.append((bool(failed), seconds))
                _report(arguments, commit, number, faults[number], failed, seconds)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only the faults that are being tried come to their end
    times_to_find = [seconds for hit, seconds in verdicts if hit]
    print(f"{len(times_to_find)} of {len(verdicts)} found, after {median(times_to_find or [0]):.0f} s in the median")


def _check(copies: Sequence[Copy], pool: ThreadPoolExecutor) -> None:
    """Run all tests without a fault, a share in each copy."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    shares = [tests[number :: len(copies)] for number in range(len(copies))]
    for failed, seconds in pool.map(lambda copy, share: copy.run_tests(*share), copies, shares):
        if failed:
            sys.exit(f"seeded_faults: the tests must pass without a fault; got failed={failed}. Mend it first.")
        print(f"no fault: passed in {seconds:.0f} s", flush=True)


def _report(arguments: Namespace, commit: str, number: int, fault: Fault, failed: str, seconds: float) -> None:
    """Print the verdict on a fault, and add it to the record."""
    verdict = "found" if failed else "MISSED"
    change = f"{fault.file}:{fault.line}  {fault.before!r} -> {fault.after!r}"
    print(f"{number:3} {verdict} after {seconds:.0f} s  {change}  {failed}", flush=True)
    if arguments.record:
        place = {name: value for name, value in asdict(fault).items() if name not in ("start", "end")}
        line = (
            {"commit": commit, "seed": arguments.seed, "number": number, "ring": arguments.ring}
            | place
            | {"failed": failed, "seconds": round(seconds)}
        )
        with arguments.record.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
