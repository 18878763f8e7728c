"""What Dynamo does besides understanding a function, left out where nobody asks for it.

It reads through each file that it meets for the sake of logs, times the guards that it has made, and loads a
part of torch to see whether it was handed a function from there. For a small model that takes as long as all
the rest.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo import guards, symbolic_convert
from torch._dynamo.variables import higher_order_ops
from torch._logging._internal import log_state
from torch.utils import _traceback

_LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"


_shortened = functools.cache(_traceback.shorten_filename)  # asked for with each guard


@contextmanager
def nothing_besides() -> Iterator[None]:
    with ExitStack() as patches:

        def put(owner: Any, name: str, other: Any) -> None:
            if hasattr(owner, name):
                patches.enter_context(patch.object(owner, name, other))

        if not any(map(log_state.is_artifact_enabled, ("trace_call", "trace_source"))):
            put(symbolic_convert, "get_funcname", lambda file, line: None)
        if not log_state.is_artifact_enabled("guards"):
            put(guards, "profile_guard_manager", lambda *args: 0.0)
        put(_traceback, "shorten_filename", _shortened)
        mapped = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
        is_mapped: Any = getattr(mapped, "should_wrap_in_hop", None)
        put(mapped, "should_wrap_in_hop", lambda value: _LOCAL_MAP in sys.modules and is_mapped(value))
        yield
