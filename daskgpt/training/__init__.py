"""Training: steps, the loop, the run folder."""
