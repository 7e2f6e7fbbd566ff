"""From text to tokens to batches. This package does not use Dask."""
