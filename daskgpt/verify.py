"""Compare logits, loss and gradients with an llm.c debug state: `python -m daskgpt.verify MODEL DEBUG_STATE.bin`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.groups import groups_of_batch
from daskgpt.config.run import DataflowConfig, check_chunks
from daskgpt.formats.llmc import read_debug_state
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.training.autotune import ChunkChoice
from daskgpt.training.checkpoint import load
from daskgpt.training.engine import State
from daskgpt.training.inference import Inference

# Largest allowed difference, as a share of the tensor's largest magnitude: float32 sums of a few thousand products in
# another order than the float64 reference's differ by a few 1e-6.
# Operands rounded to 8 bits differ by up to 2**-9 each; through three blocks that adds up to a few per cent at worst.
TOLERANCE = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 3e-2}


class Comparison(NamedTuple):
    """One tensor against its reference."""

    name: str
    magnitude: float
    difference: float


def main(arguments: list[str]) -> int:
    """Print a table; 0 if everything agrees, 1 if not."""
    flags = Parser(prog="daskgpt.verify", description="Compare a model's gradients with an llm.c debug state.")
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    flags.add_argument("debug_state", metavar="DEBUG_STATE.bin", help="llm.c debug state of that model")
    add_flags(flags, DataflowConfig)
    values = flags.parse_args(arguments)
    dataflow: DataflowConfig = from_flags(DataflowConfig, values)
    require_scheduler(dataflow.scheduler)
    comparisons, tolerance = compare(values.model, values.debug_state, dataflow), TOLERANCE[dataflow.precision]
    print(f"{'tensor':28} {'largest':>10} {'difference':>11}   of the largest, at most {tolerance:g}")
    for c in comparisons:
        verdict = "ok" if c.difference <= tolerance else "DIFFERS"
        print(f"{c.name:28} {c.magnitude:10.3e} {c.difference:11.1e}   {verdict}")
    failed = sum(not c.difference <= tolerance for c in comparisons)
    print("all agree" if not failed else f"{failed} of {len(comparisons)} tensors differ")
    return int(bool(failed))


def compare(model: str | Path, debug_state: str | Path, dataflow: DataflowConfig) -> list[Comparison]:
    """Return the largest difference of each tensor, computed in the given chunks by the given scheduler."""
    precision = precision_of(dataflow.precision)
    config, parameters = load(model)
    state = read_debug_state(debug_state, config)
    batch_size, length = shape = state.tokens.shape
    check_chunks(batch_size, length, dataflow)
    weights = State.of_weights(config, parameters, precision)
    wanted = ("logits", "loss", "gradients")
    precision.compile()
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        chunk = ChunkChoice(config, shape, dataflow, precision, scheduler.threads).first
        inference = Inference(config, shape, chunk, weights.layout, wanted, precision, groups=groups_of_batch(*shape))
        results = inference(scheduler, weights, state.tokens, state.targets)
    logits = results["logits"][..., : config.vocabulary]
    pairs = [("logits", logits, state.logits), ("loss", results["loss"], np.array(state.loss))]
    for name, tensor in tensors(config).items():
        pairs.append((tensor.row.name.replace("{block}", "*"), results[name], state.gradients[name]))
    # One row per tensor of the table: that of the block with the largest difference relative to its own magnitude.
    worst: dict[str, Comparison] = {}
    for name, values, reference in pairs:
        magnitude = float(np.abs(reference).max())
        difference = float(np.abs(values - reference.astype(np.float64)).max())
        comparison = Comparison(name, magnitude, difference / magnitude if np.isfinite(difference) else np.inf)
        worst[name] = max(worst.get(name, comparison), comparison, key=lambda c: c.difference)
    return list(worst.values())


if __name__ == "__main__":
    run_command(main)
