"""Groups of a batch: how many sequences are summed in one chain, before the totals meet (`graph.sum_order`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskgpt.config.errors import nearest_divisor, refusal
from daskgpt.config.settings import setting

# Tokens of a group, at least. Another group costs an addition for each number of a gradient, 0.1 ns in a cache, where a
# token costs 0.075 ns at 80 GFLOP/s; and another call of each summing kernel, which is what small models notice: tiny,
# 12 x 64 tokens, takes the same time with 1 group and with 2, and a fifth more with 6 (Zen 3, two threads). Workers
# share a batch by groups: with fewer of them than workers some would have nothing to do.
LEAST_ROWS = 384


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of a batch.

    count   how many they are
    first   number of the first one
    batch   how many the batch has; 0 = these are all
    """

    count: int = 1
    first: int = 0
    batch: int = 0

    @property
    def whole(self) -> int:
        """How many groups the batch has where these are all; else 0."""
        return self.count if self.batch in (0, self.count) else 0


ONE_GROUP = Groups()


def groups_of_rank(rank: int, count: int, groups: int) -> Groups:
    """The groups of one of several ranks: consecutive ones, nearly as many as the others have."""
    own = share_of_rank(rank, count, groups)
    return Groups(len(own), own.start, groups)


def share_of_rank(rank: int, count: int, things: int) -> range:
    """The share of one of several ranks in some things: consecutive ones, nearly as many as the others have."""
    return range(rank * things // count, (rank + 1) * things // count)


def groups_setting() -> Any:
    """A field for G, the groups of a batch."""
    return setting(
        0,
        "G, groups of sequences that are summed apart; divides B; auto or 0 = by the batch's shape",
        least=0,
        words={"auto": 0},
    )


def groups_of_batch(batch_size: int, sequence_length: int, given: int = 0) -> int:
    """Into how many groups of sequences the sums over a batch are divided: as many as are given, or, for 0, what its
    shape alone leads to. The bits of a result depend on them, and so they must not depend on who computes it.

    It is the largest number that divides the batch size and leaves a group at least LEAST_ROWS tokens.
    """
    if given:
        return given
    sizes = (size for size in range(1, batch_size + 1) if batch_size % size == 0)
    return batch_size // next((size for size in sizes if size * sequence_length >= LEAST_ROWS), batch_size)


def check_groups(where: str, groups: int, name: str, sequences: int) -> None:
    """Errors   ValueError where the number of groups does not divide that of the sequences (of this name)"""
    if groups < 1 or sequences % groups:
        near = nearest_divisor(sequences, groups)
        rule = f"groups must divide {name}"
        raise refusal(ValueError, where, rule, {"groups": groups, name: sequences}, f"Try groups={near}.")
