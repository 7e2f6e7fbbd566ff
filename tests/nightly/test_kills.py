"""Tests of kills: a run whose process was killed at any moment continues to the same bits."""

import random

import numpy as np
from kills import kill_and_resume

from daskgpt.kernels.compilation import compile_all


def test_resume_after_ten_random_kills(tmp_path):
    compile_all(np.float32)
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}: python benchmarks/kills.py --kills 10 --seed {seed}")  # pytest shows it where the test fails
    said = kill_and_resume(tmp_path, 10, seed)  # which checks the bits
    assert "10 kills" in said, said
