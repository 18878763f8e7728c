"""aheadgrad: compiles PyTorch functions and modules ahead of time, forward and backward together.

import aheadgrad
fast = aheadgrad.compile(model)
"""

from aheadgrad import errors
from aheadgrad.api import capture, compile
from aheadgrad.backends.registry import register_backend
from aheadgrad.capture.stage import Captured
from aheadgrad.frontends.entries import Compiled

__version__ = "0.1.0"
__all__ = ["Captured", "Compiled", "__version__", "capture", "compile", "errors", "register_backend"]
