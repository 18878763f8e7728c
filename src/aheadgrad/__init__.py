"""aheadgrad: compiles PyTorch functions and modules ahead of time, forward and backward together.

import aheadgrad
fast = aheadgrad.compile(model)
"""

from aheadgrad import errors
from aheadgrad.api import capture, compile
from aheadgrad.backends.registry import register_backend
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.misses import Miss, explain_misses
from aheadgrad.report.journal import log_as_asked
from aheadgrad.report.text import Captured

__version__ = "0.1.0"
__all__ = [
    "Captured",
    "CompiledFunction",
    "Miss",
    "__version__",
    "capture",
    "compile",
    "errors",
    "explain_misses",
    "register_backend",
]

log_as_asked()
