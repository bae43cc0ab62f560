"""Trees of draft tokens; imported when a draft forks."""
