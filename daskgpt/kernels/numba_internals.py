"""All uses of undocumented parts of Numba. They reduce the time to compile functions that kernels include.

They apply to the versions of Numba that `SEEN_IN` names. With others, Numba compiles kernels in its own way, which
takes longer and gives the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import llvmlite.binding
import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

SEEN_IN = ("0.68.",)  # beginnings of the version
KNOWN = numba.__version__.startswith(SEEN_IN)
_PYTHON, _C, _ENVIRONMENT = "_ZN7cpython", "cfunc.", "_ZN08NumbaEnv"  # begin the names of wrappers and environments


def without_literals(dispatcher: Any) -> Any:
    """Compile a function once for all numbers of a type; Numba would give each literal in the source its own type."""
    if KNOWN and not numba.config.DISABLE_JIT:
        find, unliteral = dispatcher.get_call_template, numba.types.unliteral
        dispatcher.get_call_template = lambda args, kws: find(
            tuple(map(unliteral, args)), {name: unliteral(value) for name, value in kws.items()}
        )
    return dispatcher


@contextlib.contextmanager
def optimized_once() -> Iterator[None]:
    """Compile the kernel of this `with` block without separate machine code for the functions that it includes.

    Numba optimizes and compiles each included function, and does both again for the kernel with all of them. A
    function that Python cannot call is only ever included, so the first compilation is left out.
    """
    if not KNOWN:
        yield
        return
    with global_compiler_lock:
        codegen = cpu_target.target_context.codegen()
        library, codegen._library_class = codegen._library_class, _Library
        try:
            yield
        finally:
            codegen._library_class = library


class _Library(JITCodeLibrary):
    """The code of one function while a kernel is compiled."""

    _final_module: Any

    @property
    def _is_included(self) -> bool:
        names = (function.name for function in self._final_module.functions if not function.is_declaration)
        return not any(name.startswith((_PYTHON, _C)) for name in names)

    def _optimize_final_module(self) -> None:
        if not self._is_included:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        included, whole = self._is_included, self._final_module
        if included:  # Python and Numba look for nothing but the function's environment in its machine code
            names = [variable.name for variable in whole.global_variables if variable.name.startswith(_ENVIRONMENT)]
            lines = "".join(f'@"{name}" = common global ptr null\n' for name in names)
            self._final_module = llvmlite.binding.parse_assembly(lines)
        super()._finalize_final_module()
        self._final_module = whole
