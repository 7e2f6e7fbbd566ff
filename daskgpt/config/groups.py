"""Groups of a batch: how many sequences are summed in one chain, before the totals meet (`graph.sum_order`)."""

from __future__ import annotations

from typing import Any

from daskgpt.config.errors import refusal
from daskgpt.config.settings import setting

# Tokens of a group, at least. Another group costs an addition for each number of a gradient, 0.1 ns in a cache, and
# half as much again for the tied table; a token costs 6 operations for each, 0.075 ns at 80 GFLOP/s a thread in float32
# and 0.017 ns at 350 in bfloat16. So with 1,024 tokens the tree should take 0.2 % of a step, or 0.8 % (2.3 % were
# measured in bfloat16). Workers that have groups of their own sum them at the same time, where they would otherwise
# hand totals on (`graph.spreading`).
LEAST_ROWS = 1024


def groups_setting() -> Any:
    """A field for G, the groups of a batch."""
    return setting(
        0,
        "G, groups of sequences that are summed apart; a power of two that divides B; auto or 0 = by the batch's shape",
        least=0,
        zero="auto",
    )


def groups_of_batch(batch_size: int, sequence_length: int, given: int = 0) -> int:
    """Into how many groups of sequences the sums over a batch are divided: as many as are given, or, for 0, what its
    shape alone leads to. The bits of a result depend on them, and so they must not depend on who computes it.

    It is the largest power of two that divides the batch size and leaves a group at least LEAST_ROWS tokens.
    """
    if given:
        return given
    groups = 1
    while batch_size % (groups * 2) == 0 and batch_size // (groups * 2) * sequence_length >= LEAST_ROWS:
        groups *= 2
    return groups


def check_groups(where: str, groups: int, name: str, sequences: int) -> None:
    """Errors   ValueError where groups is no power of two that divides the sequences (of this name)"""
    powers = [2**power for power in range(max(sequences.bit_length(), 1)) if sequences % 2**power == 0]
    if groups not in powers:
        near = min(powers, key=lambda power: (abs(power - groups), -power))
        rule = f"groups must be a power of two that divides {name}"
        raise refusal(ValueError, where, rule, {"groups": groups, name: sequences}, f"Try groups={near}.")
