"""The choice of the unit, threads, and the cache of compiled products between processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from product_cases import TILE_UNITS, UNITS, arrays, assert_same_bits, at_once, using

from daskgpt.kernels.bfloat16 import backward_weight, backward_x, forward, pack_weight

PRODUCT = """
import hashlib, numpy as np
from daskgpt.kernels import bfloat16
from daskgpt.kernels.bfloat16 import products
random = np.random.default_rng(5)
x, weight = (random.standard_normal(shape, np.float32) for shape in ((40, 70), (45, 70)))
y = bfloat16.forward(x, bfloat16.pack_weight(weight))
dispatcher = products._multiply.compile("any")
hits = sum(dispatcher.stats.cache_hits.values())
print(bfloat16.unit().name.lower(), hashlib.sha256(y.tobytes()).hexdigest(), hits)
"""


def run(source: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "DASKGPT_MATMUL"} | variables
    return subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)


def products(packed, x, dy):
    outputs, channels = dy.shape[-1], x.shape[-1]
    total = backward_weight(dy, x, total=np.empty((outputs, channels), "f4"), accumulate=False)
    return forward(x, packed), backward_x(dy, packed), total


@pytest.mark.parametrize("name", UNITS)
def test_eight_threads_at_once(name):
    with using(name):
        x, weight, dy = arrays(1, (70, 300), (90, 300), (70, 90))
        packed = pack_weight(weight)
        expected = products(packed, x, dy)
        found = at_once(8, lambda: [products(packed, x, dy) for _ in range(5)])
    for results in found:
        for arrays_found in results:
            for one, other in zip(arrays_found, expected, strict=True):
                assert_same_bits(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", TILE_UNITS)
def test_the_variable_names_the_unit_and_the_cache_serves_the_next_process(name, tmp_path):
    with using(name):
        x, weight = arrays(5, (40, 70), (45, 70))
        digest = hashlib.sha256(forward(x, pack_weight(weight)).tobytes()).hexdigest()
    variables = {"DASKGPT_MATMUL": name, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (run(PRODUCT, **variables) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == [name, digest, "0"]
    assert second.stdout.split() == [name, digest, "1"]


def test_an_unknown_unit_is_refused():
    found = run("from daskgpt.kernels import bfloat16; bfloat16.unit()", DASKGPT_MATMUL="gpu")
    assert found.returncode == 1
    assert found.stderr.strip().endswith(
        "ValueError: DASKGPT_MATMUL: the unit must be amx, avx512 or portable; got DASKGPT_MATMUL=gpu. "
        "Unset it to use the fastest that works here."
    )


@pytest.mark.parametrize("name", TILE_UNITS)
def test_a_unit_that_the_processor_lacks_is_refused(name):
    variables = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}
    found = run("from daskgpt.kernels import bfloat16; bfloat16.unit()", DASKGPT_MATMUL=name, **variables)
    assert found.returncode == 1
    assert found.stderr.strip().endswith(
        "RuntimeError: DASKGPT_MATMUL: the processor must have the unit and the operating system must grant it; "
        f"got DASKGPT_MATMUL={name}. Unset it to use the fastest that works here."
    )
