"""The decorator of the kernels: signatures, one compilation a dtype, the cache on disk between processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from daskgpt.kernels import compilation
from daskgpt.kernels.compilation import KERNELS, all_cached, compile_all, wide_vectors

SOURCE = """
import numpy as np
from daskgpt.kernels.compilation import kernel

@kernel("r1 i1 f n w1")
def weighted(x, indices, factor, shift, y):
    for i in range(x.size):
        y[i] = factor * x[indices[i]] + shift

def check():
    for dtype in ("float32", "float64"):
        x, y = np.arange(5, dtype=dtype), np.empty(5, dtype)
        weighted(x, np.array([4, 3, 2, 1, 0], "i4"), 2.0, 1, y)
        assert y.tolist() == [9, 7, 5, 3, 1], y

def hits():
    dispatchers = [weighted.compile(kind) for kind in "fd"]
    return [dispatcher.stats.cache_hits[dispatcher.signatures[0]] for dispatcher in dispatchers]
"""
ORDER = np.array([2, 0, 1], "i4")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a module with one kernel lies; its cache is made beside it."""
    (tmp_path / "weighted_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # wherever NUMBA_CACHE_DIR points
    return tmp_path


@pytest.fixture
def module(folder):
    """The module, taken out of the registry afterwards."""
    loaded = importlib.import_module("weighted_module")
    yield loaded
    KERNELS.remove(loaded.weighted)
    del sys.modules["weighted_module"]


def start(folder: Path) -> subprocess.Popen:
    """Another process that runs the kernel for both dtypes and prints how many versions came from the cache."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(compilation.__file__).parents[2]), str(folder)])
    code = "import weighted_module; weighted_module.check(); print(weighted_module.hits())"
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_each_dtype_is_compiled_once_also_for_read_only_arrays(module):
    module.check()
    x = np.arange(3, dtype="f4")
    x.flags.writeable = False
    indices = ORDER.copy()
    indices.flags.writeable = False
    y = np.empty(3, "f4")
    module.weighted(x, indices, 3.0, 0, y)
    assert y.tolist() == [6, 0, 3]
    for kind in "fd":
        assert len(module.weighted.compile(kind).signatures) == 1


@pytest.mark.parametrize("dtype", ["float16", "int32", "complex64"])
def test_other_dtypes_are_refused(module, dtype):
    with pytest.raises(TypeError) as error:
        module.weighted(np.ones(3, dtype), ORDER, 1.0, 0, np.ones(3, dtype))
    assert str(error.value) == (
        f"weighted_module.weighted: arrays must be float32 or float64; got dtype={dtype}. Convert them first."
    )


@pytest.mark.parametrize(("indices", "result"), [("i8", "f4"), ("i4", "f8")])
def test_mixed_dtypes_are_refused(module, indices, result):
    with pytest.raises(TypeError) as error:
        module.weighted(np.ones(3, "f4"), ORDER.astype(indices), 1.0, 0, np.ones(3, result))
    assert str(error.value) == (
        "weighted_module.weighted: float arrays must have one dtype, index arrays int32; "
        f"got dtypes=float32, {np.dtype(indices)}, {np.dtype(result)}. Convert them first."
    )


def test_a_second_process_loads_what_the_first_compiled(module, folder):
    assert not any(module.weighted.is_cached(kind) for kind in "fd")
    module.check()
    assert all(module.weighted.is_cached(kind) for kind in "fd")
    assert start(folder).communicate()[0].strip() == "[1, 1]"


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(folder):
    processes = [start(folder) for _ in range(3)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert start(folder).communicate()[0].strip() == "[1, 1]"


def test_code_of_older_source_is_removed(module, monkeypatch):
    module.check()
    cache = Path(module.weighted.compile("f").stats.cache_path)
    before = {path.name for path in cache.glob("weighted_module.*.nb?")}
    assert len(before) == 4  # an index and the code for each dtype
    monkeypatch.setattr(compilation, "_source_fingerprint", lambda: "changed0")
    newer = compilation.Kernel(module.weighted.function, "r1 i1 f n w1")
    assert not newer.is_cached("f")
    newer.compile("f")
    after = {path.name for path in cache.glob("weighted_module.*.nb?")}
    assert {name for name in after & before if "float32" in name} == set()
    assert {name for name in after & before if "float64" in name} == {name for name in before if "float64" in name}
    assert sum("changed0" in name for name in after) == 2


def test_a_function_without_a_file_is_compiled_without_a_cache():
    names: dict = {"__name__": "nowhere"}
    exec(compile("def nowhere(x): x[0] = 7", "<no file>", "exec"), names)
    function = names["nowhere"]
    kernel = compilation.Kernel(function, "w1")
    x = np.zeros(2)
    kernel(x)
    assert x.tolist() == [7, 0]
    assert not compilation.Kernel(function, "w1").is_cached("d")


def test_importing_the_kernels_compiles_nothing_and_needs_no_dask():
    code = (
        "import sys; from daskgpt.kernels import compilation; kernels = list(compilation._all_kernels()); "
        "print(len(kernels) > 20, any(k._compiled for k in kernels), 'dask' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(compilation.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False", "False"]


@pytest.mark.slow
def test_compile_all_leaves_every_kernel_in_the_cache():
    compile_all(np.float32)
    assert all_cached(np.float32)
    assert all(kernel.is_cached(kernel.kind_of("f4")) for kernel in KERNELS)


def test_wide_vectors_marks_the_function_that_asks():
    def narrow(x):
        for i in range(x.size):
            x[i] += 1

    def wide(x):
        wide_vectors()
        for i in range(x.size):
            x[i] += 1

    marks = []
    for function in (narrow, wide):
        compiled = numba.njit("void(float32[::1])")(function)
        marks.append('"prefer-vector-width"="512"' in next(iter(compiled.inspect_llvm().values())))
    assert marks == [False, True]
