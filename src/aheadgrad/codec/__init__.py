"""Stage values as plain data, and back."""
