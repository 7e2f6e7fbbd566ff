"""The arithmetic of GPT-2 on NumPy arrays: a file per kind of layer, with forward and backward kernels.

Every public kernel takes NumPy arrays and returns new ones. Inputs are only read, so they may be read-only; float32
and float64 run the same source; a result depends on the values alone, not on where the arrays lie or which thread
runs. A *summing* kernel takes `total` and `accumulate`: it writes its sum into `total`, or adds the sum to it, and
returns `total`.

Each of these modules imports only those below it:

    bfloat16/            the layers that `--precision bfloat16` replaces, and their products
    crossentropy         the loss, with the linear layer before it
    attention, linear …  the layers and the optimizers
    dropout              the layer, and the random numbers that decide which probabilities attention drops
    float32/             products inside kernels, called by their address
    native               many native calls as one; subnormal numbers count as zero
    totals               totals of groups that are added in a fixed tree
    arguments            checks and views of arguments
    simd/                code on several numbers at a time, and on memory by its address
    compilation          how a kernel is compiled, once per dtype, and cached on disk
    tracing              arrays without data, with which a kernel tells what it would call
"""

import os

from daskgpt.config.errors import require, require_in_imports

_got: dict[str, object] = {}
try:
    import numba
except (ImportError, OSError, ValueError) as error:  # of versions that do not fit, too little memory, or a variable
    _variables = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    _got = {type(error).__name__: str(error).partition("\n")[0].rstrip("."), **_variables}
_rule, _advice = "Numba must compile kernels", "Unset the variable, raise ulimit -v, or install numba and numpy again."
require_in_imports(not _got, _rule, _got, _advice)


def require_compiler() -> None:
    """Raise RuntimeError if Numba's settings forbid to compile."""
    got = {"NUMBA_DISABLE_JIT": numba.config.DISABLE_JIT}
    require(not numba.config.DISABLE_JIT, "daskgpt", _rule, got, "Unset the variable.", RuntimeError)
