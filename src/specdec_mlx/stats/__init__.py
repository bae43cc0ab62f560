"""What happened, what would have happened, and what theory expects."""
