"""Beam search with a drafter: the likeliest continuations of a prompt, several steps a pass."""
