"""Code on many numbers at a time: lanes of vectors, elementary functions, reductions, and scratch memory."""
