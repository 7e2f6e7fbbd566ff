"""Float32 products inside kernels: a BLAS that is called by its address, and the package's own product."""
