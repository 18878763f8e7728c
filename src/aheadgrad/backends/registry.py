"""Backends by name, and the one contract they all meet.

A backend turns a program into a callable that takes a list of values (which it may empty) and
returns a list: `backend(program) -> callable(list) -> list`. Register your own:

    @aheadgrad.register_backend("mine")
    def mine(program): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aheadgrad.backends.eager import Boxed, compile_eager
from aheadgrad.errors import InvalidOption
from aheadgrad.program.program import Program
from aheadgrad.program.slots import NoGradient

Backend = Callable[[Program], Boxed]

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


def compile_program(backend: Any, program: Program) -> Boxed:
    """Compiles one program with a backend; what comes out returns no `NoGradient` slots."""
    kinds = program.signature.outputs
    run = find_backend(backend)(program)
    kept = [i for i, slot in enumerate(kinds) if not isinstance(slot, NoGradient)]
    if len(kept) == len(kinds):
        return run

    def gradients_only(args: list[Any]) -> list[Any]:
        results = run(args)
        return [results[i] for i in kept]

    return gradients_only
