"""One number: no chunk, grain, barrier, scheduler, thread or worker changes a bit of the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from one_number import MODELS, Dials, bits_after_steps, own_product, random_dials, seed
from product_cases import UNITS, using

from daskgpt.graph.calls import parse
from daskgpt.graph.sum_order import SumOrder
from daskgpt.instruments.layer_check import OPTIONS, lazy_arguments
from daskgpt.kernels.vectors.processor import features
from daskgpt.model.layers import LAYERS, Layer
from daskgpt.model.tape import Tape

needs_own_product = pytest.mark.skipif(
    not own_product(), reason="float32 products are a library's here, whose order of summation depends on the shapes"
)
CHUNKS = {
    "tiny": [(12, 64), (4, 64), (1, 64), (12, 32), (6, 16)],
    "odd": [(6, 20), (3, 20), (2, 20), (1, 20), (6, 10), (3, 10), (2, 5), (1, 4), (6, 1), (1, 1), (3, 2), (2, 10)],
    "long": [(3, 75), (1, 75), (3, 25), (1, 15), (1, 5), (3, 1)],
}
CHUNKS |= {"tiny in 4 groups": CHUNKS["tiny"], "odd in 2 groups": CHUNKS["odd"], "odd with muon": CHUNKS["odd"][::2]}
CHUNKS["odd with dropout"] = CHUNKS["odd"][1::2]
SIZES = {"b": 6, "t": 20, "T": 20, "C": 21, "X": 63, "O": 37, "V": 83, "P": 23}


@needs_own_product
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", *UNITS])
def test_no_chunk_changes_a_bit(name, precision):
    """bfloat16 with each unit that works here: one number each."""
    found = {}
    for chunk in CHUNKS[name]:
        if precision == "float32":
            found[chunk] = bits_after_steps(MODELS[name], precision, Dials(chunk))
        else:
            with using(precision):
                found[chunk] = bits_after_steps(MODELS[name], "bfloat16", Dials(chunk))
    assert set(found.values()) == {found[CHUNKS[name][0]]}, found


@pytest.mark.slow
@needs_own_product
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_combination_of_dials_changes_a_bit(precision):
    """A sample at random; DASKGPT_TEST_SEED repeats one."""
    number = seed()
    print(f"DASKGPT_TEST_SEED={number}")
    random = np.random.default_rng(number)
    for name, model in MODELS.items():
        expected = bits_after_steps(model, precision, Dials(model.batch))
        for dials in [random_dials(random, model) for _ in range(4)]:
            assert bits_after_steps(model, precision, dials) == expected, f"{name} {dials}"


@pytest.mark.slow
@needs_own_product
@pytest.mark.parametrize(("workers", "chunk", "grain"), [(2, (2, 20), "block"), (3, (3, 5), "chunk")])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("odd", "float32"),
        ("odd in 2 groups", "bfloat16"),
        ("odd with muon", "float32"),
        ("odd with muon", "bfloat16"),
    ],
)
def test_no_number_of_workers_changes_a_bit(name, precision, workers, chunk, grain):
    model = MODELS[name]
    expected = bits_after_steps(model, precision, Dials(model.batch))
    assert bits_after_steps(model, precision, Dials(chunk, "step", grain, "local", workers)) == expected


def arguments_of(layer: Layer) -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    values = {}
    for name, axes in zip(layer.forward.arguments.split(), parse(layer.forward.signature)[0], strict=True):
        shape = tuple(SIZES[axis] for axis in axes)
        values[name] = random.normal(size=shape).astype(np.float32)
        if name in ("tokens", "targets"):
            values[name] = random.integers(0, OPTIONS["vocabulary"], shape).astype(np.int32)
        if name == "positions":
            values[name] = np.arange(*shape, dtype=np.int32)
        if name == "streams":
            values[name] = random.integers(-(2**63), 2**63, shape)
    return values


@needs_own_product
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_every_layer_has_the_same_bits_however_the_batch_is_cut(layer, groups):
    """Forward and gradients: no row depends on its company, no sum on where a chunk ends."""
    values, expected = arguments_of(layer), None
    for chunk in CHUNKS["odd"]:
        tape, arrays = Tape(groups=groups), lazy_arguments(layer, values, chunk, SIZES)
        y = tape("here.0", layer, *arrays.values(), **OPTIONS | {"heads": 3})
        dy = np.random.default_rng(3).normal(size=y.shape).astype(np.float32)
        gradients = tape.backward(y, da.from_array(dy, chunks=y.chunks, name="dy-leaf"))
        found = {name: gradients[array.name] for name, array in arrays.items() if array.name in gradients}
        results = dask.compute(found | {"y": y}, scheduler="sync")[0]
        expected = expected or results
        for name, value in results.items():
            np.testing.assert_array_equal(
                value.view(np.int32), expected[name].view(np.int32), err_msg=f"{name} {chunk}"
            )


def test_rows_enter_a_sum_sequence_by_sequence():
    whole = SumOrder.of((2, 2), (20,), 1)
    assert whole == SumOrder((((0, 0),), ((1, 0),)), False, (2, 2))
    # A chunk of one sequence is one piece; of several, all their token chunks are.
    assert SumOrder.of((1,), (8, 8), 1).pieces == (((0, 0),), ((0, 1),))
    assert SumOrder.of((2, 1), (8, 8), 1).pieces == (((0, 0), (0, 1)), ((1, 0),), ((1, 1),))
    # A tile of 32 tokens that two chunks share is not cut.
    assert SumOrder.of((1,), (32, 32, 3), 32) == SumOrder((((0, 0),), ((0, 1),), ((0, 2),)), False, (1,))
    assert SumOrder.of((1,), (16, 16), 32) == SumOrder((((0, 0), (0, 1)),), True, (1,))


EXPECTED = json.loads((Path(__file__).parent / "golden" / "bits.json").read_text())
# Instruction sets as LLVM names them; NUMBA_CPU_FEATURES gives Numba these alone.
AVX2 = {"64bit", "cmov", "cx8", "cx16", "fxsr", "mmx", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"}
AVX2 |= {"avx", "avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe", "sahf", "xsave"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
OLDER = {"haswell": AVX2, "skylake-avx512": AVX512}


@needs_own_product
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", *UNITS])
def test_the_bits_are_those_of_every_other_machine(name, precision):
    """Files of expected bits: float32 has one number, bfloat16 one for each unit."""
    if precision == "float32":
        assert bits_after_steps(MODELS[name], precision, Dials(CHUNKS[name][2]), 20) == EXPECTED[precision][name]
        return
    with using(precision):
        key = f"bfloat16 {precision}"
        if key not in EXPECTED:
            pytest.skip(f"no machine with the unit {precision} has written its bits yet")
        assert bits_after_steps(MODELS[name], "bfloat16", Dials(CHUNKS[name][1]), 20) == EXPECTED[key][name]


@pytest.mark.slow
@pytest.mark.parametrize("processor", OLDER)
def test_code_for_an_older_processor_computes_the_same_bits(processor):
    """In a process of its own, which compiles everything for that processor."""
    wanted = OLDER[processor]
    if not features().issuperset(wanted):
        pytest.skip(f"this processor cannot run code for {processor}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "DASKGPT_"))}
    environment |= {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in sorted(wanted))}
    script = Path(__file__).parent / "one_number.py"
    found = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == EXPECTED["float32"]
