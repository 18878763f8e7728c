"""Whole behaviours, compared with eager."""
