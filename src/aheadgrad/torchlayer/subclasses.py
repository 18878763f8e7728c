"""Tensor subclasses: which are plain, which can be taken apart, and how to put one together again.

A traceable wrapper subclass names its inner tensors (`__tensor_flatten__`) and can be made again
from them (`__tensor_unflatten__`). Its `Form` is everything but the inner tensors' values:

    form_of(two)                 # Form(TwoTensor, ("a", "b"), (Plain((3,), (1,), ...), ...), None, ...)
    parts_of(two)                # [two.a, two.b], inner subclasses opened as well
    build(form, iter(parts))     # another one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import nested_tensor
from torch.utils._mode_utils import no_dispatch

from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import TorchDispatchMode, is_mutable
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.symbols import is_ragged

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_KEPT_KEYS = torch._C._additional_keys_to_prop_for_wrapper_tensors
make_wrapper: Any = Tensor._make_wrapper_subclass


def dispatch_keys(t: Tensor) -> int:
    """Whom the dispatcher asks about a tensor, as one number."""
    return int(torch._C._dispatch_keys(t).raw_repr())


def is_plain(t: Tensor) -> bool:
    if type(t) in _PLAIN:
        return True
    return type(t).__torch_dispatch__ is _NO_DISPATCH


@contextmanager
def no_trace_in_globals() -> Iterator[None]:
    """The first jagged tensor of a process leaves one in a global of torch's: not one of a recording."""
    found = nested_tensor._dummy_instance
    try:
        yield
    finally:
        nested_tensor._dummy_instance = found


class Veil(Tensor):
    """A plain tensor in a trace that also has subclasses.

    Autograd sees the veil; behind it is a functional wrapper. An op on a subclass and a veil
    reaches the recorder as it is, where a bare functional wrapper would have been taken apart first.
    The veil keeps the sizes and strides that the tensor has in eager.
    """

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Veil:
        out: Veil = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            _extra_dispatch_keys=_KEPT_KEYS & torch._C._dispatch_keys(elem),
        )
        out.elem = elem
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Outside of the trace: autograd takes out what it saved, or replays a view for its history."""
        if any(map(is_foreign, pytree.tree_leaves((args, kwargs)))):
            return NotImplemented
        bare_args, bare_kwargs = pytree.tree_map(_bare, (args, kwargs or {}))
        return pytree.tree_map(_veiled, func(*bare_args, **bare_kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Veil({tuple(self.shape)}, {self.dtype})"


def _bare(value: Any) -> Any:
    return value.elem if type(value) is Veil else value


def _veiled(value: Any) -> Any:
    return Veil(value) if isinstance(value, Tensor) else value


_foreign: dict[type, bool] = {}


def is_foreign(t: Any) -> bool:
    """A subclass that can be taken apart into plain tensors."""
    known = _foreign.get(type(t))
    return is_foreign_class(type(t)) if known is None else known


def is_foreign_class(kind: Any) -> bool:
    known = _foreign.get(kind)
    if known is None:
        known = issubclass(kind, Tensor) and kind not in _PLAIN and kind is not Veil
        known = known and kind.__torch_dispatch__ is not _NO_DISPATCH
        known = known and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
        _foreign[kind] = known
    return known


def can_be_traced(t: Any) -> bool:
    """Foreign, and so are or plain are all of its inner tensors."""
    if not is_foreign(t):
        return False
    names, meta = t.__tensor_flatten__()
    if any(isinstance(v, Tensor) for v in pytree.tree_leaves(meta)):
        return False
    inner = [v for name in names if isinstance(v := getattr(t, name), Tensor)]
    return bool(inner) and all(_is_strided(v) if is_plain(v) else can_be_traced(v) for v in inner)


def _is_strided(t: Tensor) -> bool:
    return type(t) in _PLAIN and t.layout is torch.strided and not t.is_quantized


@dataclass(frozen=True)
class Plain:
    """What a plain part looks like."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Any = field(default=0, compare=False)


@dataclass(frozen=True, eq=False)
class Fixed:
    """Something inside that is no tensor, such as a device mesh."""

    value: Any

    def parts(self, value: Any) -> list[Any] | None:
        return [] if same_meta(value, self.value) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and same_meta(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True, eq=False)
class Form:
    """How a subclass is put together; `inner` tells what its parts look like, or their forms."""

    kind: Any
    names: tuple[str, ...]
    inner: tuple[Any, ...]
    meta: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form) or hash(self) != hash(other):
            return False
        return (
            self.kind is other.kind
            and self.names == other.names
            and self.inner == other.inner
            and _comparable(self.size) == _comparable(other.size)
            and _comparable(self.stride) == _comparable(other.stride)
            and same_meta(self.meta, other.meta)
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.names))

    @property
    def plain(self) -> list[Plain]:
        """What the parts look like, in order."""
        inner = [f for f in self.inner if not isinstance(f, Fixed)]
        return [p for f in inner for p in (f.plain if isinstance(f, Form) else (f,))]

    def parts(self, t: Any) -> list[Any] | None:
        """The plain parts of a tensor that is put together like this; None for any other."""
        if type(t) is not self.kind:
            return None
        names, meta = t.__tensor_flatten__()
        if tuple(names) != self.names or not same_meta(meta, self.meta):
            return None
        found: list[Any] = []
        for name, inner in zip(names, self.inner, strict=True):
            part = getattr(t, name)
            if isinstance(inner, Plain):
                found.append(part)
                continue
            inside = inner.parts(part)
            if inside is None:
                return None
            found += inside
        return found

    def paths(self, source: str) -> list[str]:
        """How the parts are reached from an expression for the whole."""
        found: list[str] = []
        for name, inner in zip(self.names, self.inner, strict=True):
            text = f"{source}.{name}" if name.isidentifier() else f"getattr({source}, {name!r})"
            if not isinstance(inner, Fixed):
                found += inner.paths(text) if isinstance(inner, Form) else [text]
        return found


def _comparable(numbers: Any) -> tuple[Any, ...]:
    return tuple("ragged" if is_ragged(n) else n for n in numbers)


def same_meta(a: Any, b: Any) -> bool:
    """Metadata is compared as the subclass' own values compare; when in doubt it differs."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def form_of(t: Tensor) -> Form:
    names, meta = t.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = []
    for name in names:
        part = getattr(t, name)
        inner.append(form_of(part) if is_foreign(part) else _plain(part))
    size, stride, offset = t.size(), tuple(t.stride()), t.storage_offset()
    return Form(type(t), tuple(names), tuple(inner), meta, size, stride, offset)


def _plain(t: Any) -> Plain | Fixed:
    if not isinstance(t, Tensor):
        return Fixed(t)
    return Plain(tuple(t.size()), tuple(t.stride()), t.dtype, t.device, t.storage_offset())


def parts_of(t: Tensor) -> list[Tensor]:
    """The plain tensors inside, in order; a plain tensor is its only part."""
    if not is_foreign(t):
        return [t]
    names, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [v for name in names if isinstance(v := getattr(t, name), Tensor)]
    return [part for v in inner for part in parts_of(v)]


def inside(t: Tensor, name: str) -> list[tuple[str, Tensor]]:
    """All tensors inside a subclass, at any depth, and how they are reached."""
    found: list[tuple[str, Tensor]] = []
    for attribute in t.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(t, attribute)
        if isinstance(inner, Tensor):
            path = f"{name}.{attribute}"
            found.append((path, inner))
            found += inside(inner, path) if is_foreign(inner) else []
    return found


def build(form: Form, parts: Iterator[Any]) -> Tensor:
    """A subclass of this form around the given parts."""
    inner: dict[str, Any] = {}
    for name, f in zip(form.names, form.inner, strict=True):
        if isinstance(f, Fixed):
            inner[name] = f.value
        else:
            inner[name] = build(f, parts) if isinstance(f, Form) else next(parts)
    made: Tensor = form.kind.__tensor_unflatten__(inner, form.meta, form.size, form.stride)
    return made


@dataclass(eq=False)
class Bundle:
    """What a traced subclass holds at some moment: its form and its parts' values."""

    form: Form
    parts: Sequence[Any]

    def size(self) -> tuple[Any, ...]:
        return self.form.size

    def stride(self) -> tuple[Any, ...]:
        return self.form.stride

    def storage_offset(self) -> Any:
        return self.form.offset

    def numel(self) -> Any:
        return math.prod(self.form.size)


def values_of(value: Any) -> list[Any]:
    """The plain values behind a traced value."""
    return list(value.parts) if type(value) is Bundle else [value]


def part_names(value: Any, name: str) -> list[str]:
    """What the plain values behind a traced value are called in generated code."""
    return [f"{name}_{k}" for k in range(len(value.parts))] if type(value) is Bundle else [name]


def same_value(a: Any, b: Any) -> bool:
    """Do two traced values stand for the same?"""
    if type(a) is not Bundle or type(b) is not Bundle:
        return a is b
    return len(a.parts) == len(b.parts) and all(x is y for x, y in zip(a.parts, b.parts, strict=True))


def reshape_outside(t: Tensor, size: Any, stride: Any, offset: Any) -> None:
    """Changes what a wrapper says of its own sizes, without telling anybody."""
    with no_dispatch():
        torch.ops.aten.as_strided_.default(t, size, stride, offset)


class Silent(TorchDispatchMode):
    """An in-place op of which only autograd learns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_mutable(func):  # autograd asks for views of it
            return func(*args, **(kwargs or {}))
        return args[0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_silent = Silent()


def silent_copy(t: Tensor, source: Tensor) -> None:
    """`t.copy_(source)` for the history and the version counter; the parts have their values already."""
    with _silent:
        t.copy_(source)
