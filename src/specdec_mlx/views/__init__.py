"""HTML views and plots of what `stats` counted."""
