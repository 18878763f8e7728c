"""Backends: `compile(program, role) -> callable(list) -> list`."""
