"""Audit a run: check its chain of digests, compute stretches between its checkpoints again, and compare.

A run has the same bits whatever the chunks, threads, workers and processor. So each stretch of steps that begins at a
checkpoint must lead to the stored losses, model and moments. Deleted checkpoints between two that exist are compared
by their digests. Nothing is written into the run's folder; a stretch needs room for two checkpoints among the
temporary files (TMPDIR).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, given_flags, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.config.settings import setting
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.training.audit import Audit
from daskgpt.training.job import compile_kernels
from daskgpt.training.replay import PlacesConfig

EPILOG = (
    "Exit codes: 0 = everything agrees; 1 = the chain or a stretch does not agree; 2 = the run cannot be audited here."
)


class AuditConfig(PlacesConfig):
    """Settings of an audit."""

    share: float = setting(1.0, "share of the stretches to compute again, drawn at random; 0 = only the chain", most=1)
    seed: int = setting(0, "seed of the draw")


def main(arguments: list[str]) -> int:
    """Print a line for each fault of the chain and for each stretch, and a verdict."""
    flags = Parser(prog="daskgpt.audit", description=__doc__, epilog=EPILOG)
    flags.add_argument("run", metavar="RUN", type=Path, help="run folder")
    values, options, dataflow = flags.read(arguments, AuditConfig, DataflowConfig)
    if options.share:
        require_scheduler(dataflow.scheduler)
    audit = Audit(values.run, given_flags(DataflowConfig, values), options.data, options.init)
    there = f"{number_of(len(audit.entries), 'entry', 'entries')}, {number_of(len(audit.folders), 'checkpoint')} here"
    print(f"chain {audit.head}: {there}")
    print("".join(f"FAULT {line}\n" for line in audit.faults), end="", flush=True)
    chosen, differ, computed = audit.chosen(options.share, options.seed), 0, 0
    jobs = [audit.job(entry) for stretch in chosen for entry in stretch[1:]]  # nothing is refused later on
    if others := audit.other_versions():
        print(f"versions {others}: bits may differ for this reason alone")
    if jobs:
        compile_kernels(jobs[0].precision, jobs[0].uses)
        with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
            for stretch in chosen:
                with TemporaryDirectory(prefix="daskgpt-audit-") as folder:
                    verdict = audit.compute(stretch, scheduler, Path(folder))
                    print(f"steps {stretch[0]['step'] + 1:,} to {stretch[-1]['step']:,} {verdict}", flush=True)
                    differ, computed = differ + verdict.differs, computed + (not verdict.unknown)
    rule, advice = "there must be a stretch that can be computed again", "Keep more checkpoints: --save-every, --keep."
    got = {"run": values.run, "checkpoints": len(audit.folders)}
    require(bool(computed or audit.faults or not options.share), "audit", rule, got, advice)
    failed = bool(differ or audit.faults)
    stretches = number_of(len(audit.stretches), "stretch", "stretches")
    what = f"{computed} of {stretches} computed again, {number_of(differ, 'differs', 'differ')}"
    uncovered = f"; {audit.uncovered}, and nothing vouches for them" if audit.uncovered else ""
    whole = "NOT AS WRITTEN" if failed else "as written"
    print(f"{whole}: {what}; the chain has {number_of(len(audit.faults), 'fault')}{uncovered}")
    return int(failed)


if __name__ == "__main__":
    run_command(main)
