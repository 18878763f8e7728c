"""Partitioning: which values the forward keeps for the backward, and why."""
