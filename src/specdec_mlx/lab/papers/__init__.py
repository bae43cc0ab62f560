"""Systems from papers that no default uses."""
