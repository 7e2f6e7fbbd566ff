"""Write training.json: what PyTorch says of learning rates over the steps.

python tests/golden/make_training.py        (needs PyTorch)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.optim import lr_scheduler

HIGH, LOW, STEPS, WARMUP, COOLDOWN = 1e-3, 1e-4, 40, 8, 10


def rates(schedule: str) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=HIGH)
    rest, share = STEPS - 1 - WARMUP, LOW / HIGH

    def rise() -> lr_scheduler.LRScheduler:
        return lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)

    after = {
        "constant": lambda: [lr_scheduler.ConstantLR(optimizer, 1.0)],
        "linear": lambda: [rise(), lr_scheduler.LinearLR(optimizer, 1.0, share, rest)],
        "cosine": lambda: [rise(), lr_scheduler.CosineAnnealingLR(optimizer, rest, LOW)],
        "wsd": lambda: [
            rise(),
            lr_scheduler.ConstantLR(optimizer, 1.0),
            lr_scheduler.LinearLR(optimizer, 1.0, share, COOLDOWN),
        ],
    }[schedule]()
    ends = [WARMUP, STEPS - 1 - COOLDOWN][: len(after) - 1]
    scheduler = lr_scheduler.SequentialLR(optimizer, after, ends) if ends else after[0]
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


if __name__ == "__main__":
    numbers = {
        "torch": torch.__version__,
        "schedules": {name: rates(name) for name in ("constant", "linear", "cosine", "wsd")},
    }
    (Path(__file__).parent / "training.json").write_text(json.dumps(numbers, indent=1) + "\n")
