"""Several texts of one model at once, row by row."""
