"""Vectors: what kernels compute with, many numbers at a time."""
