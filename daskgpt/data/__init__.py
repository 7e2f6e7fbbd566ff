"""Text, tokens and batches; only `preparation` uses Dask."""
