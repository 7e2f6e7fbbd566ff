"""Schedulers that run graphs: context managers over Dask's own schedulers."""
