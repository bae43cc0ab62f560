"""What notebooks show: HTML and plots."""
