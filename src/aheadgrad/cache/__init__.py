"""Compiled entries kept on disk, found again by other processes (docs/cache.md)."""
