"""aheadgrad: compiles PyTorch functions and modules ahead of time, forward and backward together.

import aheadgrad
fast = aheadgrad.compile(model)
"""

from aheadgrad import errors
from aheadgrad.api import capture, compile, export, load
from aheadgrad.backends.registry import register_backend
from aheadgrad.export.exported import Exported
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.misses import Miss, explain_misses
from aheadgrad.options import Policy, recompute, save
from aheadgrad.report.journal import log_as_asked
from aheadgrad.report.memory import MemoryReport
from aheadgrad.report.text import Captured

__version__ = "0.1.0"
__all__ = [
    "Captured",
    "CompiledFunction",
    "Exported",
    "MemoryReport",
    "Miss",
    "Policy",
    "__version__",
    "capture",
    "compile",
    "errors",
    "explain_misses",
    "export",
    "load",
    "recompute",
    "register_backend",
    "save",
]

log_as_asked()
