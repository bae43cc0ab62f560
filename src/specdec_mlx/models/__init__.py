"""Loading models, and what is known of a loaded model."""
