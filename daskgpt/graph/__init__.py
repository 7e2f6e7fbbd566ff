"""Finished task graphs and the passes over them. Knows nothing of GPT-2."""
