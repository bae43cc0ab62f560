"""Whether a pass over several positions is exact, and what it shows."""
