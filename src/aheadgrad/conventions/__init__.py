"""Conventions: what must happen around the program's call so that the result is eager's."""
