"""The arithmetic of GPT-2 on NumPy arrays: one file a layer, the forward beside its backwards.

Every public kernel takes NumPy arrays and returns new ones. Inputs are only read, so they may be read-only; float32
and float64 run the same source; a result depends on the values alone, not on where the arrays lie or which thread
runs. A *summing* kernel takes `total` and `accumulate`: it writes its sum into `total`, or adds the sum to it, and
returns `total`.

Each of these knows only what comes after it:

    bfloat16/            the layers that `--precision bfloat16` replaces, and their products
    attention, linear …  the layers, the loss and the optimizers
    dropout              the layer, and the random numbers that attention drops probabilities by
    float32/             products inside kernels: BLAS by its address, or one of our own
    arguments            checks and views of arguments
    floating_point       subnormal numbers count as zero
    totals               totals of groups that are added in a fixed tree
    simd/                code on several numbers at a time, and on memory by its address
    compilation          how a kernel is compiled, once a dtype, and cached on disk
"""
