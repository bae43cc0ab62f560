"""From what a user gives to a drafter."""
