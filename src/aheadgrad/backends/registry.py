"""Backends by name. Register your own (the contract is in `contract`):

@aheadgrad.register_backend("mine")
def mine(request): ...
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

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
from aheadgrad.errors import (
    AheadgradError,
    BackendFailed,
    FallbackError,
    FallbackWarning,
    InvalidOption,
    reason_of,
)
from aheadgrad.options import Options
from aheadgrad.program.program import Program
from aheadgrad.program.values import Value, free_symbols
from aheadgrad.report.journal import Journal
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.report.progress import progress
from aheadgrad.torchlayer import inductor
from aheadgrad.torchlayer.collection import collection_again, garbage_of_its_own
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


DEFAULT = "inductor"
"""The backend where nobody names one (nor does the environment variable AHEADGRAD_BACKEND)."""


@functools.cache
def default_backend(named: str, device: str) -> Backend:
    """Inductor needs a C++ compiler or Triton; where there is none, eager, and one warning that says so."""
    found = find_backend(named)
    lacking = inductor.missing(device) if isinstance(found, Inductor) else None
    if lacking is None:
        return replace(found, warns=False) if isinstance(found, Inductor) else found
    if device in ("cpu", "cuda"):
        text = f'{lacking} was not found: aheadgrad compiles with backend="eager", op by op, on this machine.'
        warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
    return compile_eager


def find_backend(backend: Any, mode: str | None = None) -> Backend:
    """A backend by name, or the callable itself; `mode` is for backends that know some."""
    if isinstance(backend, str) and backend == "default":
        backend = "inductor" if mode is not None else os.environ.get("AHEADGRAD_BACKEND") or DEFAULT
    if not callable(backend) and backend not in _BACKENDS:
        names = sorted(_BACKENDS)
        raise InvalidOption(f"backend={backend!r} is not known; choose one of {names} or a callable.")
    found: Backend = backend if callable(backend) else _BACKENDS[backend]
    if mode is None:
        return found
    if not isinstance(found, Inductor):
        raise InvalidOption(f'mode={mode!r} is one of Inductor\'s; choose backend="inductor" with it.')
    return Inductor(mode)


def begin(options: Options) -> None:
    """A function is about to be compiled: what its backend does beside that can start."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    wants_of(find_backend(options.backend, options.mode)).begin(device)


def settled(options: Options, device: str) -> Options:
    """Options with the backend itself, and with what it wishes for; `device` is the kind that is used."""
    if options.backend == "default" and options.mode is None:
        backend = default_backend(os.environ.get("AHEADGRAD_BACKEND") or DEFAULT, device)
    else:
        backend = find_backend(options.backend, options.mode)
    wants = wants_of(backend)
    wants.begin(device)
    chosen = {**wants.decompositions(), **options.decompositions}
    partition = wants.partition if options.partition == "default" else options.partition
    given: dict[str, Any] = {"backend": backend, "mode": None, "decompositions": chosen}
    if wants.updates:
        given["keep_inference_input_mutations"] = True
    told: dict[str, Any] = {"layouts": wants.layouts, "replays": wants.replays, "fuses": wants.fuses}
    return replace(options, **given, **told, partition=partition)


class Compiler:
    """The backend of one call. It knows how results are laid out, for the programs that take them."""

    def __init__(
        self, options: Options, mode: FakeTensorMode | None, journal: Journal, *, foreign: bool = False
    ) -> None:
        self.foreign = foreign  # will programs be given subclasses that the recording knows nothing of?
        self.journal = journal
        self.backend = find_backend(options.backend)
        self.mode = mode
        self.layouts: dict[Value, tuple[Any, ...]] = {}
        self.shared: dict[str, Any] = {
            "frontend": options.frontend,
            "watch": self._watch,
            "note": journal.note,
        }

    def compile(self, program: Program, given_away: frozenset[Value] = frozenset()) -> Executable:
        """Compiles a program now; a backward when it is first called, for what the forward really gives."""
        request = Request(program, self.mode, self.layouts, self.shared, given_away)
        if self.backend is compile_eager:
            return only_gradients(program, compile_eager(request, foreign=self.foreign))
        if program.role == "backward" and not request.ahead:
            later = Later(lambda: self._now(request).call, RECORDING)
            return only_gradients(program, Executable(later))
        return only_gradients(program, self._now(request))

    @contextmanager
    def _watch(self, role: str) -> Iterator[None]:
        with self.journal.stage(f"compile {role}"), progress(f"compiling a {role} ..."), garbage_of_its_own():
            yield

    def _called(self, request: Request) -> Any:
        try:
            return self.backend(request)
        except AheadgradError:
            raise
        except Exception as error:
            name = getattr(self.backend, "__name__", type(self.backend).__name__)
            what = f"{name!r} raised {reason_of(error)} while it compiled this {request.role} program"
            sized = free_symbols([port.value for port in request.program.inputs])
            if sized and request.role != "backward":
                raise FallbackError(f"the backend {what}, which has symbolic sizes") from error
            raise BackendFailed(f"The backend {what}.") from error

    def _now(self, request: Request) -> Executable:
        garbage = nullcontext() if isinstance(self.backend, Inductor) else collection_again()
        with self._watch(request.role), garbage:
            made = as_executable(self._called(request))
        outputs = request.program.outputs
        for (_, value), strides in zip(outputs, made.strides or (None,) * len(outputs), strict=True):
            if type(value) is Value and strides is not None and strides != value.type.stride:
                self.layouts[value] = strides
        return made
