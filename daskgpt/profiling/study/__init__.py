"""A grid of runs, its table, figures and report."""
