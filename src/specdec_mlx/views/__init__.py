"""HTML views of texts and statistics."""
