"""What looks on: measurements, timelines, comparisons, studies. The training loop does not know them."""
