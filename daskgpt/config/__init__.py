"""Configurations of models and runs, and the form of flags, files and errors. Imports nothing else of the package."""
