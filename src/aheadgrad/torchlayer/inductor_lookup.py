"""Looking a graph up in Inductor's cache, quickly.

What Inductor does on the way for those who debug it is left out where nobody does, and its digest of torch's
own files is kept beside its compiled code. Keys and results are the same.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from aheadgrad.torchlayer.collection import collection_again

_NO_SOURCES = ("bin", "include", "lib", "share")
_TRACE = logging.getLogger("torch.__trace")


@contextmanager
def looked_up_quickly() -> Iterator[None]:
    """Around Inductor's inner compile. Garbage is collected where kernels are made, which takes long; a look
    into the cache is over before that."""
    from torch._inductor import codecache, compile_fx

    _tell_key_of_torch()
    with ExitStack() as patches:

        def put(owner: Any, name: str, other: Any) -> None:
            patches.enter_context(patch.object(owner, name, other))

        put(compile_fx, "fx_codegen_and_compile", collection_again()(compile_fx.fx_codegen_and_compile))
        if not codecache.log.isEnabledFor(logging.DEBUG) and not _TRACE.handlers:
            put(codecache.FxGraphCachePickler, "debug_lines", lambda pickler, details: [])
        if torch._dynamo.config.repro_after is None:
            put(compile_fx, "wrap_compiler_debug", _without_a_copy)
        yield


def _without_a_copy(compiler: Callable[..., Any], compiler_name: str) -> Callable[..., Any]:
    """For those who want to reproduce an error, Inductor copies each graph first."""
    return compiler


@functools.cache
def _tell_key_of_torch() -> None:
    """Inductor's keys have a digest of what is in all files of torch. They are read again where one of them
    has another size or time."""
    from torch._inductor.codecache import cache_dir, torch_key

    known = Path(cache_dir()) / f"aheadgrad-torch-{_look_of_torch()}"
    with suppress(OSError, AttributeError, ValueError, RuntimeError):  # RuntimeError: it is known already
        key = bytes.fromhex(known.read_text())
        if len(key) == hashlib.sha256().digest_size:
            torch_key.set(key)  # type: ignore[attr-defined]
    with suppress(OSError):
        known.write_text(torch_key().hex())


def _look_of_torch() -> str:
    """Sizes and times of all files that Inductor reads for its key."""
    root = Path(torch.__file__).parent
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
