"""Files of models and tokens."""
