"""How many tokens to draft: policies, and what they learn from."""
