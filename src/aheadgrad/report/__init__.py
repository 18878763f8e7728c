"""Reports: what each stage did, how long it took, what it decided."""
