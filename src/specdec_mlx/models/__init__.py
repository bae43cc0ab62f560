"""Loaded models: how they are loaded, and the parts that they are made of."""
