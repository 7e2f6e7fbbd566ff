"""What a model and a run are made of, and how flags, files and errors look. Knows nothing else of the package."""
