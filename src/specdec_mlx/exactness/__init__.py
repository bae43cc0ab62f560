"""Checks that a pass over several positions is exact, and the states of a pass for drafters."""
