"""Compare local steps with synchronous ones.

`python benchmarks/replicas.py --replicas 1 2 4 8 --rounds 1 10 50 100 --steps 1000`

The same model is trained on the same batches, once with every step of one model (H = 1, synchronous, R = 1), and with
each number of replicas and of steps on their own; all see as many tokens. A line a run, as Markdown:

    validation      loss on held-out text at the end, nats a token, and how much more that is than synchronously
    bytes a step    that workers send each other, if each replica has a worker of its own: measured on a cluster of as
                    many processes on this machine over some rounds (H is scaled: a round sends the same bytes, however
                    long it is). Of synchronous steps, those of as many workers that share each step
    seconds         of the training run, whose tasks --scheduler and --threads run; only for what else the machine did

No bit of the losses depends on scheduler, threads or workers; seconds do. Other flags (`--preset`, `--blocks`, --data
...) are those of `daskgpt.train`, such as --blocks 6 --heads 6 --channels 384 --sequence-length 256.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributed import Client, LocalCluster
from records import Figure, add_record_flag, check_record, record

import daskgpt
from daskgpt.config.run import RunConfig
from daskgpt.schedulers.connect import borrowed_cluster
from daskgpt.train import job_of
from daskgpt.train import parser as flags_of_train
from daskgpt.training.job import Job
from daskgpt.training.start import first_state
from daskgpt.training.trainer import Observers, run_job

TOOL, SYNCHRONOUS = "benchmarks/replicas.py", "synchronous"
MEASURED = 3  # rounds, or synchronous steps, over which bytes are measured; one before them is not
SHORT = 2  # steps of such a round


def sent(job: Job, local: Mapping[str, Any], workers: int) -> float:
    """Bytes a round, or a synchronous step, that so many workers send each other."""
    length = SHORT if local else 1
    run = replace(job.run, steps=(1 + MEASURED) * length, validate_every=0, validation_batches=1, snapshot_every=0)
    own = replace(
        job, run=replace(run, out=""), local=daskgpt.LocalConfig(**local | ({"local_steps": SHORT} if local else {}))
    )
    counts: list[int] = []
    options = {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client, borrowed_cluster(client) as scheduler:

        def count(step: int, _metrics: Any) -> None:
            if step + 1 in (length, length * (1 + MEASURED)):
                counts.append(sum(client.run(_sent).values()))

        run_job(own, scheduler, first_state(own), Observers(count, quiet=True))
    return (counts[1] - counts[0]) / MEASURED


def _sent(dask_worker: Any) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)


def trained(job: Job, local: Mapping[str, Any]) -> Any:
    """What a run leads to."""
    return daskgpt.fit(job.config, job.data, job.optimizer, job.dataflow, job.run, local=local, quiet=True)


def main(arguments: list[str]) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="R")
    flags.add_argument("--rounds", type=int, nargs="+", default=[1, 10, 50, 100], help="H, steps of a round")
    add_record_flag(flags)
    flags.add_argument("--no-bytes", action="store_true", help="leave out the clusters on which bytes are measured")
    asked, others = flags.parse_known_args(arguments)
    check_record(asked.record)
    others = ["--batch-size", "16", "--steps", "1000", "--validate-every", "0", "--scheduler", "threads", *others]
    values = flags_of_train().parse_args(others)
    run = RunConfig(**{name: value for name, value in vars(values).items() if name in RunConfig.__dataclass_fields__})
    job = job_of(values, run, None)
    alone = trained(job, {})

    def tell(replicas: int, length: int, found: Any, a_step: float) -> None:
        """A line, and a record of it; length: 0 for synchronous steps."""
        more = f"{found.validation_loss / alone.validation_loss - 1:+.2%}" if length else ""
        cells = [replicas, length or SYNCHRONOUS, f"{found.validation_loss:.4f}", more, f"{a_step:,.0f}"]
        print(f"| {' | '.join(map(str, cells))} | {found.seconds:.1f} |", flush=True)
        figures = {"validation": Figure.single(found.validation_loss, "nats"), "run": Figure.single(found.seconds, "s")}
        if not math.isnan(a_step):
            figures["sent"] = Figure.single(a_step / 1e6, "MB a step")
        what = f"{replicas} replicas, " + (f"{length} local steps" if length else SYNCHRONOUS)
        own: dict[str, Any] = {
            "replicas": replicas,
            "round": length,
            "channels": job.config.channels,
            "blocks": job.config.blocks,
        }
        record(asked.record, TOOL, arguments, figures, what, **own)

    print(
        "| R | H | validation | against synchronous | bytes a step | seconds |\n|---|---|---|---|---|---|", flush=True
    )
    everybody = {count: math.nan if asked.no_bytes or count == 1 else sent(job, {}, count) for count in asked.replicas}
    for replicas in asked.replicas:
        tell(replicas, 0, alone, 0.0 if replicas == 1 else everybody[replicas])
        own = {"local_steps": SHORT, "replicas": replicas}
        a_round = 0.0 if replicas == 1 else math.nan if asked.no_bytes else sent(job, own, replicas)
        for length in asked.rounds:
            found = trained(job, {"local_steps": length, "replicas": replicas})
            tell(replicas, length, found, a_round / length)


if __name__ == "__main__":
    main(sys.argv[1:])
