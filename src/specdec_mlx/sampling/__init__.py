"""The distribution of the next token, and where randomness comes from."""
