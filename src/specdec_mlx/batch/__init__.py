"""Several texts of one model at once, and the schedule of them."""
