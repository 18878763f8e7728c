"""Functions and modules to differentiate: `CASES`, by name."""

from . import functions, layers, losses, programs
from .cases import CASES, Case

__all__ = ["CASES", "Case", "functions", "layers", "losses", "programs"]
