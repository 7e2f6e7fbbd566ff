"""The learning rate over the steps: a table of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from daskgpt.config.run import OptimizerConfig
from daskgpt.config.settings import part_of


@dataclass(frozen=True)
class Schedule:
    """One row.

    warms  whether the learning rate rises in the first `warmup` steps
    falls  over how many of the last steps it falls: from the configuration and the number of all steps, None for all
           after the rise
    left   how much of the fall is left where so much of its way, 0 .. 1, is done
    """

    name: str
    warms: bool
    falls: Callable[[OptimizerConfig, int], int | None]
    left: Callable[[float], float]


CONSTANT = Schedule("constant", warms=False, falls=lambda config, steps: 0, left=lambda way: 1.0)
LINEAR = Schedule("linear", warms=True, falls=lambda config, steps: None, left=lambda way: 1 - way)
# Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
COSINE = Schedule("cosine", warms=True, falls=lambda config, steps: None, left=lambda way: _half_cosine(way))
# Warmup, stable, decay: Hu et al. 2024, arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392.
WSD = Schedule("wsd", warms=True, falls=lambda config, steps: part_of(config.cooldown, steps), left=lambda way: 1 - way)
SCHEDULES = {row.name: row for row in (CONSTANT, LINEAR, COSINE, WSD)}


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Of a step, from 0 on, in a run of so many: a linear rise over `warmup` steps to the largest one, and a fall that
    ends with the last step at the final one; see `SCHEDULES`.
    """
    row = SCHEDULES[config.schedule]
    warmup = part_of(config.warmup, steps) if row.warms else 0
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    room = steps - 1 - warmup
    wanted = row.falls(config, steps)
    if wanted == 0:
        return config.learning_rate
    falls = room if wanted is None else min(wanted, room)
    way = (step - (steps - 1 - falls)) / max(falls, 1)
    height = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + height * row.left(min(max(way, 0.0), 1.0))


# C libraries differ in the last bit of a cosine, and a run's bits would depend on the machine.
def _half_cosine(progress: float) -> float:
    """(1 + cos(π progress)) / 2 for progress from 0 to 1: the square of cos(π progress / 2), by its Taylor series."""
    angle = math.pi / 2 * progress
    square = angle * angle
    total = term = 1.0
    for number in range(1, 27, 2):
        term *= -square / (number * (number + 1))
        total += term
    return total * total
