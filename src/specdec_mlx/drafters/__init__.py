"""Ways to draft, one file each. They know the contracts in `types`, and nothing of the loop."""
