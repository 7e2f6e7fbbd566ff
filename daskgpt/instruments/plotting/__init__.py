"""Curves of runs from their metrics: as a picture, or as a page that needs no network."""
