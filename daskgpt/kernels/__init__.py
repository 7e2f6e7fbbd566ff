"""The arithmetic of GPT-2 on NumPy arrays: one file a layer, the forward beside its backwards.

Every public kernel takes NumPy arrays and returns new ones. Inputs are only read, so they may be read-only; float32
and float64 run the same source; a result depends on the values alone, not on where the arrays lie or which thread
runs. A *summing* kernel takes `total` and `accumulate`: it writes its sum into `total`, or adds the sum to it, and
returns `total`.
"""
