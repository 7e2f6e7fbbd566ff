"""What held-out text says of a model while it is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from daskgpt.data.dataset import validation_batches
from daskgpt.data.tokenizer import get_encoding, sizes_of
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.inference import Inference
from daskgpt.training.job import Job
from daskgpt.training.step import State

TOGETHER = 20  # batches in one graph


class Validation:
    """Measures the loss of fixed, evenly spread windows of the held-out text.

    stop_requested   says whether somebody wants the run to end: a validation is given up then
    """

    def __init__(self, job: Job, scheduler: Scheduler, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.job, self.scheduler, self.stop_requested = job, scheduler, stop_requested
        self.inference: Inference | None = None
        self.bytes: int | None = None  # of text that is predicted; 0 where nobody knows

    def of(self, state: State, chunk: tuple[int, int]) -> dict[str, Any]:
        """Metrics of a state; none where the run is to end before all windows are measured.

        validation_loss         [nats a token]
        validation_bits_a_byte  all nats / ln 2 / bytes of text that was predicted: what other encodings have as well;
                                missing where the encoding's vocabulary is not here
        validation_s            what it took [s]
        """
        start = time.perf_counter()
        if (loss := self.loss(state, chunk)) is None:
            return {}
        found: dict[str, Any] = {"validation_loss": loss}
        if self.bytes is None:
            self.bytes = self._count_bytes()
        if self.bytes:
            tokens = self.job.run.validation_batches * math.prod(self.job.batch_shape)
            found["validation_bits_a_byte"] = loss * tokens / math.log(2) / self.bytes
        return found | {"validation_s": round(time.perf_counter() - start, 3)}

    def loss(self, state: State, chunk: tuple[int, int]) -> float | None:
        """Mean over the windows [nats a token], None where the run is to end before all are measured."""
        job, state = self.job, state.weights
        if self.inference is None or self.inference.runnable.layout != state.layout:
            size, precision = job.batch_shape, job.precision
            # There is work for everybody, and what a larger task lacks is only what it would hand on.
            wanted = ("loss",), precision, "chunk", job.groups
            self.inference = Inference(job.config, size, chunk, state.layout, *wanted)
        losses, batches = list[float](), self._batches()
        while together := list(islice(batches, TOGETHER)):
            if self.stop_requested():
                return None
            losses += [float(own["loss"]) for own in self.inference.of_all(self.scheduler, state, together)]
        return sum(losses) / len(losses)

    def _batches(self) -> Any:
        (batch_size, length), count = self.job.batch_shape, self.job.run.validation_batches
        tokens = self.job.tokens.validation
        return validation_batches(tokens, batch_size=batch_size, sequence_length=length, count=count)

    def _count_bytes(self) -> int:
        try:
            sizes = sizes_of(get_encoding(self.job.tokens.encoding_name))
        except FileNotFoundError:  # tokens are trained on without it
            return 0
        return sum(int(np.sum(sizes[targets])) for _, targets in self._batches())
