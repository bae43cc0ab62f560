"""Trained heads: drafters that read the target's states, and models that draft in parallel."""
