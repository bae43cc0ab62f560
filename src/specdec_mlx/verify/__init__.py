"""The target's side: its pass, exactness, and the way back for its caches."""
