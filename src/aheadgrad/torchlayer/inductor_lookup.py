"""Looking a graph up in Inductor's cache, quickly.

What Inductor does on the way for those who debug it is left out where nobody does, and its digest of torch's
own files is kept beside its compiled code. Keys and results are the same.
"""

from __future__ import annotations

import builtins
import copy
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import graph_module

_EXTENSIONS = "torch.utils.cpp_extension"
_NO_SOURCES = ("bin", "include", "lib", "share")
_TRACE = logging.getLogger("torch.__trace")


@contextmanager
def looked_up_quickly() -> Iterator[None]:
    """Around Inductor's inner compile."""
    from torch._inductor import codecache, compile_fx, cpp_builder
    from torch._inductor.runtime import compile_tasks

    _tell_key_of_torch()
    with ExitStack() as patches:

        def put(owner: Any, name: str, other: Any) -> None:
            patches.enter_context(patch.object(owner, name, other))

        if not codecache.log.isEnabledFor(logging.DEBUG) and not _TRACE.handlers:
            put(codecache.FxGraphCachePickler, "debug_lines", lambda pickler, details: [])
        if torch._dynamo.config.repro_after is None:
            put(compile_fx, "wrap_compiler_debug", _without_a_copy)
        patches.enter_context(patch.object(compile_tasks, "compile", _compiled_once, create=True))
        put(codecache, "compiled_fx_graph_hash", _of_text_only(codecache.compiled_fx_graph_hash))
        put(codecache, "CppTorchDeviceOptions", _made_once(codecache.CppTorchDeviceOptions))
        put(cpp_builder, "_get_torch_related_args", _without_setuptools(cpp_builder._get_torch_related_args))
        yield


def _of_text_only(digest: Callable[..., Any]) -> Callable[..., Any]:
    """A digest is made of a graph's Python text, which nobody is going to run: it is compiled if somebody
    does."""

    def later(source: str, scope: dict[str, Any], fields: Any = None) -> Callable[..., Any]:
        made = functools.cache(lambda: original(source, scope, fields))
        return lambda *args, **kwargs: made()(*args, **kwargs)

    def made(*args: Any, **kwargs: Any) -> Any:
        with patch.object(graph_module, "_forward_from_src", later):
            return digest(*args, **kwargs)

    original = graph_module._forward_from_src
    return made


def _compiled_once(source: str, path: str, mode: str, **how: Any) -> Any:
    """The bytecode of a file, kept beside it as that of any module."""
    return SourceFileLoader(path, path).get_code(path)


def _made_once(make: Any) -> Callable[..., Any]:
    """How a kernel is compiled is part of its key; it is the same for all kernels of a graph."""
    known: dict[str, Any] = {}

    def options(**how: Any) -> Any:
        key = repr(sorted(how.items()))
        if key not in known:
            known[key] = make(**how)
        return copy.copy(known[key])

    return options


def _without_setuptools(told: Any) -> Callable[..., Any]:
    """Where torch's headers and libraries lie is asked of a part of torch that builds extensions, and loads
    all of setuptools for that."""
    root = Path(torch.__file__).parent
    include = root / "include"
    both = [str(include), str(include / "torch" / "csrc" / "api" / "include")]
    known = SimpleNamespace(include_paths=lambda: list(both), TORCH_LIB_PATH=str(root / "lib"))

    def load(name: str, *how: Any) -> Any:
        return known if name == _EXTENSIONS and name not in sys.modules else builtins.__import__(name, *how)

    scope = {**told.__globals__, "__builtins__": {**vars(builtins), "__import__": load}}
    return FunctionType(told.__code__, scope, told.__name__, told.__defaults__, told.__closure__)


def _without_a_copy(compiler: Callable[..., Any], compiler_name: str) -> Callable[..., Any]:
    """For those who want to reproduce an error, Inductor copies each graph first."""
    return compiler


@functools.cache
def _tell_key_of_torch() -> None:
    """Inductor's keys have a digest of what is in all files of torch. They are read again where one of them
    has another size or time."""
    from torch._inductor.codecache import cache_dir, torch_key

    known = Path(cache_dir()) / f"aheadgrad-torch-{_look_of(Path(torch.__file__).parent)}"
    known_already = AssertionError, RuntimeError
    with suppress(OSError, AttributeError, ValueError, *known_already):
        key = bytes.fromhex(known.read_text())
        if len(key) == hashlib.sha256().digest_size:
            torch_key.set(key)  # type: ignore[attr-defined]
    with suppress(OSError):
        known.write_text(torch_key().hex())


def _look_of(root: Path) -> str:
    """Sizes and times of all files that Inductor reads for its key."""
    skipped = {str(root / name) for name in _NO_SOURCES}
    seen, left = [], [str(root)]
    while left:
        with os.scandir(left.pop()) as found:
            for entry in found:
                if entry.is_file():
                    look = entry.stat()
                    seen.append((entry.path, look.st_size, look.st_mtime_ns))
                elif entry.name != "__pycache__" and entry.path not in skipped:
                    left.append(entry.path)
    return hashlib.sha256(repr((torch.__version__, sorted(seen))).encode()).hexdigest()
