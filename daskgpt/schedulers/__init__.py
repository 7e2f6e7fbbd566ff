"""Who runs a graph: context managers over Dask's own schedulers."""
