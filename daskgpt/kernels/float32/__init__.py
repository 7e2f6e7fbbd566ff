"""Float32 products: a BLAS called by its address inside kernels, and one of our own."""
