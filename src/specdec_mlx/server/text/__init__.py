"""From tokens to events: stop strings, thoughts, tool calls, log-probabilities."""
