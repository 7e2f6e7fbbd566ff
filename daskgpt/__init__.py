"""Language models trained as a Dask dataflow of Numba kernels.

import daskgpt
config, parameters = daskgpt.load("runs/first")
loss, gradients = daskgpt.loss_and_gradients(config, parameters, tokens, targets)   # lazy dask arrays
result = daskgpt.fit(daskgpt.preset("tiny"))
tokens = daskgpt.sample(result.config, result.parameters, prompt=[10], count=100)                   # one by one
daskgpt.save("model.safetensors", result.config, result.parameters)
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from typing import Any

from daskgpt.config.errors import require_in_imports  # at once: it looks whether this is a command

__version__ = "0.1.0"

_rule, _got = "the system must be Linux, or much like it", {"platform": sys.platform}
_advice = "On Windows, use WSL: run wsl --install, and install daskgpt there."
require_in_imports(find_spec("fcntl") is not None, _rule, _got, _advice)  # Windows has none

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # A command of this package has only begun its imports here: until `run_command`, Ctrl-C just ends it. An exception
    # during imports would print a traceback, and NumPy would report a broken NumPy.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# The public names of each module, which is loaded when one of them is used first, so that a command line starts fast.
_MODULES = {
    "config.model": "ModelConfig preset",
    "config.run": "DataConfig DataflowConfig OptimizerConfig RunConfig",
    "generation.sampler": "sample",
    "model.parameters": "digest initial_parameters",
    "profiling.measure": "measure",
    "profiling.plan": "plan",
    "profiling.recorder": "TimelineConfig TimelineCallback",
    "schedulers.opening": "open_scheduler",
    "training.checkpoint": "load save",
    "training.inference": "loss_and_gradients",
    "training.trainer": "fit",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'daskgpt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"daskgpt.{_PUBLIC[name]}"), name)
