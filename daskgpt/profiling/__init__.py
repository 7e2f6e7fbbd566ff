"""Instruments: measurements, timelines, plans, plots. The training loop does not know them."""
