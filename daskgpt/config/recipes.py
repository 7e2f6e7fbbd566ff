"""Recipes: flags that belong together, under one name of `daskgpt.train --preset`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Flags of a run. Those that are given beside it come after these.

    about   what it is for
    preset  size of the model
    """

    about: str
    preset: str
    flags: str

    @property
    def arguments(self) -> list[str]:
        """As a command line has them."""
        return shlex.split(self.flags)


RECIPES: dict[str, Recipe] = {
    # The fastest way known to us to 1.88 nats a character of the last tenth of Shakespeare's plays: the blocks of
    # nanoGPT's recipe for laptops, another optimizer, and tokens of some characters instead of one. 51 batches are all
    # of that tenth.
    "speedrun": Recipe(
        about="tiny to 1.88 nats a character of tinyshakespeare",
        preset="tiny",
        flags="--encoding learn:4096 --held-out end --validation-batches 51 --validate-every 0 --batch-size 12"
        " --sequence-length 64 --optimizer muon --learning-rate 0.01 --schedule linear --warmup 20"
        " --final-learning-rate 0 --steps 100",
    ),
}
