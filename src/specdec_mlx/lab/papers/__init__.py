"""Systems of papers that no default uses."""
