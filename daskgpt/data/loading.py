"""The next batches, ready while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from daskgpt.data.dataset import Batch, Dataset, batch


class BatchLoader:
    """Batches of a dataset by the numbers of their steps. A thread reads those of the steps that come next, so that no
    step waits for a disk; which batch a step has is a function of its number all the same.
    """

    def __init__(self, dataset: Dataset, batch_size: int, sequence_length: int, seed: int, order: str) -> None:
        self.make = partial(
            batch,
            dataset.training,
            batch_size=batch_size,
            sequence_length=sequence_length,
            seed=seed,
            order=order,
            vocabulary=dataset.vocabulary,
        )
        self.reader = ThreadPoolExecutor(1, "batches")
        self.coming: dict[int, Future[Batch]] = {}

    def take(self, numbers: Sequence[int]) -> list[Batch]:
        """The batches of these steps; as many that follow them are begun.

        Errors   ValueError for a token beyond the vocabulary, OSError of the disk
        """
        wanted = {number: self._begun(number) for number in numbers}
        for number, other in self.coming.items():
            if number not in wanted:
                other.cancel()
        following = range(numbers[-1] + 1, numbers[-1] + 1 + len(numbers))
        self.coming = {number: self._begun(number) for number in following}
        return [own.result() for own in wanted.values()]

    def _begun(self, number: int) -> Future[Batch]:
        known = self.coming.get(number)
        return known if known and not known.cancelled() else self.reader.submit(self.make, step=number)

    def close(self) -> None:
        """End its thread."""
        self.reader.shutdown(wait=False, cancel_futures=True)
