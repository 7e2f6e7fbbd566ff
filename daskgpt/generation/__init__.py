"""Generation of text, and likelihoods of texts."""
