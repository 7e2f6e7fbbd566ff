"""Tests of the decorator of the kernels: signatures, one compilation a dtype, the cache on disk."""

import importlib
import pickle
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from full_disk import full_disk
from numba.core.registry import cpu_target

from daskgpt.kernels import compilation, numba_internals
from daskgpt.kernels.compilation import KERNELS, Kernel, all_cached, compile_all

SIGNATURE = "r1 i1 f n w1"
SOURCE = f"""
from daskgpt.kernels.compilation import kernel

@kernel("{SIGNATURE}")
def weighted(x, indices, factor, shift, y):
    for i in range(x.size):
        y[i] = factor * x[indices[i]] + shift

@kernel("{SIGNATURE}", cost=9)
def large(x, indices, factor, shift, y):
    y[0] = 1
"""
ORDER = np.array([2, 0, 1], "i4")


@pytest.fixture
def weighted(tmp_path, monkeypatch):
    """A kernel of a module whose cache is made beside it; it is taken out of the registry afterwards."""
    (tmp_path / "weighted_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # wherever NUMBA_CACHE_DIR points
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)  # of other processes
    yield importlib.import_module("weighted_module").weighted
    module = sys.modules.pop("weighted_module")
    for kernel in (module.weighted, module.large):
        KERNELS.remove(kernel)


def test_each_dtype_is_compiled_once_also_for_read_only_arrays(weighted):
    indices = ORDER.copy()
    indices.flags.writeable = False
    for kind in "fd":
        x, y = np.arange(3, dtype=kind), np.empty(3, kind)
        for writeable in (True, False):
            x.flags.writeable = writeable
            weighted(x, indices, 3.0, 1, y)
            assert y.tolist() == [7, 1, 4]
        assert len(weighted.compile(kind).signatures) == 1


OTHER_DTYPES = [
    ("f2", "i4", "f2", "must be float32 or float64; got dtype=float16"),
    ("f4", "i8", "f4", "one dtype, index arrays int32; got dtypes=float32, int64, float32"),
    ("f4", "i4", "f8", "one dtype, index arrays int32; got dtypes=float32, int32, float64"),
]


@pytest.mark.parametrize(("x", "indices", "y", "message"), OTHER_DTYPES)
def test_other_and_mixed_dtypes_are_refused(weighted, x, indices, y, message):
    with pytest.raises(TypeError) as error:
        weighted(np.ones(3, x), ORDER.astype(indices), 1.0, 0, np.ones(3, y))
    assert message in str(error.value)


def test_cache_is_reused_and_stale_code_removed(weighted, monkeypatch):
    assert not any(weighted.is_cached(kind) for kind in "fd")
    for kind in "fd":
        weighted.compile(kind)
    assert all(weighted.is_cached(kind) for kind in "fd")
    again = Kernel(weighted.function, SIGNATURE)
    assert all(again.is_cached(kind) for kind in "fd")
    loaded = again.compile("f")
    assert loaded.stats.cache_hits[loaded.signatures[0]] == 1
    folder = Path(loaded.stats.cache_path)
    before = {path.name for path in folder.glob("weighted_module.*.nb?")}
    assert len(before) == 4  # an index and the code for each dtype
    monkeypatch.setattr(compilation, "_source_fingerprint", lambda module: "changed0")
    newer = Kernel(weighted.function, SIGNATURE)
    assert not newer.is_cached("f")
    newer.compile("f")
    after = {path.name for path in folder.glob("weighted_module.*.nb?")}
    assert before - after == {name for name in before if "float32" in name}
    assert len(after - before) == sum("changed0" in name for name in after) == 2


def test_a_function_without_a_file_is_compiled_without_a_cache():
    names: dict = {"__name__": "nowhere"}
    exec(compile("def nowhere(x): x[0] = 7", "<no file>", "exec"), names)
    x = np.zeros(2)
    Kernel(names["nowhere"], "w1")(x)
    assert x.tolist() == [7, 0]
    assert not Kernel(names["nowhere"], "w1").is_cached("d")


def test_compile_all_leaves_every_wanted_kernel_in_the_cache(weighted, monkeypatch):
    assert len(list(compilation._all_kernels())) > 20
    rounding = Kernel(weighted.function, "r1 i1 f n w1")
    rounding.name = "daskgpt.kernels.bfloat16.rounding"
    whole = Kernel(weighted.function, "l1 i1 n n L1")
    monkeypatch.setattr(compilation, "_all_kernels", lambda: [weighted, rounding, whole])
    told: list = []
    assert not all_cached(np.float64)
    compile_all(np.float64, bfloat16=False, after_each=lambda: told.append(None))
    assert [list(kernel._compiled) for kernel in (weighted, rounding, whole)] == [["d"], [], ["any"]]
    assert len(told) == 2
    assert all_cached(np.float64, bfloat16=False)
    compile_all(np.float64)
    assert list(rounding._compiled) == ["d"]
    assert not all_cached(np.float32)


def test_processes_share_the_work_and_leave_out_what_a_run_does_not_use(weighted, monkeypatch):
    large = sys.modules["weighted_module"].large
    monkeypatch.setattr(compilation, "_all_kernels", lambda: [weighted, large])
    monkeypatch.setattr(weighted, "use", "decoding")
    compile_all(np.float32, uses={"muon"})
    assert [kernel.is_cached("f") for kernel in (weighted, large)] == [False, True]
    compile_all(np.float64, uses={"decoding"}, processes=2)
    loaded = [bool(kernel.compile("d").stats.cache_hits) for kernel in (weighted, large)]
    assert loaded == [True, False]


@pytest.mark.parametrize(
    ("changed", "differs"),
    [("elementwise", True), ("simd.math", True), ("simd.lanes", True), ("compilation", True), ("attention", False)],
)
def test_fingerprint_covers_what_a_module_imports(changed, differs, monkeypatch):
    source = compilation._source
    before = compilation._source_fingerprint("daskgpt.kernels.elementwise")

    def changed_source(module):
        text, imported = source(module)
        return text + b"#" * (module == f"daskgpt.kernels.{changed}"), imported

    monkeypatch.setattr(compilation, "_source", changed_source)
    assert (compilation._source_fingerprint.__wrapped__("daskgpt.kernels.elementwise") != before) == differs


def test_numba_is_a_version_whose_internals_are_known():
    assert numba_internals.KNOWN, f"look at {numba_internals.__file__} and at Numba {numba.__version__}"


WITH_HELPER = """
@helper
def scaled(value, factor):
    return value * factor + 1

def both(x, y):
    for i in range(x.size):
        y[i] = scaled(x[i], 2) - scaled(x[i], 3)
"""


@pytest.mark.parametrize("internals_known", [True, False])
def test_included_functions_compute_the_same_in_both_ways(internals_known, monkeypatch):
    monkeypatch.setattr(numba_internals, "KNOWN", internals_known)
    codegen = cpu_target.target_context.codegen()

    names: dict = {"__name__": "nowhere", "helper": compilation.helper}
    exec(compile(WITH_HELPER, "<no file>", "exec"), names)
    x, y = np.arange(40, dtype="f4") / 7, np.empty(40, "f4")
    before = codegen._library_class
    compiled = Kernel(names["both"], "r1 w1").compile("f")
    assert codegen._library_class is before
    compiled(x, y)
    exact = x.astype("f8")  # of what a number without a dtype takes part in
    assert np.array_equal(y, ((exact * 2 + 1) - (exact * 3 + 1)).astype("f4"))
    assert len(names["scaled"].signatures) == (1 if internals_known else 2)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-40])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": truncated,
    "flipped": flipped,
    "another version's": lambda path: path.write_bytes(pickle.dumps("0.1.0") + path.read_bytes()),
    "another kernel's": lambda path: path.write_bytes(next(path.parent.glob(f"*large*{path.suffix}")).read_bytes()),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_damaged_files_of_the_cache_are_removed_and_made_again(damage, ending, weighted):
    sys.modules["weighted_module"].large.compile("f")
    folder = Path(weighted.compile("f").stats.cache_path)
    (path,) = folder.glob(f"weighted_module.weighted*{ending}")
    DAMAGES[damage](path)
    again = Kernel(weighted.function, SIGNATURE)
    assert not again.is_cached("f")
    assert not list(folder.glob("weighted_module.weighted*"))
    x, y = np.arange(3, dtype="f"), np.empty(3, "f")
    again(x, ORDER, 3.0, 1, y)
    assert y.tolist() == [7, 1, 4]
    loaded = Kernel(weighted.function, SIGNATURE).compile("f")
    assert loaded.stats.cache_hits[loaded.signatures[0]] == 1


@pytest.fixture
def cache(monkeypatch):
    """A process that has not kept a kernel yet."""
    monkeypatch.setattr(compilation, "CACHE", compilation.Cache())
    return compilation.CACHE


def test_kernels_that_cannot_be_kept_are_compiled_once(weighted, cache, monkeypatch):
    """Numba writes to no folder that the environment does not name."""
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(compilation, "_all_kernels", lambda: [weighted])
    monkeypatch.setattr(compilation, "_start_compiling", lambda *_: pytest.fail("what it compiles cannot be kept"))
    compile_all(np.float64, processes=2)
    line = cache.told(2.5)
    assert "compiled at each start (no folder can be written); compiling them took 2.5 s" in line
    assert cache.told(2.5) == "", "it is said once"


def test_a_full_folder_keeps_nothing(weighted, cache):
    full = weighted._dispatcher("f")[0].stats.cache_path
    with full_disk(1000):
        weighted.compile("f")
        weighted.compile("d")
    assert cache.problem == f"{full}: File too large"
    assert [weighted.compile(kind).stats.cache_path for kind in "fd"] == [full, None]
    assert not Kernel(weighted.function, SIGNATURE).is_cached("f")


def test_settings_of_numba_have_their_own_files(weighted, monkeypatch):
    weighted.compile("f")
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    monkeypatch.setattr(compilation, "_machine_fingerprint", compilation._machine_fingerprint.__wrapped__)
    assert not Kernel(weighted.function, SIGNATURE).is_cached("f")
