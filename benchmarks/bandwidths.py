"""Training steps over slow networks: `python benchmarks/bandwidths.py --out bandwidths` (root on Linux, with PyTorch).

A scheduler and three workers of one thread each have their own host (network namespaces, `namespaces.py`). At each
limit of the hosts' links, three programs take turns: synchronous steps on the cluster, rounds of local steps (three
replicas), and steps of three processes of PyTorch's DistributedDataParallel (gloo). The log (JSON lines) has a line per
limit and model, from which a table and a figure are made in the given folder. --record adds them to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.pipes import Place, TorchOptions
from compare.processes import TorchSide
from compare.programs import check_losses, warm_up
from compare.turns import Turn, take_turns
from records import Figure, add_record_flag, check_record, figures_of, record

from daskgpt.config.model import preset
from daskgpt.config.run import DataflowConfig, LocalConfig
from daskgpt.model.parameters import RandomParameters
from daskgpt.profiling.measure import BenchConfig, Spread, Steps, job_of, random_batch
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.job import Job
from daskgpt.training.rank_steps import RankSteps

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from machines import Machines
from namespaces import Hosts

WORKERS = 3
ROUND = 50  # local steps
LINKS = {"": "no limit", "10gbit": "10 Gb/s", "1gbit": "1 Gb/s", "100mbit": "100 Mb/s"}  # by what tc takes
TOOL = "benchmarks/bandwidths.py"
# Preset or numbers, sequences and tokens of a batch: three workers have equal parts.
MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "tiny": ({}, 12, 64),
    "6x384": ({"blocks": 6, "heads": 6, "channels": 384}, 12, 128),
    "gpt2": ({}, 12, 256),
}


class Rounds:
    """Whole rounds of local steps, a replica a worker, as a program that takes turns."""

    def __init__(self, job: Job, scheduler: Scheduler, seed: int) -> None:
        local = LocalConfig(local_steps=ROUND, replicas=WORKERS)
        self.job = replace(job, local=local, run=replace(job.run, steps=10**6))
        self.steps, self.seed, self.losses = RankSteps(self.job, scheduler, lambda _: None), seed, list[float]()
        self.state = self.steps.initial(RandomParameters(job.config, seed))

    def run(self, count: int) -> list[float]:
        """Mean seconds a step of a round, however many steps are asked for."""
        start, end = time.perf_counter(), self.state.step + ROUND
        while (done := self.state.step) < end:
            steps = range(done, done + self.steps.together(done))
            batches = [random_batch(self.job, self.seed, step) for step in steps]
            outcomes, self.state = self.steps.run(self.state, batches)
            self.losses += [outcome.loss for outcome in outcomes]
        return [(time.perf_counter() - start) / ROUND]

    def cpu(self) -> Mapping[tuple[str, int], float]:
        """None: its processes are those that synchronous steps count."""
        return {}


def measured(machines: Machines, hosts: Hosts, name: str, turns: int) -> tuple[list[Turn], int]:
    """Turns of the programs, and how many steps one has."""
    numbers, size, length = MODELS[name]
    config = preset("gpt2" if name == "gpt2" else "tiny", **numbers | ({} if name == "gpt2" else {"positions": length}))
    dataflow = DataflowConfig(scheduler=machines.address)
    job = job_of(config, BenchConfig(batch_size=size, sequence_length=length), dataflow)
    places = [Place(tuple(hosts.command(host, [])), "eth0") for host in range(1, WORKERS + 1)]
    with open_scheduler(machines.address) as scheduler, TorchSide(job, 0, 1, TorchOptions(), places) as torch:
        steps, rounds = Steps(job, scheduler, 0), Rounds(job, scheduler, 0)
        for side in (steps, rounds, torch):
            side.run(1)
        check_losses((steps.losses[0], torch.losses[0]), "float32")
        check_losses((steps.losses[0], rounds.losses[0]), "float32")
        count = warm_up((steps, torch), 1)
        found = take_turns((steps, rounds, torch), turns, count)
    return found, count


def told(found: list[Turn], count: int, name: str, limit: str) -> dict[str, Any]:
    """One line of the log: milliseconds a step, median and quartiles, and tokens a second of the programs."""
    _, size, length = MODELS[name]
    line: dict[str, Any] = {"model": name, "limit": limit or "none", "turns": len(found), "steps_a_turn": count}
    for number, program in enumerate(PROGRAMS):
        low, middle, high = Spread.of(turn.means[number] for turn in found).quartiles
        line |= {f"{program}_ms": middle * 1e3, f"{program}_ms_q1": low * 1e3, f"{program}_ms_q3": high * 1e3}
        line[f"{program}_tokens_per_s"] = size * length / middle
    return line | {"others_cores": max(turn.others for turn in found)}


def figures(found: list[Turn]) -> dict[str, Figure]:
    """For a record."""
    times = {program: Spread.of(turn.means[n] for turn in found) for n, program in enumerate(PROGRAMS)}
    ratio = Spread.of(turn.means[0] / turn.means[-1] for turn in found)
    return {**figures_of(times, "ms", 1e3), "ratio": Figure.of(ratio, "")}


def table(lines: list[dict[str, Any]]) -> str:
    """In Markdown."""
    rows = [
        f"| model | link | {', ms a step | '.join(PROGRAMS.values())}, ms a step | daskgpt / DDP |",
        "|---" * 6 + "|",
    ]
    for line in lines:
        cells = [f"{line[f'{p}_ms']:,.0f} ({line[f'{p}_ms_q1']:,.0f} .. {line[f'{p}_ms_q3']:,.0f})" for p in PROGRAMS]
        ratio = line["cluster_ms"] / line["ddp_ms"]
        rows.append(f"| {line['model']} | {line['limit']} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(rows)


PROGRAMS = {"cluster": "daskgpt", "local": f"daskgpt, local steps (H = {ROUND})", "ddp": "PyTorch DDP"}


def figure(lines: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second by link, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(line["model"] for line in lines))
    _, panels = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.4), squeeze=False, layout="constrained")
    for panel, model in zip(panels[0], models):
        own = [line for line in lines if line["model"] == model]
        for program, label in PROGRAMS.items():
            links = [LINKS[line["limit"].removesuffix("none")] for line in own]
            panel.plot(links, [line[f"{program}_tokens_per_s"] for line in own], "o-", label=label)
        panel.set(title=model, xlabel="link of each host", yscale="log")
    panels[0][0].set_ylabel("tokens a second")
    panels[0][0].legend(frameon=False)
    pyplot.savefig(path, dpi=150)
    pyplot.close()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True, help="folder of log, table and figure")
    flags.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "6x384"])
    flags.add_argument("--turns", type=int, default=5)
    add_record_flag(flags)
    asked = flags.parse_args()
    check_record(asked.record)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and processes are ended then, as at Ctrl-C
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = []
    with (asked.out / "bandwidths.jsonl").open("w") as log, Hosts(WORKERS + 1) as hosts:
        for name in asked.models:
            for limit in LINKS:
                for host in range(hosts.count):
                    hosts.limit(host, limit)
                with tempfile.TemporaryDirectory() as folder, Machines(Path(folder), 0, hosts) as machines:
                    machines.have(WORKERS)
                    turns, count = measured(machines, hosts, name, asked.turns)
                lines.append(told(turns, count, name, limit))
                what = f"{name} on three hosts whose links have {LINKS[limit]}"
                own = {"model": name, "link": LINKS[limit]}
                record(asked.record, TOOL, sys.argv[1:], figures(turns), what, "PyTorch's DDP", **own)
                log.write(json.dumps(lines[-1]) + "\n")
                log.flush()
                print(json.dumps(lines[-1]), flush=True)
    (asked.out / "bandwidths.md").write_text(table(lines) + "\n")
    figure(lines, asked.out / "bandwidths.png")


if __name__ == "__main__":
    main()
