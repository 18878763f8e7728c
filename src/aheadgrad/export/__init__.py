"""Programs with their meaning, to be run, changed and kept elsewhere."""
