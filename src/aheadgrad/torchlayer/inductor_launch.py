"""Launching Triton kernels once more.

Before torch 2.13, every launch of one of Inductor's kernels takes the way of the first, which may have to
compile, to tune, to dump. That can take as long as the launch; later torch remembers what came out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.autograd import profiler
from torch.utils._debug_mode import get_active_debug_mode


@contextmanager
def launched_directly() -> Iterator[None]:
    """From their first launch on, the kernels of code that is loaded meanwhile."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = AsyncCompile.wait

    def wait(self: Any, scope: dict[str, Any]) -> None:
        original(self, scope)
        for name, value in list(scope.items()):
            if type(value) is CachingAutotuner and not hasattr(value, "_cached_launcher"):
                scope[name] = _Kernel(value)

    with patch.object(AsyncCompile, "wait", wait):
        yield


class _Kernel:
    """In the place of one of Inductor's."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.run = self._first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def _first(self, *args: Any, **options: Any) -> Any:
        result = self.kernel.run(*args, **options)
        if len(self.kernel.launchers) == 1 and _only_launches(self.kernel):
            self.run = _again(self.kernel.run, self.kernel.launchers[0])
        return result


def _only_launches(kernel: Any) -> bool:
    launcher = kernel.launchers[0]
    dumps = kernel.dump_launch_params or kernel.dump_launch_tensors or kernel.triton_interpret
    return not (dumps or launcher.store_cubin or getattr(launcher, "global_scratch", None))


def _again(run: Callable[..., Any], launcher: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, stream: Any, **options: Any) -> Any:
        if options or profiler._is_profiler_enabled or get_active_debug_mode():
            return run(*args, stream=stream, **options)
        return launcher(*args, stream=stream)

    return launch
