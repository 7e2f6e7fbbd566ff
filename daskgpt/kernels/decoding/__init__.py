"""The next tokens of a few texts: products that read every weight once, and attention over kept keys and values.

Threads call the same function at the same time and divide its rows among themselves. Each number is computed by one
thread in one order, so neither the number of threads nor the other texts of a batch change a bit.
"""
