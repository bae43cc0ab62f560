"""Acceptance rules: how much of a draft is kept, and what follows."""
