"""HTML views of what `stats` counted."""
