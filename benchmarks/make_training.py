"""Write training.json: PyTorch's learning rates over the steps, clipped gradients, and scale of dropout.

python benchmarks/make_training.py        (needs PyTorch)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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


def clipped(clip: float, shapes: dict[str, tuple[int, ...]], steps: int) -> dict[str, list[float]]:
    """Norms of made-up gradients, and sums over the weights that AdamW makes of them, clipped, step by step."""
    weights = {name: torch.nn.Parameter(torch.tensor(made_up(0, name, shape))) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    norms, sums = [], []
    for step in range(1, steps + 1):
        for name, weight in weights.items():
            weight.grad = torch.tensor(made_up(step, name, shapes[name]))
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), clip)))
        optimizer.step()
        sums.append(float(sum(weight.detach().double().abs().sum() for weight in weights.values())))
    return {"norms": norms, "sums": sums}


def kept(rate: float, dtype: torch.dtype) -> dict[str, float]:
    """What dropout makes of a 1 that is not dropped: its value, its gradient, and as the probability of the one token
    that attention may look at."""
    x = torch.ones(2000, dtype=dtype, requires_grad=True)
    y = torch.nn.functional.dropout(x, rate)
    y.sum().backward()
    one = torch.ones(2000, 1, 1, 1, dtype=dtype)
    attended = torch.nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True, dropout_p=rate)
    assert x.grad is not None
    return {"value": the_other(y), "gradient": the_other(x.grad), "attention": the_other(attended)}


def the_other(values: torch.Tensor) -> float:
    """Of numbers that are 0 or another one, that other one."""
    zero, other = values.detach().double().unique().tolist()
    assert zero == 0
    return other


def made_up(step: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers between -0.5 and 0.5, from a stream that no version of NumPy changes."""
    raw = np.random.Philox(1000 * step + len(name)).random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (raw.astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)).reshape(shape)


SHAPES = {"a": (130, 33), "bb": (33,), "ccc": (1, 7)}
CLIPS = (0.5, 19.0, 1000.0)
RATES = (0.1, 0.2, 0.5, 0.9)

if __name__ == "__main__":
    numbers = {
        "torch": torch.__version__,
        "schedules": {name: rates(name) for name in ("constant", "linear", "cosine", "wsd")},
        "clipping": {str(clip): clipped(clip, SHAPES, 4) for clip in CLIPS},
        "dropout": {
            str(rate): {kind: kept(rate, getattr(torch, kind)) for kind in ("float32", "float64")} for rate in RATES
        },
    }
    (Path(__file__).parents[1] / "tests" / "golden" / "training.json").write_text(json.dumps(numbers, indent=1) + "\n")
