"""GPT-2 training as a Dask dataflow of Numba kernels.

import daskgpt
config, parameters = daskgpt.load("runs/first")
loss, gradients = daskgpt.loss_and_gradients(config, parameters, tokens, targets)   # lazy dask arrays
result = daskgpt.train(daskgpt.preset("tiny"))
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# Where each public name lives; loaded when it is first asked for, so that a command line starts fast and
# `python -m daskgpt.train` is not imported twice.
_PUBLIC = {
    "DataConfig": "config",
    "DataflowConfig": "config",
    "GPT2Config": "config",
    "OptimizerConfig": "config",
    "RunConfig": "config",
    "preset": "config",
    "initial_parameters": "parameters",
    "load": "run_folder",
    "loss_and_gradients": "step",
    "open_scheduler": "schedulers",
    "train": "training",
}

__all__ = ["DataConfig", "DataflowConfig", "GPT2Config", "OptimizerConfig", "RunConfig", "initial_parameters"]
__all__ += ["load", "loss_and_gradients", "open_scheduler", "preset", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'daskgpt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"daskgpt.{_PUBLIC[name]}"), name)
