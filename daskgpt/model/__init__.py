"""GPT-2: its tables of parameters and layers, its drawing, and the tape that walks it back."""
