"""Text, tokens and batches. This package does not use Dask."""
