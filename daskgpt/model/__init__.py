"""GPT-2: its tables of parameters and layers, the model, and the tape for its backward pass."""
