"""Configurations of models and runs, and the form of flags, files and errors. Nothing else of the package is used."""
