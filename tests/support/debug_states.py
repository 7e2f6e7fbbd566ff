"""Logits, loss and gradients of the golden model compared with its debug state."""

from __future__ import annotations

import numpy as np
from batch_results import results_of
from llmc_samples import DEBUG_STATE, MODEL, read_debug_state, read_model

from daskgpt.config.groups import groups_of_batch
from daskgpt.config.run import DataflowConfig
from daskgpt.model.parameters import tensors
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.opening import open_scheduler
from daskgpt.training.autotune import ChunkChoice

# Largest allowed difference, as a share of the tensor's largest magnitude: float32 sums of a few thousand products in
# another order than the float64 reference's differ by a few 1e-6.
# Operands rounded to 8 bits differ by up to 2**-9 each; through three blocks that adds up to a few per cent at worst.
TOLERANCE = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 3e-2}


def differences(precision: str, dataflow: DataflowConfig) -> dict[str, float]:
    """Return the largest difference of each tensor as a share of its largest magnitude, by the rows of the table."""
    config, parameters = read_model(MODEL)
    state, arithmetic = read_debug_state(DEBUG_STATE, config), precision_of(precision)
    batch, shape = (state.tokens, state.targets), state.tokens.shape
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        chunk = ChunkChoice(config, shape, dataflow, scheduler.threads).first
        results = results_of(scheduler, config, parameters, batch, chunk, arithmetic, groups_of_batch(*shape))
    logits = results["logits"][..., : config.vocabulary]
    pairs = [("logits", logits, state.logits), ("loss", results["loss"], np.array(state.loss))]
    for name, tensor in tensors(config).items():
        pairs.append((tensor.row.name.replace("{block}", "*"), results[name], state.gradients[name]))
    shares: dict[str, float] = {}
    for name, values, reference in pairs:
        difference = float(np.abs(values - reference.astype(np.float64)).max())
        assert np.isfinite(difference), name
        shares[name] = max(shares.get(name, 0.0), difference / float(np.abs(reference).max()))
    return shares
