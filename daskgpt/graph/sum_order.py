"""The order of a sum over the batch, which chunks do not change: chains within groups of sequences, a tree over groups.

    a group       some consecutive sequences, whose rows are summed in one chain: sequence by sequence, in each token by
                  token, a kernel continuing from the total of the one before, wherever a chunk ends
    the groups    a binary tree, see `kernels.totals`
    a start       of a sum that continues from another one: what the first group's chain starts from

Groups are summed one after the other. A sum over some groups of a batch ends with the totals of subtrees, which are
added to those of the other groups elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from daskgpt.config.errors import require_divisor
from daskgpt.kernels.totals import additions, level, tree_add

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


@dataclass(frozen=True)
class Cut:
    """Sequences `first` .. `last` of a piece's chunks, which belong to one group."""

    group: int
    first: int
    last: int


@dataclass(frozen=True)
class Chain:
    """Kernel calls (their arguments, in order) that sum rows of one group.

    ends   whether they sum the last rows of the group
    """

    group: int
    calls: Sequence[Sequence[Any]]
    ends: bool


@dataclass(frozen=True)
class SumOrder:
    """The order in which the rows of a batch in chunks enter a sum.

    pieces     indices (along b, along t) of the chunks that are summed one after the other; if a chunk holds some
               tokens of several sequences, all token chunks of these sequences are one piece
    together   whether the token chunks of a piece are joined before a single call of the kernel; else it is called for
               the rows of one sequence in one chunk
    sequences  number of sequences of each chunk along b
    groups     the groups of the batch that these sequences are, of equal size
    """

    pieces: tuple[tuple[tuple[int, int], ...], ...]
    together: bool
    sequences: tuple[int, ...]
    groups: Groups = ONE_GROUP

    @classmethod
    def of(cls, sequences: Sequence[int], tokens: Sequence[int], at_once: int, groups: Groups = ONE_GROUP) -> SumOrder:
        """Return the order for chunks of these sizes.

        at_once   tokens of a sequence that the kernel takes in one step, which a chunk must not cut

        Errors   ValueError if the number of groups does not divide that of sequences
        """
        require_divisor("SumOrder", "groups", groups.count, "sequences", sum(sequences))
        together = any(count % at_once for count in tokens[:-1])
        pieces: list[tuple[tuple[int, int], ...]] = []
        for b, count in enumerate(sequences):
            chunks = [(b, t) for t in range(len(tokens))]
            pieces += [(chunk,) for chunk in chunks] if count == 1 and not together else [tuple(chunks)]
        return cls(tuple(pieces), together, tuple(sequences), groups)

    def level(self, group: int) -> int:
        """Return the number of totals below that of a group while it is summed."""
        return level(group, self.groups.first)

    def additions(self, group: int) -> int:
        """Return the number of additions of two totals after a group has been summed."""
        return additions(group, self.groups.first, self.groups.whole)

    def tree_add(self, totals: list[np.ndarray], group: int) -> None:
        """Make the additions after a group has been summed."""
        tree_add(totals, self.level(group), self.additions(group))

    @cached_property
    def of_group(self) -> int:
        """Number of sequences in a group."""
        return sum(self.sequences) // self.groups.count

    def cuts(self, piece: int) -> list[Cut]:
        """Return the cuts of a piece, at the ends of groups; each is one call of a kernel."""
        b = self.pieces[piece][0][0]
        begin, count = self._begins[b], self.sequences[b]
        if len(self.pieces[piece]) > 1 and not self.together:
            return [Cut(self._group(begin + number), number, number + 1) for number in range(count)]
        length = self.of_group
        ends = [0, *range(length - begin % length, count, length), count]
        return [Cut(self._group(begin + first), first, last) for first, last in pairwise(ends)]

    def chains(self, calls: Iterable[tuple[int, Sequence[Any]]], after: int) -> list[Chain]:
        """Return calls in order, each with its group, as chains.

        after   the piece that comes next, which may continue with the last group
        """
        by_group: dict[int, list[Sequence[Any]]] = {}
        for group, arguments in calls:
            by_group.setdefault(group, []).append(arguments)
        return [
            Chain(group, calls_of_group, group != self.group_of(after)) for group, calls_of_group in by_group.items()
        ]

    def group_of(self, piece: int) -> int:
        """Return the group of a piece's first rows; for the piece after the last one, the group that would follow."""
        return self._group(sum(self.sequences) if piece == len(self.pieces) else self._begins[self.pieces[piece][0][0]])

    def totals_before(self, piece: int) -> int:
        """Return the number of totals before a piece is summed: none before the first, one after the last."""
        if piece == len(self.pieces):
            return 1 if self.groups.whole else self.level(self.group_of(piece))
        b, t = self.pieces[piece][0]
        inside = self._begins[b] % self.of_group or t
        return self.level(self.group_of(piece)) + bool(inside)

    def _group(self, sequence: int) -> int:
        return self.groups.first + sequence // self.of_group

    @cached_property
    def _begins(self) -> list[int]:
        """Return the first sequence of each chunk along b."""
        return [0, *accumulate(self.sequences)]


def share_of_rank(rank: int, count: int, things: int) -> range:
    """Return the share of one of several ranks: consecutive items, nearly as many for each rank."""
    return range(rank * things // count, (rank + 1) * things // count)


def sequences_of_rank(rank: int, count: int, groups: int, sequences: int) -> slice:
    """Return the sequences of a batch that one of several ranks works on: those of its groups."""
    share, size = share_of_rank(rank, count, groups), sequences // groups
    return slice(share.start * size, share.stop * size)


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
