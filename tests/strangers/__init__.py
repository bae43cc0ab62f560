"""Other people's extensions, a file each: they import only what is public."""
