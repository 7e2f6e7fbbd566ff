"""The next tokens of a few texts: products that read every weight once, and attention over kept keys and values.

Threads call the same function at the same time and share out its rows among themselves. A number that comes of it is
made by one thread in one order, so neither threads nor the other texts of a batch change a bit of it.
"""
