"""C++ functionalization: wrappers that turn in-place programs into functional ones.

with enabled():
    x = wrap(fake)          # user code sees an ordinary tensor it may mutate
    x.mul_(2)
    sync(x)
    unwrap(x)               # the fake tensor that holds x's latest value
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_views = torch._C._functionalization

RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_.default
wrap = torch._to_functional_tensor
unwrap = torch._from_functional_tensor
is_wrapped = torch._is_functional_tensor
sync = torch._functionalize_sync
replace = torch._functionalize_replace
commit_update = torch._functionalize_commit_update


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


@contextmanager
def outside() -> Iterator[None]:
    """Neither functionalization nor any mode: for making placeholders."""
    with (
        torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


@contextmanager
def below() -> Iterator[None]:
    """Functionalization off, dispatch modes still on: for running ops on unwrapped values."""
    with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE), torch._C.DisableTorchFunction():
        yield


def has_data_mutation(t: Tensor) -> bool:
    return bool(torch._functionalize_has_data_mutation(t))  # type: ignore[attr-defined]


def has_metadata_mutation(t: Tensor) -> bool:
    return bool(torch._functionalize_has_metadata_mutation(t))


def storage_was_changed(t: Tensor) -> bool:
    return bool(torch._functionalize_was_storage_changed(t))


def storage_key(t: Tensor) -> int:
    """Identifies the storage that a wrapper lives in: aliases have equal keys."""
    return int(t.untyped_storage()._cdata)


def view_steps(t: Tensor) -> list[object]:
    """The view operations that lead from the storage's base to `t`, oldest first."""
    return list(_views.get_view_meta_sequence(t))


def same_step(a: object, b: object) -> bool:
    return type(a) is type(b) and a.as_tuple() == b.as_tuple()  # type: ignore[attr-defined]


def replay_steps(base: Tensor, steps: list[object]) -> Tensor:
    """Applies view steps to an (unwrapped) tensor."""
    out: Tensor = _views.apply_view_meta_sequence(base, steps)  # type: ignore[arg-type]
    return out


def version_of(t: Tensor) -> int:
    return 0 if t.is_inference() else int(t._version)
