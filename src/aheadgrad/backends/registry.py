"""Backends by name. Register your own (the contract is in `contract`):

@aheadgrad.register_backend("mine")
def mine(request): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aheadgrad.backends.checked import Checked
from aheadgrad.backends.contract import (
    Backend,
    Executable,
    Later,
    Request,
    as_executable,
    only_gradients,
    wants_of,
)
from aheadgrad.backends.eager import compile_eager
from aheadgrad.backends.inductor import Inductor
from aheadgrad.errors import InvalidOption
from aheadgrad.options import Options
from aheadgrad.program.program import Program
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.lock import RECORDING

_BACKENDS: dict[str, Backend] = {
    "eager": compile_eager,
    "inductor": Inductor(),
    "checked": Checked(Inductor()),
}


def register_backend(name: str) -> Callable[[Backend], Backend]:
    """Makes a backend known under a name."""

    def register(backend: Backend) -> Backend:
        _BACKENDS[name] = backend
        return backend

    return register


def find_backend(backend: Any, mode: str | None = None) -> Backend:
    """A backend by name, or the callable itself; `mode` is for backends that know some."""
    if not callable(backend) and backend not in _BACKENDS:
        names = sorted(_BACKENDS)
        raise InvalidOption(f"backend={backend!r} is not known; choose one of {names} or a callable.")
    found: Backend = backend if callable(backend) else _BACKENDS[backend]
    if mode is None:
        return found
    if not isinstance(found, Inductor):
        raise InvalidOption(f'mode={mode!r} is one of Inductor\'s; choose backend="inductor" with it.')
    return Inductor(mode)


def settled(options: Options) -> Options:
    """Options with the backend itself, and with what it wishes for."""
    backend = find_backend(options.backend, options.mode)
    wants = wants_of(backend)
    chosen = {**wants.decompositions(), **options.decompositions}
    partition = wants.partition if options.partition == "default" else options.partition
    given: dict[str, Any] = {"backend": backend, "mode": None, "decompositions": chosen}
    return replace(options, **given, partition=partition, layouts=wants.layouts)


class Compiler:
    """The backend of one call. It knows how results are laid out, for the programs that take them."""

    def __init__(self, options: Options, mode: FakeTensorMode | None) -> None:
        self.backend = find_backend(options.backend)
        self.mode = mode
        self.layouts: dict[Value, tuple[Any, ...]] = {}
        self.shared: dict[str, Any] = {"frontend": options.frontend}

    def compile(self, program: Program, given_away: frozenset[Value] = frozenset()) -> Executable:
        """Compiles a program now; a backward when it is first called, for what the forward really gives."""
        request = Request(program, self.mode, self.layouts, self.shared, given_away)
        if self.backend is compile_eager:
            return only_gradients(program, compile_eager(request))
        if program.role == "backward":
            later = Later(lambda: self._now(request).call, RECORDING)
            return only_gradients(program, Executable(later))
        return only_gradients(program, self._now(request))

    def _now(self, request: Request) -> Executable:
        made = as_executable(self.backend(request))
        outputs = request.program.outputs
        for (_, value), strides in zip(outputs, made.strides or (None,) * len(outputs), strict=True):
            if type(value) is Value and strides is not None and strides != value.type.stride:
                self.layouts[value] = strides
        return made
