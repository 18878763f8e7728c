"""Capture: one run of the user's function gives the forward, the facts and the gradients."""
