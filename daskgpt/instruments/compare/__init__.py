"""The same training step in other programs, measured beside ours."""
