"""Run time: one generated entry function, and the autograd nodes behind it."""
