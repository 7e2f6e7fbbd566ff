"""Inject faults into small runs and audit each: `python benchmarks/audit_faults.py --faults 200`.

Kinds take turns, and the rest is drawn. Some faults happen while a run trains: a bit flips in a weight or in a moment,
one step has another learning rate, or another batch. Others are edits of a run that was honest: of a checkpoint with
all digests in its state.json, of a loss, a line of the chain, a setting. "Forged" means that every digest and link of
the run was written anew afterwards. A fault without a trace is one after which the run has the same losses and
checkpoints as without: rounding has absorbed it. Audits of the honest run, with random dials, must find nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from daskgpt.audit import Audit, Verdict
from daskgpt.config.files import digest_of
from daskgpt.data.dataset import BatchLoader
from daskgpt.formats.safetensors import MODEL, TensorFiles, open_run_model, tensor_path
from daskgpt.model import step
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.checkpoint import DIGEST, OPTIMIZER, STATE, checkpoints, step_folder
from daskgpt.training.engine import LocalEngine
from daskgpt.training.logs import CHAIN, LINK, METRICS

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from command_lines import write_text
from small_runs import STEPS, fit, losses_of

EVERY, DELETED = 3, 6  # steps between checkpoints; the one that is not there any more
BITS = (*range(24), 31)  # of a number in memory: a flip keeps it finite


@dataclass
class Found:
    """What an audit says of a fault.

    trace     whether the run differs from the honest one
    chain     faults of the chain
    verdicts  of all stretches
    right     whether only stretches with the changed step or checkpoint differ, and the changed tensor, or the line of
              the chain, is named; None if there is no place to name
    lag       steps from the fault to the first loss that differs; None if none does
    """

    trace: bool
    chain: list[str]
    verdicts: list[Verdict]
    right: bool | None
    lag: int | None = None

    @property
    def found(self) -> bool:
        """Whether the audit fails."""
        return bool(self.chain) or any(verdict.differs for verdict in self.verdicts)


def honest(text: Path, out: Path) -> Path:
    """Make a run with a deleted checkpoint."""
    fit(text, out, save_every=EVERY, keep=99, dataflow={"scheduler": "sync"})
    shutil.rmtree(step_folder(out, DELETED))
    return out


# Faults while a run trains


@contextmanager
def flipped(kind: str, at: int, draw: random.Random) -> Iterator[None]:
    """Flip a bit of the state after a step; kind: "weight", "m" or "v"."""
    made = LocalEngine.run

    def run(self: Any, *arguments: Any) -> Any:
        outcomes = made(self, *arguments)
        if self.made == at + 1:
            arrays = self.state().layout.unpack(self.state().packs)
            name = draw.choice(sorted(name for name in arrays if name.startswith(f"{kind}.")))
            values = arrays[name].reshape(-1).view(np.uint32)
            values[draw.randrange(values.size)] ^= np.uint32(1 << draw.choice(BITS))
        return outcomes

    with patch.object(LocalEngine, "run", run):
        yield


def other_rate(at: int, draw: random.Random) -> AbstractContextManager[Any]:
    """Change the learning rate of a step by up to a tenth."""
    row_of, factor = step.optimizer_of, 1 + draw.choice((-1, 1)) * 10 ** draw.uniform(-4, -1)

    def optimizer_of(name: str) -> Any:
        row = row_of(name)

        def hyper(config: Any, number: int, steps: int) -> Any:
            rate = config.learning_rate * (factor if number == at else 1)
            return row.hyper(replace(config, learning_rate=rate), number, steps)

        return replace(row, hyper=hyper)

    return patch.object(step, "optimizer_of", optimizer_of)


def other_batch(at: int, draw: random.Random) -> AbstractContextManager[Any]:
    """Give a step the batch of another one."""
    other = draw.choice([number for number in range(STEPS) if number != at])

    def read(self: Any, numbers: Any) -> Any:
        return [self.make(step=other if number == at else number) for number in numbers]

    return patch.object(BatchLoader, "_read", read)


WHILE_TRAINING: dict[str, Callable[[int, random.Random], AbstractContextManager[Any]]] = {
    "weight in memory": lambda at, draw: flipped("weight", at, draw),
    "moment in memory": lambda at, draw: flipped(draw.choice("mv"), at, draw),
    "learning rate of a step": other_rate,
    "batch of a step": other_batch,
}


# Edits of a run


def flip_in_file(folder: Path, name: str, draw: random.Random) -> str:
    """Flip a bit of a tensor in a file of a checkpoint; return the name of the tensor."""
    path = folder / name
    tensor, stored = draw.choice(list(TensorFiles(path, "audit_faults").items()))
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")  # where the tensors begin, behind the header
    begin = data + json.loads(content[8:data])[tensor]["data_offsets"][0]
    content[begin + draw.randrange(4 * prod(stored.shape))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return tensor


def sealed(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with its digest."""
    return entry | {DIGEST: digest_of(entry)}


def forge(run: Path, change: Callable[[dict[str, Any]], Any] = lambda entry: None) -> None:
    """Change every entry of a run, and write all digests and links of files, losses, states and the chain anew."""
    losses, new, before, lines = losses_of(run), dict[str, str](), 0, []
    for line in (run / CHAIN).read_text().splitlines():
        entry = json.loads(line)
        digest, folder = entry.pop(DIGEST), step_folder(run, entry["step"])
        change(entry)
        if LINK in entry:
            entry[LINK] = {
                "previous": new[entry[LINK]["previous"]],
                "losses": digest_of(losses[before : entry["step"]]),
            }
        if folder.is_dir():
            for name, facts in entry["files"].items():
                facts["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            (folder / STATE).write_text(json.dumps(sealed(entry), indent=1))
        new[digest], before = digest_of(entry), entry["step"]
        lines.append(json.dumps(sealed(entry)) + "\n")
    (run / CHAIN).write_text("".join(lines))


def edit_file(run: Path, draw: random.Random, name: str, *, forged: bool) -> tuple[int, str]:
    """Flip a bit in a checkpoint, and write its digests anew, and with `forged` those of the whole chain."""
    folder = draw.choice(checkpoints(run))
    tensor, path = flip_in_file(folder, name, draw), folder / STATE
    if forged:
        forge(run)
    else:
        state = json.loads(path.read_text())
        del state[DIGEST]
        state["files"][name]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path.write_text(json.dumps(sealed(state), indent=1))
    return int(folder.name[5:]), tensor


def edit_loss(run: Path, draw: random.Random, *, forged: bool) -> tuple[int, str]:
    """Change a loss by a few last digits."""
    path = run / METRICS
    records = [json.loads(line) for line in path.read_text().splitlines()]
    number = draw.randrange(len(records))
    records[number]["loss"] *= 1 - 10 ** -draw.uniform(2, 12)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if forged:
        forge(run)
    return number, ""


def edit_line(run: Path, draw: random.Random, *, removed: bool) -> tuple[int, str]:
    """Remove a line of the chain, or change a digit of it."""
    lines = (run / CHAIN).read_text().splitlines(keepends=True)
    number = draw.randrange(len(lines))
    line = lines[number]
    place = draw.choice([place for place, character in enumerate(line) if character.isdigit()])
    lines[number] = "" if removed else f"{line[:place]}{(int(line[place]) + 1) % 10}{line[place + 1 :]}"
    (run / CHAIN).write_text("".join(lines))
    return -1, "" if removed else f"line {number + 1} "


def edit_setting(run: Path, draw: random.Random) -> tuple[int, str]:
    """Claim another learning rate, or another seed, and forge the run."""
    if draw.random() < 0.5:
        forge(run, lambda entry: entry["configuration"]["optimizer"].update(learning_rate=1.01e-3))
    else:
        forge(run, lambda entry: entry["configuration"]["run"].update(seed=1))
    return -1, ""


EDITS: dict[str, Callable[[Path, random.Random], tuple[int, str]]] = {
    "weight in a file": lambda run, draw: edit_file(run, draw, "model.safetensors", forged=False),
    "weight in a file, forged": lambda run, draw: edit_file(run, draw, "model.safetensors", forged=True),
    "moment in a file, forged": lambda run, draw: edit_file(run, draw, "optimizer.safetensors", forged=True),
    "loss": lambda run, draw: edit_loss(run, draw, forged=False),
    "loss, forged": lambda run, draw: edit_loss(run, draw, forged=True),
    "line of the chain changed": lambda run, draw: edit_line(run, draw, removed=False),
    "line of the chain removed": lambda run, draw: edit_line(run, draw, removed=True),
    "setting, forged": edit_setting,
}
KINDS = (*WHILE_TRAINING, *EDITS)


def audited(run: Path, folder: Path, dials: dict[str, Any]) -> tuple[Audit, list[Verdict]]:
    """Audit all stretches of a run."""
    audit = Audit(run, dials)
    with open_scheduler(dials["scheduler"], dials.get("threads", 0)) as scheduler:
        places = [folder / str(number) for number in range(len(audit.stretches))]
        return audit, [audit.compute(stretch, scheduler, place) for stretch, place in zip(audit.stretches, places)]


def inject(kind: str, text: Path, whole: Path, folder: Path, draw: random.Random) -> Found:
    """Inject a fault of a kind into a run and audit it.

    whole    the honest run
    folder   a new one
    """
    run, training, at, tensor = folder / "run", kind in WHILE_TRAINING, draw.randrange(STEPS), ""
    if training:
        with WHILE_TRAINING[kind](at, draw):
            honest(text, run)
    else:
        shutil.copytree(whole, run, symlinks=True)
        at, tensor = EDITS[kind](run, draw)
    audit, verdicts = audited(run, folder, {"scheduler": "sync"})
    trace = not training or losses_of(run) != losses_of(whole)
    for checkpoint, honest_checkpoint in zip(checkpoints(run), checkpoints(whole)):
        trace = trace or bool(differing_tensors(checkpoint, honest_checkpoint))
    wrong = [stretch for stretch, verdict in zip(audit.stretches, verdicts) if verdict.differs]
    spans = [(stretch[0]["step"], stretch[-1]["step"]) for stretch in wrong]
    if training:
        right = all(first <= at < last for first, last in spans)
    elif at < 0:
        right = any(tensor in fault for fault in audit.faults) if tensor else None
    elif tensor:  # the stretch that begins there differs as well
        right = all(at in span for span in spans) and spans[0][1] == at
        first = next(verdict for verdict in verdicts if verdict.differs)
        named = differing_tensors(first.folder, step_folder(run, at)) if first.folder else []
        right = right and named[0] in (tensor, f"transformer.{tensor}")
    else:
        right = all(first <= at < last for first, last in spans)
    steps = [number for verdict in verdicts for number, _, _ in verdict.losses]
    return Found(trace, audit.faults, verdicts, right, min(steps) - at if steps and training else None)


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors in which two checkpoints differ: the model's, weights before moments."""

    def values(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
        yield from open_run_model(folder / MODEL).parameters.items()
        files = TensorFiles(tensor_path(folder, OPTIMIZER), "audit")
        yield from ((name, files[name].read()) for name in files)

    return [name for (name, x), (_, y) in zip(values(one), values(other)) if x.tobytes() != y.tobytes()]


def random_dials(draw: random.Random) -> dict[str, Any]:
    """Draw how an audit computes."""
    grain = draw.choice(("kernel", "segment", "block", "chunk"))
    dials = {"batch_chunk": draw.choice((1, 2, 4)), "sequence_chunk": draw.choice((4, 8, 16)), "grain": grain}
    dials |= {"barrier": draw.choice(("layer", "phase", "step", "none")), "window": draw.randint(1, 4)}
    return dials | {"scheduler": draw.choice(("sync", "threads")), "threads": draw.randint(1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--honest", type=int, default=20, help="audits of the honest run")
    parser.add_argument("--seed", type=int, default=1)
    values = parser.parse_args()
    begin, findings_by_kind = time.monotonic(), dict[str, list[Found]]()
    with tempfile.TemporaryDirectory() as folder:
        text, alarms = write_text(Path(folder)), 0
        whole = honest(text, Path(folder) / "honest")
        for number in range(values.honest):
            audit, verdicts = audited(whole, Path(folder) / f"h{number}", random_dials(random.Random(number)))
            alarms += bool(audit.faults) or any(verdict.differs or verdict.unknown for verdict in verdicts)
        for number in range(values.faults):
            draw, kind = random.Random(f"{values.seed} {number}"), KINDS[number % len(KINDS)]
            finding = inject(kind, text, whole, Path(folder) / str(number), draw)
            findings_by_kind.setdefault(kind, []).append(finding)
            if finding.found != finding.trace:
                verdict = "found without a trace" if finding.found else "LOST"
                print(f"fault {number} (seed {values.seed}), {kind}: {verdict}")
            shutil.rmtree(Path(folder) / str(number))
    print(f"{'kind':27} faults  no trace  found  by the chain  located  steps to the first loss (median, most)")
    for kind, findings in findings_by_kind.items():
        seen = [finding for finding in findings if finding.trace]
        hits, chain = sum(finding.found for finding in seen), sum(bool(finding.chain) for finding in seen)
        places = [finding.right for finding in seen if finding.right is not None]
        right, lags = str(sum(places)) if places else "-", [finding.lag for finding in seen if finding.lag is not None]
        lag = f"{median(lags):g}, {max(lags)}; {len(seen) - len(lags)} in no loss" if lags else ""
        print(f"{kind:27} {len(findings):6} {len(findings) - len(seen):9} {hits:6} {chain:13} {right:>8}  {lag}")
    print(f"{alarms} of {values.honest} audits of the honest run failed; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
