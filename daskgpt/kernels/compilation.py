"""The one decorator of the private Numba functions behind the kernels, their cache, and the registry that compiles all.

A kernel is written once and compiled twice, for float32 and for float64, at its first call with each. The two are
separate functions for Numba's cache on disk, because a cached function with a single signature cannot be mixed up by
processes that write the cache at the same time (numba#4807). Their names carry two fingerprints: one of the processor
and the Numba version, so that machines that share a folder do not overwrite each other's code, and one of the sources
that the kernel is made of, because Numba does not see that a helper in another file changed.

Numba runs whatever the files of its cache hold: with a damaged one a process crashes or computes wrong numbers. Each
file therefore ends with a seal, a SHA-256 of its name and content, which Numba does not read.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numpy.typing import DTypeLike

from daskgpt.config.errors import refusal
from daskgpt.kernels import require_compiler
from daskgpt.kernels.numba_internals import optimized_once, without_literals
from daskgpt.kernels.tracing import NotNative, Operand

# No fastmath: an operation is rounded as it is written, whatever compiler, processor or place in a loop. What is to be
# one rounding says so (`simd.math.fma`), and sums over a row have their own order (`simd.rows`).
_OPTIONS: dict[str, bool | str] = {"nogil": True, "error_model": "numpy"}
_FLOATS = {"f": numba.float32, "d": numba.float64}
_ELEMENTS = {"i": numba.int32, "h": numba.uint16, "l": numba.int64, "s": numba.float32, "d": numba.float64}
_ANY = "any"

# Settings of Numba, from its environment variables, that change code but not the keys of its cache.
_CODE_SETTINGS = ("OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX")

# Kernels that only `--precision bfloat16` needs; they take as long to compile as all others together.
_BFLOAT16 = "daskgpt.kernels.bfloat16."

_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"  # in the names of Numba's files

_IMPORT = re.compile(rb"^from (daskgpt\.kernels[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)

_SEAL_BYTES = hashlib.sha256().digest_size

KERNELS: list["Kernel"] = []

# Decorators of functions that kernels include. Python never calls them; the code for such calls would take a sixth of
# the time of compiling.
_INNER: dict[str, bool | str] = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def helper(function: Callable[..., Any]) -> Any:
    """Decorator of a function that is compiled into each place that calls it."""
    return without_literals(numba.njit(**_INNER, forceinline=True)(function))


def part(function: Callable[..., Any]) -> Any:
    """Decorator of a function that calls `stay_apart`, and is compiled once per kernel."""
    return without_literals(numba.njit(**_INNER)(function))


def for_float32(version: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator of a function that kernels include in two versions: with a first argument of float32 numbers
    they call `version` with the same arguments, and otherwise, as Python does, the function itself.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @overload(function, jit_options={"forceinline": True, "error_model": "numpy"}, strict=False)
        def chosen(*arguments):
            real = getattr(arguments[0], "dtype", arguments[0])
            return (lambda *arguments: version(*arguments)) if real == numba.float32 else function

        return function

    return decorate


def numba_type(word: str, real: numba.types.Type | None = None) -> numba.types.Type:
    """Return the Numba type of a word of a signature, such as r2 or w1; `kernel` explains the letters."""
    letter, count = word[0], word[1:]
    if letter in "nf" or not count:
        number = {"n": numba.int64, "f": real, **_ELEMENTS}[letter]
        return numba.types.UniTuple(number, int(count)) if count else number
    return numba.types.Array(_ELEMENTS.get(letter.lower(), real), int(count), "C", readonly=letter not in "wHLSD")


def instruction(arguments: str, result: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function that writes LLVM code into an intrinsic.

    `instruction("n n s", "n")` decorates a function of an llvmlite builder, two whole numbers and a float32 number,
    which returns a whole number; without a second text the intrinsic returns nothing. The letters are those of
    `kernel`.
    """
    typed = (numba_type(result) if result else numba.types.void)(*map(numba_type, arguments.split()))

    def decorate(write_code: Callable[..., Any]) -> Any:
        @functools.wraps(write_code)
        def definition(typing_context, *kinds):
            def generate(context, builder, signature, values):
                made = write_code(builder, *values)
                return made if result else context.get_dummy_value()

            return typed, generate

        return intrinsic(definition)

    return decorate


@instruction("")
def wide_vectors(builder):
    """Let LLVM use 512-bit vectors in the function that calls this, where the processor has them.

    LLVM's choice for these processors is 256 bits. Kernels bound by arithmetic (exp) run a fifth faster with 512,
    plain sums a tenth slower.
    """
    # llvmlite knows no attributes with a value, but writes whatever the set holds.
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')


@instruction("")
def stay_apart(builder):
    """Keep LLVM from inlining the function that calls this."""
    builder.function.attributes.add("noinline")


@functools.cache
def _machine_fingerprint() -> str:
    # What Numba compiles for: its environment variables can name another processor than this one, or slower code.
    settings = [getattr(numba.config, name, None) for name in _CODE_SETTINGS]
    text = f"{numba.__version__} {cpu_target.target_context.codegen().magic_tuple()} {settings}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def _source_fingerprint(module: str) -> str:
    """Return a digest of the sources of a module and of all modules in this folder that it imports, also indirectly."""
    sources: dict[str, bytes] = {}
    names = [module]
    while names:
        name = names.pop()
        if name not in sources:
            sources[name], imported = _source(name)
            names += imported
    return hashlib.sha256(b"".join(sources[name] for name in sorted(sources))).hexdigest()[:8]


@functools.cache
def _source(module: str) -> tuple[bytes, list[str]]:
    """Return the source of a module, empty if it has no file, and the modules of this folder that it imports."""
    path = getattr(sys.modules.get(module), "__file__", None)
    source = Path(path).read_bytes() if path else b""
    names = []
    for package, imported in _IMPORT.findall(source):
        names += [package.decode(), *(f"{package.decode()}.{word.decode()}" for word in re.findall(rb"\w+", imported))]
    return source, [name for name in names if name in sys.modules]


def _seal_of(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _is_sealed(path: Path, content: bytes) -> bool:
    """Return whether a file with this content is as it was when it was sealed."""
    return content[-_SEAL_BYTES:] == _seal_of(path, content[:-_SEAL_BYTES])


def _seal(path: Path) -> None:
    """Append a seal to a file that has none.

    Errors   OSError if there is no room
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:  # another process may have removed it
        content = file.read()
        if not _is_sealed(path, content):
            file.write(_seal_of(path, content))


class Cache:
    """The state of the folder that Numba chooses for compiled kernels.

    problem   why it keeps none; they are then compiled for this process alone
    """

    problem = ""
    _is_told = False

    def told(self, seconds: float) -> str:
        """Return a line, once in a process, about kernels that are not kept.

        seconds   that compiling kernels took
        """
        if not self.problem or self._is_told:
            return ""
        self._is_told = True
        took, advice = f"compiling them took {seconds:.1f} s", "Set NUMBA_CACHE_DIR to a folder with 16 MiB."
        return f"kernels are compiled at each start ({self.problem}); {took}. {advice}"


CACHE = Cache()


class Kernel:
    """A private Numba function in its float32 and float64 versions.

    A call chooses the version by the dtype of its arrays. A kernel that takes numbers of that dtype but no arrays is
    called as `compile(kind)(...)`.
    """

    def __init__(self, function: Callable[..., Any], signature: str, *, cost: int = 1, use: str = "") -> None:
        """Wrap a function that `kernel` decorates.

        cost   time to compile it; a small kernel has cost 1
        use    feature that needs it, such as an optimizer; "" = every run
        """
        self.function, self.cost, self.use = function, cost, use
        self.words = signature.split()
        self.name = f"{function.__module__}.{function.__qualname__}"
        arrays = [position for position, word in enumerate(self.words) if word[0] in "rw"]
        others = [position for position, word in enumerate(self.words) if word[0] in "ihHlLSdD"]
        self._witness = [*arrays, *others, 0][0]
        self._any = not any(word[0] in "rwf" for word in self.words)
        self._compiled: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        witness = arguments[self._witness]
        kind = _ANY if self._any else witness.dtype.char
        if isinstance(witness, Operand):
            return witness.trace.call(self.words, lambda: self.native_address(kind), kind, arguments)
        compiled = self._compiled.get(kind) or self.compile(kind)
        try:
            return compiled(*arguments)
        except TypeError as error:
            if any(isinstance(value, Operand) for value in arguments):
                raise NotNative("an operand beside arrays") from error
            dtypes = ", ".join(str(value.dtype) for value in arguments if isinstance(value, np.ndarray))
            rule = "float arrays must have one dtype, index arrays int32"
            raise refusal(TypeError, self.name, rule, {"dtypes": dtypes}, "Convert them first.") from error

    def kind_of(self, dtype: DTypeLike) -> str:
        """Return the key of the version of this kernel that serves `dtype`."""
        return _ANY if self._any else np.dtype(dtype).char

    def compile(self, kind: str) -> Any:
        """Compile one version, or load it from the cache on disk; return the compiled function."""
        dispatcher = self._compiled.get(kind)
        if dispatcher is None:
            dispatcher, _ = self._dispatcher(kind)
            try:
                with optimized_once():
                    dispatcher.compile(tuple(numba_type(word, _FLOATS.get(kind)) for word in self.words))
                stats = dispatcher.stats
                if stats.cache_misses and stats.cache_path is not None:
                    for path in self._files(kind, stats.cache_path):
                        _seal(path)
                    self._remove_outdated(kind, Path(stats.cache_path))
            except OSError as error:
                if not dispatcher.signatures:
                    raise
                CACHE.problem = f"{dispatcher.stats.cache_path}: {error.strerror}"  # it is compiled, but not kept
            dispatcher.disable_compile()
            self._compiled[kind] = dispatcher
        return dispatcher

    def address(self, kind: str = _ANY) -> int:
        """Return the address of one version as a C function, which other kernels can call."""
        compiled = self.compile(kind)
        result = compiled.overloads[compiled.signatures[0]]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))

    def native_address(self, kind: str) -> int:
        """Return the address of one version as Numba's code calls it: with words that say where it leaves its result
        and its error, and with each array as several words; it returns 0 if there was no error.
        """
        compiled = self.compile(kind)
        result = compiled.overloads[compiled.signatures[0]]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))

    def is_cached(self, kind: str) -> bool:
        """Return whether the cache on disk has this version; nothing is compiled."""
        return kind in self._compiled or self._dispatcher(kind)[1]

    def _is_kept(self, kind: str, folder: str) -> bool:
        """Return whether a folder has this version undamaged; remove its files otherwise.

        Errors   OSError if the system refuses
        """
        files = self._files(kind, folder)
        with contextlib.suppress(OSError):  # another process may have removed one
            sealed = all(_is_sealed(path, path.read_bytes()) for path in files)
            if sealed and {path.suffix for path in files} == {".nbi", ".nbc"}:
                return True
        for path in files:
            path.unlink(missing_ok=True)
        return False

    def _files(self, kind: str, folder: str) -> list[Path]:
        """Return the files in which Numba keeps a version for this Python: an index, and the code."""
        return list(Path(folder).glob(f"*.{self._variant(kind)}-*.{_PYTHON}.*nb[ci]"))

    def _stem(self, kind: str) -> str:
        dtype = _ANY if kind == _ANY else np.dtype(kind).name
        return f"{self.function.__qualname__}_{dtype}_{_machine_fingerprint()}_"

    def _variant(self, kind: str) -> str:
        return self._stem(kind) + _source_fingerprint(self.function.__module__)

    def _dispatcher(self, kind: str) -> tuple[Any, bool]:
        """Return the function that compiles or loads a version, and whether the cache on disk has it."""
        if kind != _ANY and kind not in _FLOATS:
            rule, got = "arrays must be float32 or float64", {"dtype": np.dtype(kind).name}
            raise refusal(TypeError, self.name, rule, got, "Convert them first.")
        require_compiler()
        copy = types.FunctionType(self.function.__code__, self.function.__globals__, self._variant(kind))
        copy.__qualname__, copy.__module__ = copy.__name__, self.function.__module__
        if os.path.exists(copy.__code__.co_filename) and not CACHE.problem:
            try:
                dispatcher = numba.njit(**_OPTIONS, cache=True)(copy)
                return dispatcher, self._is_kept(kind, dispatcher.stats.cache_path)
            except RuntimeError:
                CACHE.problem = "no folder can be written"
            except OSError as error:
                CACHE.problem = f"{error.filename}: {error.strerror}"
        return numba.njit(**_OPTIONS)(copy), False

    def _remove_outdated(self, kind: str, folder: Path) -> None:
        """Remove code that this machine compiled from older sources; processes that run it have it in memory."""
        module = self.function.__module__.rpartition(".")[2]
        for path in folder.glob(f"{module}.{self._stem(kind)}*"):
            if self._variant(kind) not in path.name:
                path.unlink(missing_ok=True)


def kernel(signature: str, *, cost: int = 1, use: str = "") -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator of a private Numba function: `kernel("r2 r1 w2 n f")` says what its arguments are.

    r = float array that is read, w = float array that is written, i = int32 array that is read, h = uint16 array that
    is read, H = uint16 array that is written, l and L = int64, d and D = float64, s and S = float32 whatever the others
    are, each with its number of dimensions and contiguous; n = whole number, f = number of the arrays' dtype, s =
    float32 number, d = float64 number, h = uint16 number, n3 and f3 = tuples of three of them. Arrays that are read may
    be read-only. `cost` and `use` are those of `Kernel`.
    """

    def register(function: Callable[..., Any]) -> Kernel:
        registered = Kernel(function, signature, cost=cost, use=use)
        KERNELS.append(registered)
        return registered

    return register


def _all_kernels() -> Iterator[Kernel]:
    package = __name__.rpartition(".")[0]
    folder = str(Path(__file__).parent)
    for module in pkgutil.walk_packages([folder], f"{package}."):
        importlib.import_module(module.name)
    yield from KERNELS


def _wanted(bfloat16: bool, uses: Container[str] | None = None) -> list[Kernel]:
    needed = (kernel for kernel in _all_kernels() if uses is None or not kernel.use or kernel.use in uses)
    return [kernel for kernel in needed if bfloat16 or not kernel.name.startswith(_BFLOAT16)]


def compile_all(
    dtype: DTypeLike,
    bfloat16: bool = True,
    uses: Container[str] | None = None,
    after_each: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> None:
    """Compile kernels for `dtype`, or load them from the cache on disk; others are compiled at their first call.

    A program calls this once before it starts other processes: they then only read the cache.

    bfloat16     whether kernels of bfloat16 products are compiled, too
    uses         features of the run (`Kernel.use`); kernels of other features are left out; None = all kernels
    after_each   called after each kernel, and now and then while other processes compile
    processes    number of processes that compile at the same time; within one, Numba compiles one function at a time
    """
    wanted = _wanted(bfloat16, uses)
    missing = [kernel for kernel in wanted if not kernel.is_cached(kernel.kind_of(dtype))]
    share_here, *others = _shares(missing, 1 if CACHE.problem else processes)
    started = [_start_compiling(share, dtype) for share in others if share]
    try:
        for kernel in share_here:
            kernel.compile(kernel.kind_of(dtype))
            after_each()
        for process in started:
            while process.poll() is None:
                after_each()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
    finally:
        for process in started:
            process.kill()
    for kernel in wanted:
        if kernel not in share_here:
            kernel.compile(kernel.kind_of(dtype))
            after_each()


def _shares(kernels: Iterable[Kernel], count: int) -> list[list[Kernel]]:
    """Share kernels out among processes, the largest first, each to the one that has least to do."""
    shares: list[list[Kernel]] = [[] for _ in range(count)]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.cost):
        # Another process has to start and to import first.
        min(shares, key=lambda share: sum(k.cost for k in share) + 4 * (share is not shares[0])).append(kernel)
    return shares


def _start_compiling(kernels: Sequence[Kernel], dtype: DTypeLike) -> "subprocess.Popen[bytes]":
    """Compile kernels in another process, which leaves them in the cache on disk."""
    code = f"from {__name__} import _compile_named; _compile_named()"
    return subprocess.Popen(
        [sys.executable, "-c", code, np.dtype(dtype).char, *(kernel.name for kernel in kernels)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # an error comes again where the kernel is called
        start_new_session=True,  # Ctrl-C is for this process
    )


def _compile_named() -> None:
    """Compile the kernels that the arguments of this process name."""
    dtype, *names = sys.argv[1:]
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
        for kernel in KERNELS:
            if kernel.name == name:
                kernel.compile(kernel.kind_of(dtype))


def all_cached(dtype: DTypeLike, bfloat16: bool = True, uses: Container[str] | None = None) -> bool:
    """Return whether the cache on disk holds all that `compile_all` would compile."""
    return all(kernel.is_cached(kernel.kind_of(dtype)) for kernel in _wanted(bfloat16, uses))
