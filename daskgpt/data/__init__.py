"""From text to tokens to batches. Nothing here knows of Dask."""
