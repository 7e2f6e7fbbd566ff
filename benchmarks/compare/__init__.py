"""Other programs that compute the same GPT-2, for `benchmarks/against.py`."""
