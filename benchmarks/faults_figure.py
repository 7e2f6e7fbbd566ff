"""Draw the faults of a run by `benchmarks/faults.py`: `python benchmarks/faults_figure.py faults.jsonl --out
faults.png`.

Hosts are lanes, drawn while a worker there is alive: it is registered with the scheduler and undisturbed. Each fault is
a mark. Below is the loss of the newest step, second by second.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MARKS = {  # marker and color, which tell kinds apart without each other
    "kill": ("X", "#d55e00", "killed"),
    "terminate": ("v", "#e69f00", "terminated"),
    "stop": ("s", "#0072b2", "stopped"),
    "partition": ("D", "#cc79a7", "cut off"),
    "restart": ("^", "#009e73", "host restarted"),
}
LONGEST = 3.0  # seconds between two samples that count as one stretch


def draw(log: Path, out: Path) -> None:
    """The figure, as a PNG."""
    entries = [entry for entry in map(json.loads, log.read_text().splitlines()) if entry["time"] >= 0]
    samples = [entry for entry in entries if "alive" in entry]
    faults = [entry for entry in entries if entry.get("kind") in MARKS]
    figure, (lanes, loss) = pyplot.subplots(
        2, 1, figsize=(9, 4.2), sharex=True, height_ratios=(3, 2), constrained_layout=True
    )
    _lanes(lanes, samples, faults)
    minutes = [entry["time"] / 60 for entry in samples if entry["loss"] is not None]
    loss.plot(minutes, [entry["loss"] for entry in samples if entry["loss"] is not None], color="#333333", lw=0.9)
    for fault in faults:
        loss.axvline(fault["time"] / 60, color="#cccccc", lw=0.6, zorder=0)
    loss.set(xlabel="minutes", ylabel="training loss", xlim=(0, samples[-1]["time"] / 60))
    steps = samples[-1]["step"]
    lanes.set_title(f"{len(faults)} faults, {steps:,} steps", loc="left", fontsize=10)
    for axes in (lanes, loss):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


def _lanes(axes: Any, samples: list[dict[str, Any]], faults: list[dict[str, Any]]) -> None:
    hosts = sorted({host for entry in samples for host in entry["hosts"]} | {fault["host"] for fault in faults})
    for early, late in pairwise(samples):
        for host in early["hosts"] if late["time"] - early["time"] < LONGEST else ():
            left, width = early["time"] / 60, (late["time"] - early["time"]) / 60
            axes.barh(hosts.index(host), width, left=left, height=0.5, color="#bcd2e8", edgecolor="none")
    for kind, (marker, colour, name) in MARKS.items():
        own = [fault for fault in faults if fault["kind"] == kind]
        if own:
            x, y = [fault["time"] / 60 for fault in own], [hosts.index(fault["host"]) for fault in own]
            axes.scatter(x, y, marker=marker, color=colour, s=34, label=f"{name} ({len(own)})", zorder=3, linewidths=0)
    axes.set_yticks(range(len(hosts)), [f"worker {host}" for host in hosts])
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(MARKS), frameon=False, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path, help="of benchmarks/faults.py --namespaces")
    parser.add_argument("--out", type=Path, default=Path("faults.png"))
    values = parser.parse_args()
    draw(values.log, values.out)


if __name__ == "__main__":
    main()
