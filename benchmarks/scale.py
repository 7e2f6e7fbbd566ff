"""Measure scaling on this machine within some minutes: `benchmarks/scale.sh`, which needs no flags.

Steps of gpt2 (16 x 256 tokens) and of tiny (48 x 64) on 1, 2, 4 ... threads and workers up to all cores: barrier-free,
in PyTorch where it is installed, fork-join, on workers of one thread each, and as tasks with a barrier after each step.
Each run has a process of its own, on as many cores. What is most telling comes first, and a run that would end too
late is left out. Beside them, times that are predicted. `scale.json` has every run, `scale.png` speedups and
efficiencies.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from compare.pipes import TorchOptions
from compare.processes import TorchSide

import daskgpt
from daskgpt.config.files import write_file
from daskgpt.profiling import plots
from daskgpt.profiling.calibrate import Calibration, of_job
from daskgpt.profiling.measure import BenchConfig, job_of, origin
from daskgpt.profiling.simulate import engines_of, forecast
from daskgpt.schedulers.machine import on_cores, usable_cores
from daskgpt.study import flags_of, run_one, thread_counts
from daskgpt.training.job import Job, compile_kernels

BATCHES = {"tiny": (48, 64), "gpt2": (16, 256)}  # sequences and tokens
SHARES = {"tiny": 0.3, "gpt2": 1.0}  # of the remaining time
KINDS = {
    "barrier-free": {"barrier": "none", "scheduler": "threads"},
    "PyTorch": {},
    "fork-join": {"barrier": "layer", "grain": "kernel", "scheduler": "threads"},
    "workers": {"barrier": "step", "scheduler": "local"},
    "tasks": {"barrier": "step", "scheduler": "threads"},
    "predicted": {},
}
START = 4.0  # seconds of a process before its steps, as long as no run has told
# From which seconds of a step on there are so many steps of warm-up, and so many that are measured.
STEPS = {0.0: (3, 20), 0.5: (3, 3), 4.0: (1, 1)}


@dataclass
class Scaling:
    """The runs of a model.

    seconds   of a step, by kind and number of threads
    left_out  runs for which there was no time, or that failed
    """

    preset: str
    counts: Sequence[int]
    end: float
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    costs: Calibration | None = None  # of kernels, once they are timed
    start: float = START

    def measure(self) -> None:
        """Run everything that there is time for: the base of speedups, then many threads first."""
        first, *others, last = KINDS
        counts = sorted(self.counts, reverse=True)
        runs = [(first, n) for n in dict.fromkeys([counts[0], counts[-1], *counts])]
        runs += [(kind, n) for n in counts for kind in others]
        for kind, threads in [*runs, *((last, n) for n in counts)]:
            self._run(kind, threads)

    def _run(self, kind: str, threads: int) -> None:
        step = self._expected(threads)
        work = 1.2 * step * (2 if kind == "predicted" else sum(self._steps(threads)))
        begin = time.monotonic()
        why = "" if begin + self.start + work < self.end else "no time is left"
        if kind == "PyTorch" and not importlib.util.find_spec("torch"):
            why = "PyTorch is not installed"
        if not why:
            try:
                measure = {"PyTorch": self._torch, "predicted": self._predicted}.get(kind, self._ours)
                seconds = measure(threads, **KINDS[kind])
                if kind != "predicted":  # which has no process, and times kernels
                    self.start = max(self.start, time.monotonic() - begin - seconds * sum(self._steps(threads)))
                self.seconds.setdefault(kind, {})[threads] = seconds
                print(f"{self.preset:5} {threads:3} threads  {kind:13} {seconds * 1e3:9,.1f} ms a step", flush=True)
                return
            except (RuntimeError, MemoryError) as error:
                why = str(error)
        self.left_out.append(f"{self.preset}, {kind}, {threads}: {why}")

    def _expected(self, threads: int) -> float:
        """Return the seconds of a step by the runs before; a second without one."""
        work = [seconds * n for times in self.seconds.values() for n, seconds in times.items()]
        return median(work) / threads if work else 1.0

    def _steps(self, threads: int) -> tuple[int, int]:
        """Return the steps of warm-up and the measured ones."""
        expected = self._expected(threads)
        return next(STEPS[least] for least in sorted(STEPS, reverse=True) if expected >= least)

    def _batch(self) -> dict[str, int]:
        return dict(zip(("batch_size", "sequence_length"), BATCHES[self.preset]))

    def _ours(self, threads: int, **dials: str) -> float:
        warmup, steps = self._steps(threads)
        flags = {"preset": self.preset, **self._batch(), "threads": threads, "steps": steps, "warmup": warmup}
        row = run_one(flags_of(flags | {"recorded": 1} | dials), threads)
        return float(row["figures"]["step"]["median"]) / 1e3

    def _torch(self, threads: int) -> float:
        warmup, steps = self._steps(threads)
        with on_cores(threads), TorchSide(self._job(), 0, threads, TorchOptions()) as torch:
            torch.run(warmup)
            return median(torch.run(steps))

    def _predicted(self, threads: int) -> float:
        job = self._job(barrier="none", scheduler="threads", threads=threads)
        self.costs = self.costs or of_job(job, (1, self._batch()["sequence_length"]), None)
        return forecast(job, engines_of(job), costs=self.costs).seconds

    def _job(self, **dials: Any) -> Job:
        return job_of(daskgpt.preset(self.preset), BenchConfig(**self._batch()), daskgpt.DataflowConfig(**dials))


def draw(scalings: Sequence[Scaling], where: str) -> Any:
    """Return a figure: for each model, speedups over its fastest run on one thread, and efficiencies.

    Without a run on one thread, the fewest threads there are count as ideal.
    """
    figure = plots.Figure(figsize=(10, 4 * len(scalings)))
    figure.suptitle(where)
    for row, scaling in zip(figure.subplots(len(scalings), 2, squeeze=False), scalings):
        ours = [times for kind, times in scaling.seconds.items() if kind not in ("PyTorch", "predicted")]
        fewest = min((n for times in ours for n in times), default=1)
        base = fewest * min((times[fewest] for times in ours if fewest in times), default=float("nan"))
        for number, (kind, times) in enumerate(scaling.seconds.items()):
            look = {"label": kind, "marker": "o^sDvPX"[number % 7], "linestyle": ":" if kind == "predicted" else "-"}
            counts = sorted(times)
            row[0].plot(counts, [base / times[n] for n in counts], **look)
            row[1].plot(counts, [100 * base / times[n] / n for n in counts], **look)
        row[0].plot(scaling.counts, scaling.counts, color="#bbbbbb", zorder=0)
        for axes, label in zip(row, ("speedup (gray: ideal)", "efficiency (%)")):
            axes.set(
                title=scaling.preset, xlabel="threads, or workers of one", ylabel=label, xscale="log", ylim=(0, None)
            )
            axes.set_xticks(scaling.counts, map(str, scaling.counts), minor=False)
            axes.minorticks_off()
        if scaling.seconds:
            row[0].legend(frameon=False)
    return figure


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--counts", help="numbers of threads, such as 1,2,4; default: powers of two and all cores")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--out", type=Path, default=Path("scale"), help="folder of scale.json and scale.png")
    values, begin = parser.parse_args(arguments), time.monotonic()
    end, cores = begin + 60 * values.minutes - 30, usable_cores()
    counts = [int(word) for word in values.counts.split(",")] if values.counts else thread_counts(cores)
    compile_kernels()
    scalings = []
    for preset in BATCHES:
        now = time.monotonic()
        scalings.append(Scaling(preset, counts, now + SHARES[preset] * (end - now)))
        scalings[-1].measure()
    values.out.mkdir(parents=True, exist_ok=True)
    made = origin()
    models = {one.preset: {"seconds a step": one.seconds, "left out": one.left_out} for one in scalings}
    text = json.dumps(made | {"cores": cores, "models": models}, indent=1) + "\n"
    write_file(values.out / "scale.json", text.encode(), "scale")
    where = f"{made['machine']['processor']}, {cores} cores, {made['date'][:10]}"
    with plots.style():
        write_file(values.out / "scale.png", plots.content(draw(scalings, where), "png"), "scale")
    print(f"{values.out}/scale.json and scale.png, {time.monotonic() - begin:.0f} s")
    for line in [line for one in scalings for line in one.left_out]:
        print(f"left out: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
