"""Tests of the one number that take longer: for older processors, of larger models, of the campaign as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import campaign
import one_number
import pytest
import test_one_number
from command_lines import PATIENCE
from product_cases import UNITS
from test_one_number import EXPECTED, LARGER

from daskgpt.kernels.simd.lanes import features

# Instruction sets as LLVM names them; NUMBA_CPU_FEATURES gives Numba these alone.
SSE = {"64bit", "cmov", "cx8", "cx16", "fxsr", "mmx", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"}
AVX2 = SSE | {"sahf", "avx", "avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe", "xsave"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
OLDER = {"nehalem": SSE, "haswell": AVX2, "skylake-avx512": AVX512}  # the first has no fused multiply-adds


@pytest.mark.parametrize("processor", OLDER)
def test_older_instruction_sets_give_the_same_bits(processor):
    """In a process of its own, which compiles everything for that processor."""
    wanted = OLDER[processor]
    if not features().issuperset(wanted):
        pytest.skip(f"this processor cannot run code for {processor}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "DASKGPT_"))}
    environment |= {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in sorted(wanted)),
    }
    command = [sys.executable, one_number.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == EXPECTED["float32"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", sorted(LARGER))
def test_bits_of_larger_models_match_the_golden_bits(name, unit):
    test_one_number.test_no_chunk_changes_a_bit(name, unit)
    test_one_number.test_bits_match_the_golden_bits(name, unit)


def test_campaign_runs_as_a_command():
    command = [sys.executable, str(Path(campaign.__file__)), "--cases", "30", "--seed", str(one_number.seed())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("30 cases, 0 failed: ")


def test_import_loads_neither_dask_nor_numba():
    code = "import sys, daskgpt; print('dask' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == ["False", "False"]


def test_run_of_threads_loads_nothing_of_clusters(tmp_path):
    flags = ["--scheduler", "threads", "--steps", "1", "--sample-tokens", "0", "--out", str(tmp_path / "run")]
    code = f"import sys; from daskgpt import train; train.main({flags}); print('distributed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split()[-1] == "False", done.stderr
