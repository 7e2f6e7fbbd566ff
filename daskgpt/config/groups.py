"""Groups of a batch: sequences that are summed in one chain, before the totals of groups are added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskgpt.config.settings import setting

# The least number of tokens in a group. A further group costs an addition per number of a gradient, 0.1 ns in a cache
# (a token costs 0.075 ns at 80 GFLOP/s), and another call of each summing kernel, which slows small models: tiny with
# 12 x 64 tokens takes the same time with 1 group and with 2, and a seventh more with 6 (Zen 3, two threads). Workers
# share a batch by groups: with fewer groups than workers, some workers would be idle.
LEAST_ROWS = 384
# Groups of this many tokens are used only where their number is a multiple of 6, which 2 and 3 workers share evenly.
# 6 x 384, 12 x 128 tokens, takes the same time on two threads with 4 groups and with 6, and three quarters of the time
# on three workers with 100 Mb/s each. gpt2, 4 or 8 x 256 tokens, would take 1 to 3 % longer with groups of 256.
LEAST_SHARED_ROWS = 256


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of a batch.

    count   number of these groups
    first   number of the first one
    batch   number of groups in the batch; 0 = these are all
    """

    count: int = 1
    first: int = 0
    batch: int = 0

    @property
    def whole(self) -> int:
        """Number of groups in the batch if these are all of them; else 0."""
        return self.count if self.batch in (0, self.count) else 0


ONE_GROUP = Groups()


def groups_of_rank(rank: int, count: int, groups: int) -> Groups:
    """Return the groups of one of several ranks: consecutive groups, nearly as many for each rank."""
    numbers = share_of_rank(rank, count, groups)
    return Groups(len(numbers), numbers.start, groups)


def share_of_rank(rank: int, count: int, things: int) -> range:
    """Return the share of one of several ranks: consecutive items, nearly as many for each rank."""
    return range(rank * things // count, (rank + 1) * things // count)


def groups_setting() -> Any:
    """Return a field for G, the number of groups in a batch."""
    return setting(
        0,
        "G, groups of sequences that are summed separately; divides B; auto or 0 = by the batch's shape",
        auto=0,
    )


def groups_of_batch(batch_size: int, sequence_length: int, given: int = 0) -> int:
    """Return the number of groups of sequences for sums over a batch: the given number or, for 0, one that follows
    from the shape alone. Bits depend on it, so it must not depend on where the batch is computed.

    It is the largest number that divides the batch size and leaves a group at least LEAST_ROWS tokens, or
    LEAST_SHARED_ROWS where it is a multiple of 6.
    """
    if given:
        return given
    for groups in (number for number in range(batch_size, 1, -1) if batch_size % number == 0):
        least = LEAST_SHARED_ROWS if groups % 6 == 0 else LEAST_ROWS
        if batch_size // groups * sequence_length >= least:
            return groups
    return 1
