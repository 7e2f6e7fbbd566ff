"""Task graphs and the passes over them. This package is independent of GPT-2."""
