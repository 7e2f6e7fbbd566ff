"""The best checkpoint of a run: the one whose validation loss is the lowest. It stays, and `RUN/best` means it.

Every checkpoint's state.json says which one was the best when it was written, itself included, so that a process that
is killed before `best` follows loses nothing: who goes on with the run lets it follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from daskgpt.training.checkpoints import BEST, DamagedCheckpoint, checked_state, point, step_folder


@dataclass(frozen=True)
class Best:
    """Which checkpoint is the best one.

    step   of it; -1 where there is none
    loss   on the held-out text, in nats a token
    """

    step: int = -1
    loss: float = math.inf

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's state says of it."""
        return {"best": asdict(self)} if self.step >= 0 else {}


NONE = Best()


def best_of(run: Path, state: Mapping[str, Any]) -> Best:
    """What a checkpoint's state says is the best one; none where that is not there any more, or damaged."""
    best = Best(**state.get("best", {}))
    if best.step >= 0:
        try:
            checked_state(step_folder(run, best.step), model_only=True)
        except DamagedCheckpoint:
            return NONE
    return best


def point_best(run: Path, best: Best) -> None:
    """Let `best` mean a checkpoint, or be gone where there is none."""
    if best.step >= 0:
        point(run / BEST, step_folder(run, best.step).name)
    elif (run / BEST).is_symlink():
        (run / BEST).unlink()
