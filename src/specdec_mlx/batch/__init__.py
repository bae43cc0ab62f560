"""Several texts of one model, generated together, and their schedule."""
