"""Configurations of models and runs, flags, files and errors. These modules import no other part of the package."""
