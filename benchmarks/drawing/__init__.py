"""Drawings of graphs and sums, made from the code that runs: the same call gives the same picture"""
