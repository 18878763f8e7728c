"""C++ functionalization: wrappers that turn in-place programs into functional ones.

with enabled():
    x = wrap(fake)          # user code sees an ordinary tensor it may mutate
    x.mul_(2)
    sync(x)
    unwrap(x)               # the fake tensor that holds x's latest value
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from aheadgrad.torchlayer.lock import here, must_be_held
from aheadgrad.torchlayer.subclasses import Bundle, Veil, form_of, is_foreign, parts_of

_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_views = torch._C._functionalization
# Their `as_tuple` refers to a list that is gone by then: it shows what lies there, or crashes.
_NOT_READABLE = ("_unsafe_view_ViewMeta", "resize__ViewMeta")

RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_.default
_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _name in ("Functionality", "Other", "NestedTensor", "CPU", "CUDA", "Meta", "XPU", "MPS", "PrivateUse1"):
    if hasattr(torch._C.DispatchKey, f"Autograd{_name}"):
        _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{_name}"))
wrap = torch._to_functional_tensor


def wrappers(t: Tensor) -> list[Tensor]:
    """The functional wrappers behind a traced tensor: itself, or those behind its veil or its parts."""
    if type(t) is Tensor:
        return [t]
    if type(t) is Veil:
        return [t.elem]
    if is_foreign(t):
        return [w for part in parts_of(t) for w in wrappers(part)]
    return [t]


def is_wrapped(t: Any) -> bool:
    """Is this a tensor of a trace?"""
    if type(t) is Tensor:
        return bool(torch._is_functional_tensor(t))
    if type(t) is Veil:
        return True
    if is_foreign(t):
        return all(type(part) is Veil for part in parts_of(t))
    return bool(torch._is_functional_tensor(t))


def unwrap(t: Tensor) -> Any:
    """The value that a traced tensor holds; a bundle of values for a subclass."""
    if type(t) is Tensor:
        return torch._from_functional_tensor(t)
    if is_foreign(t):
        return Bundle(form_of(t), [torch._from_functional_tensor(w) for w in wrappers(t)])
    return torch._from_functional_tensor(wrappers(t)[0])


def sync(t: Tensor) -> None:
    if type(t) is Tensor:
        torch._functionalize_sync(t)
        return
    for w in wrappers(t):
        torch._functionalize_sync(w)


def latest(t: Tensor) -> Any:
    """The value that a traced tensor holds by now, with all writes to its memory."""
    sync(t)
    return unwrap(t)


def replace(t: Tensor, value: Tensor) -> None:
    torch._functionalize_replace(wrappers(t)[0], value)


def commit_update(t: Tensor) -> None:
    torch._functionalize_commit_update(wrappers(t)[0])


@contextmanager
def enabled() -> Iterator[None]:
    """Functionalization on, view ops kept as views in the recorded graph."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


@contextmanager
def again() -> Iterator[None]:
    """Functionalization on once more, inside a mode that it called: for ops made of ops."""
    included = torch._C._dispatch_tls_local_include_set() | _FUNCTIONALIZE
    excluded = torch._C._dispatch_tls_local_exclude_set() - _FUNCTIONALIZE
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def not_here() -> Any:
    """Functionalization off for now, to be had again with `behind_veils`."""
    return torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Autograd off: for an op that autograd has seen already."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() | _AUTOGRAD
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@contextmanager
def behind_veils() -> Iterator[None]:
    """As `again`, and below autograd: for an op on the functional wrappers behind veils."""
    included = torch._C._dispatch_tls_local_include_set() | _FUNCTIONALIZE
    excluded = (torch._C._dispatch_tls_local_exclude_set() | _AUTOGRAD) - _FUNCTIONALIZE
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Neither functionalization nor any mode: for making placeholders."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """As `outside`, but for modes over torch's functions."""
    with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE), _disable_current_modes(), no_python_dispatcher():
        yield


@contextmanager
def below() -> Iterator[None]:
    """Functionalization off, dispatch modes still on: for running ops on unwrapped values."""
    with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE), torch._C.DisableTorchFunction():
        yield


def has_data_mutation(t: Tensor) -> bool:
    return any(map(torch._functionalize_has_data_mutation, wrappers(t)))  # type: ignore[attr-defined]


def has_metadata_mutation(t: Tensor) -> bool:
    return any(map(torch._functionalize_has_metadata_mutation, wrappers(t)))


def storage_key(t: Tensor) -> Any:
    """Identifies the storage that a wrapper lives in: aliases have equal keys."""
    if type(t) is Veil:
        return int(t.elem.untyped_storage()._cdata)
    if is_foreign(t):
        return tuple(storage_key(part) for part in parts_of(t))
    return int(t.untyped_storage()._cdata)


def value_storages(t: Tensor) -> list[int]:
    """The storages of the values that a traced tensor holds by now: those of what it was not written from."""
    sync(t)
    held = [torch._from_functional_tensor(w) for w in wrappers(t)]
    return [int(value.untyped_storage()._cdata) for value in held if value.layout is torch.strided]


def view_steps(t: Tensor) -> list[object]:
    """The view operations that lead from the storage's base to `t`, oldest first."""
    if is_foreign(t):
        return []
    return list(_views.get_view_meta_sequence(wrappers(t)[0]))


def is_restrided(t: Tensor) -> bool:
    """Does `as_strided` lead to it?"""
    return any(isinstance(step, _views.as_strided_ViewMeta) for step in view_steps(t))  # type: ignore[attr-defined]


def same_step(a: object, b: object) -> bool:
    """Is this the same view operation? A view of a view has the steps of the first one, and one more."""
    if a is b or type(a) is not type(b) or type(a).__name__ in _NOT_READABLE:
        return a is b
    return bool(a.as_tuple() == b.as_tuple())  # type: ignore[attr-defined]


def replay_steps(base: Tensor, steps: list[object]) -> Tensor:
    """Applies view steps to an (unwrapped) tensor."""
    out: Tensor = _views.apply_view_meta_sequence(base, steps)  # type: ignore[arg-type]
    return out


def version_of(t: Tensor) -> int:
    return 0 if t.is_inference() else int(t._version)


@contextmanager
def noticing_set(before: Callable[[Tensor, tuple[Any, ...]], None]) -> Iterator[None]:
    """`before(t, sources)` is called before `t.set_(...)`, which modes over torch's functions do not see."""
    must_be_held()
    original, own = Tensor.set_, Tensor.__dict__.get("set_")
    is_here = here()

    def set_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_here():
            with torch._C.DisableTorchFunction():
                before(self, (*args, *kwargs.values()))
        return original(self, *args, **kwargs)

    Tensor.set_ = set_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if own is None:
            del Tensor.set_
        else:  # a recording inside another one
            Tensor.set_ = own  # type: ignore[method-assign]
