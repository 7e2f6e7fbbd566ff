"""Compute any tensor of a step of a run again: an activation, a gradient, a weight, a moment.

The newest checkpoint before the step is led to it under any chunks, threads or workers, and the tensor has the bits
that it had while the run trained. Names are those of timelines, `attention.forward-h.3.attn.y`, or shorter:

  h.3.attn.y                      a result of a layer at a place of the model; ln_f.y, losses.losses
  h.3.attn.dqkv                   the gradient of a layer's argument
  gradient.h.3.attn.c_attn.weight the gradient of a parameter, before it is clipped
  h.3.attn.c_attn.weight          a parameter before the step's update
  m.h.3.attn.c_attn.weight        a moment before the step's update
  tokens, targets                 the batch

Without --tensor and --rows, all names are listed with their shapes. Statistics leave out numbers that are not finite;
each line ends with the beginning of the SHA-256 of the bytes, so that `--tensor all` of two machines can be compared.
Steps count from 1, as in messages and timelines; step-00000100 is the state before step 101.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import check_writable, replacing
from daskgpt.config.flags import Parser, given_flags, run_command
from daskgpt.config.run import DataflowConfig
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation.sampler import readable
from daskgpt.schedulers.opening import open_scheduler, require_scheduler
from daskgpt.training.job import compile_kernels
from daskgpt.training.replay import PlacesConfig, Replay, StepTensors

DIGITS, LOSS = 12, "loss.loss"  # of a SHA-256; the tensor


def main(arguments: list[str]) -> int:
    """Compute the step and print what was asked for."""
    flags = Parser(prog="daskgpt.rewind", description=__doc__)
    flags.add_argument("run", metavar="RUN", type=Path, help="run folder")
    flags.add_argument("--step", type=int, required=True, help="number of the step, from 1")
    text = "compute this tensor and print its statistics (may be repeated); all = every tensor, in order of computation"
    flags.add_argument("--tensor", metavar="NAME", action="append", default=[], help=text)
    flags.add_argument("--out", metavar="FILE.npy", type=Path, help="write the tensor, for numpy.load")
    text = "print the sequences of the batch with their losses, the largest first"
    flags.add_argument("--rows", action="store_true", help=text)
    values, places, dataflow = flags.read(arguments, PlacesConfig, DataflowConfig)
    require_scheduler(dataflow.scheduler)
    if values.out:
        rule, advice = "--out must be given with one --tensor", "Name one tensor."
        require(len(values.tensor) == 1 and values.tensor != ["all"], "rewind", rule, {"tensor": values.tensor}, advice)
        rule, got = "--out must end with .npy", {"out": values.out}  # so it is no file of the run itself
        require(values.out.suffix == ".npy", "rewind", rule, got, "Try --out tensor.npy.")
        check_writable(values.out, "rewind", "out")
    dials, step = given_flags(DataflowConfig, values), values.step - 1
    replay = Replay("rewind", values.run, dials, places.data, places.init)
    with open_scheduler(dataflow.scheduler, dataflow.threads) as scheduler:
        tensors = replay.tensors_of(step, scheduler)
        names = tensors.names if values.tensor == ["all"] else [*map(tensors.resolve, values.tensor)]
        if not (names or values.rows):
            print("\n".join(f"{name} {shape}" for name, shape in tensors.shapes.items()))
            return 0
        compile_kernels(tensors.job.precision, tensors.job.uses)
        tensors.begin(replay.state_before(step, scheduler))
        arrays = tensors.arrays([*names, LOSS])
        print(f"step {values.step:,}: {compared(float(arrays[LOSS]), replay.losses.get(step))}")
        for name in names:
            print(statistics(name, arrays[name]))
        if values.rows:
            print("\n".join(sequences(tensors)))
    if values.out:
        with replacing(values.out, "rewind") as file:
            np.save(file, arrays[names[0]])
        print(f"{names[0]} written to {values.out}")
    return 0


def compared(loss: float, written: float | None) -> str:
    """Return a computed loss in words, beside the one that the run has written."""
    if written is None:
        return f"loss {loss} nats a token; the run has written none"
    return f"loss {loss} nats a token, {'as written' if loss == written else f'but {written} is written'}"


def statistics(name: str, array: np.ndarray) -> str:
    """Return a line on a tensor."""
    values, is_finite = array.astype(np.float64), np.isfinite(array)
    finite = values[is_finite] if is_finite.any() else np.full(1, np.nan)
    numbers = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "rms": np.sqrt(np.mean(finite**2))}
    shown = " ".join(f"{what} {number:.6g}" for what, number in numbers.items())
    zeros, others = np.mean(array == 0), np.count_nonzero(~is_finite)
    digest = hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()[:DIGITS]
    return f"{name}: {array.dtype} {array.shape} {shown} zeros {zeros:.2%} not finite {others:,} sha256 {digest}"


def sequences(tensors: StepTensors) -> Iterator[str]:
    """Yield lines on the sequences of the batch, those with the largest mean loss first."""
    encoding = get_encoding(tensors.job.tokens.encoding_name)
    losses, shares = tensors.arrays(["losses.losses"])["losses.losses"], tensors.inputs["shares"]
    means = (losses * shares).sum(1) / np.maximum(shares.sum(1), np.finfo(float).tiny)  # of pairs, of weighted targets
    for row in np.argsort(-means, kind="stable"):
        text = "".join(readable(encoding, tensors.held["tokens"][row].tolist()))
        yield f"--- row {row}, {means[row]:.4f} nats a token\n{text}"


if __name__ == "__main__":
    run_command(main)
