"""The instruments: `run` measures live, `replay` models recorded texts offline."""
