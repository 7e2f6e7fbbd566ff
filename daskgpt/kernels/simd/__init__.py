"""Code on many numbers at a time: lanes of vectors, elementary functions, and sums and softmax of rows."""
