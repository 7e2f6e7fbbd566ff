"""Instruments: measurements, timelines, comparisons, studies. The training loop does not know them."""
