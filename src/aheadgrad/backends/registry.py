"""Backends by name. Register your own (the contract is in `contract`):

@aheadgrad.register_backend("mine")
def mine(request): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aheadgrad.backends.contract import Backend, Executable, Later, Request, only_gradients
from aheadgrad.backends.eager import compile_eager
from aheadgrad.errors import InvalidOption
from aheadgrad.program.program import Program
from aheadgrad.torchlayer.fake import FakeTensorMode

_BACKENDS: dict[str, Backend] = {"eager": compile_eager}


def register_backend(name: str) -> Callable[[Backend], Backend]:
    """Makes a backend known under a name."""

    def register(backend: Backend) -> Backend:
        _BACKENDS[name] = backend
        return backend

    return register


def find_backend(backend: Any) -> Backend:
    """A backend by name, or the callable itself."""
    if callable(backend):
        found: Backend = backend
        return found
    if backend in _BACKENDS:
        return _BACKENDS[backend]
    raise InvalidOption(f"backend={backend!r} is not known; choose one of {sorted(_BACKENDS)} or a callable.")


def compile_program(backend: Any, program: Program, mode: FakeTensorMode | None = None) -> Executable:
    """Compiles one program with a backend; a backward when it is first called."""
    found = find_backend(backend)
    request = Request(program, mode)
    if found is compile_eager:
        return only_gradients(program, compile_eager(request))
    if program.role == "backward":
        return only_gradients(program, Executable(Later(lambda: _compiled(found, request).call)))
    return only_gradients(program, _compiled(found, request))


def _compiled(backend: Backend, request: Request) -> Executable:
    """A backend may also return a function alone."""
    made = backend(request)
    return made if isinstance(made, Executable) else Executable(made)
