"""Results of ops on fake tensors, remembered.

A model repeats the same few ops on the same few shapes. The result of an op on fake tensors
depends only on its arguments' sizes, strides, dtypes and devices and on its numbers; those make
the key, and a hit costs a tenth of asking the fake mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher

from aheadgrad.errors import FallbackError, NeedsNumbers
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_view_op
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS, FakeTensor, FakeTensorMode
from aheadgrad.torchlayer.kernels import NotAsked, ask_kernel, has_unit_size, hints, is_open_question
from aheadgrad.torchlayer.strides import NotKnown, same_numbers, strides_by_kernel
from aheadgrad.torchlayer.unbacked import SizesFromValues, decides_sizes, has_no_number

_UNCACHED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_META = torch.device("meta")
_MISSING = object()
_HALVES = (torch.float16, torch.bfloat16)
_MOST_ELEMENTS = 1 << 24  # dtypes are asked for once for each kind of call


# Some Python references raise these where kernels raise something else, or nothing.
_MISTAKES = (AssertionError, ArithmeticError, ValueError, IndexError, TypeError)
_VIEW = torch.ops.aten.view.default
_SELECT = torch.ops.aten.select.int


def _check_view(t: FakeTensor, size: Any) -> None:
    """Fake tensors allow a few views that kernels refuse; a tensor without data refuses them too."""
    try:
        now = hints(t.size()), hints(t.stride()), hints(size)
    except NotAsked:
        return
    with no_python_dispatcher():
        torch.empty_strided(*now[:2], dtype=t.dtype, device=_META).view(now[2])


def _check_index(t: FakeTensor, dim: int, index: Any) -> None:
    """Fake tensors of some releases of torch take any index."""
    size = t.size(dim)
    if has_no_number(size) or has_no_number(index):
        return  # the kernel will tell
    if not -size <= index < size:
        at = f"for tensor of size {list(t.size())} at dimension {dim}"
        raise IndexError(f"select(): index {index} out of range {at}")


class _Uncacheable(Exception):
    pass


def _flat(out: Any) -> list[Any]:
    """Tensors among an op's results."""
    return [t for t in _parts(out) if isinstance(t, Tensor)]


def _is_half(value: Any) -> bool:
    """Is this a tensor of half precision on the CPU, whose kernels keep their statistics in another one?"""
    return isinstance(value, FakeTensor) and value.dtype in _HALVES and value.fake_device.type == "cpu"


def _parts(out: Any) -> Any:
    return out if isinstance(out, list | tuple) else (out,)


class OpCache:
    """Computes ops in one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.exact = False  # are strides to be told exactly, or not at all?
        self.specs: dict[Any, Any] = {}
        self.refused: set[Any] = set()
        self.from_values = SizesFromValues(mode)

    def compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self.mode.shape_env is not None and decides_sizes(func):
                return self.from_values.compute(func, types, args, kwargs)
            return self._compute(func, types, args, kwargs)
        except DATA_DEPENDENT_ERRORS:
            raise
        except _MISTAKES as error:
            out = self._by_kernel(func, args, kwargs, error)
            return self._without_references(func, args, kwargs) if is_view_op(func) else out
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError):
                self._by_kernel(func, args, kwargs, error)
            raise

    def _by_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """What the kernel says to a call that fake tensors refuse: its error, or what it returns."""
        try:
            out = ask_kernel(func, args, kwargs)
        except NotAsked:
            if isinstance(error, ValueError | IndexError):
                return self._without_references(func, args, kwargs)
            raise error from None
        return pytree.tree_map(self._like, out)

    def _like(self, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        room = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=_META)
        return FakeTensor(self.mode, room, t.device)

    def _compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _SELECT:
            _check_index(*args)
        if func in self.refused:
            return self.mode.dispatch(func, types, args, kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
            spec = self.specs.get(key, _MISSING)
        except (_Uncacheable, TypeError):
            if any(type(a) is torch.UntypedStorage for a in args):
                raise FallbackError("a tensor is made of a storage (set_, torch.Tensor(storage))") from None
            if func is _VIEW:
                _check_view(*args)
            out = self._with_dtypes(func, args, kwargs, self.mode.dispatch(func, types, args, kwargs))
            return self._with_exact_strides(func, args, kwargs, out) if self.exact else out
        if spec is not _MISSING:
            return self._make(spec, args)
        if not _cacheable(func):
            self.refused.add(func)
            return self.mode.dispatch(func, types, args, kwargs)
        if func is _VIEW:
            _check_view(*args)
        out = self._with_dtypes(func, args, kwargs, self.mode._dispatch_impl(func, types, args, kwargs))
        spec = _spec(out, args, kwargs)
        if spec is not None and any(map(is_open_question, _flat(out))) and _is_fresh(spec):
            out = self._with_strides(func, args, kwargs, out)
            spec = _spec(out, args, kwargs)
        if spec is None:
            self.refused.add(func)
        else:
            self.specs[key] = spec
        return out

    def _with_strides(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The results with the strides that the kernel gives to dimensions of one element or none."""
        try:
            real = ask_kernel(func, args, kwargs)
        except Exception:  # zeros are no good for every op: an inverse, ...
            return out
        if [t.size() for t in _flat(real)] != [t.size() for t in _flat(out)]:
            return out
        return pytree.tree_map(self._like, real)

    def _with_dtypes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The results with the dtypes that the kernel gives to statistics of half precision tensors."""
        if not (isinstance(out, tuple) and any(map(_is_half, args))) or is_view_op(func):
            return out
        try:
            real = ask_kernel(func, args, kwargs, most=_MOST_ELEMENTS)
        except Exception:
            return out

        def alike(t: Any, real: Any) -> Any:
            if not isinstance(t, Tensor) or not isinstance(real, Tensor) or t.dtype == real.dtype:
                return t
            return self._laid_out(t, t.stride(), real.dtype)

        return tuple(map(alike, out, real))

    def _with_exact_strides(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The same for symbolic sizes; without an answer, strides are to be asked for with numbers."""
        fakes = _flat(out)
        if is_view_op(func) or not any(map(has_unit_size, fakes)) or any(t.is_sparse for t in fakes):
            return out
        assert self.mode.shape_env is not None
        try:
            strides = iter(strides_by_kernel(self.mode.shape_env, func, args, kwargs, fakes))
        except NotAsked:
            return out
        except NotKnown:
            raise NeedsNumbers(f"strides of {func} with symbolic sizes are not known") from None
        return pytree.tree_map(
            lambda t: self._laid_out(t, next(strides)) if isinstance(t, Tensor) else t, out
        )

    def _laid_out(self, t: Any, stride: tuple[Any, ...], dtype: torch.dtype | None = None) -> Any:
        if dtype is None and same_numbers(t.stride(), stride):
            return t
        room = torch.empty_strided(t.size(), stride, dtype=dtype or t.dtype, device=_META)
        return FakeTensor(self.mode, room, t.fake_device)

    def _without_references(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op on tensors without data: the kernel's own checks and results."""
        device: list[torch.device] = []

        def bare(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            device.append(value.fake_device)
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)

        bare_args, bare_kwargs = pytree.tree_map(bare, (args, kwargs))
        try:
            out = func(*bare_args, **bare_kwargs)
        except (ValueError, IndexError) as error:
            if isinstance(error, IndexError) and not str(error).startswith("list"):
                raise
            raise RuntimeError(*error.args) from error

        def fake(value: Any) -> Any:
            return FakeTensor(self.mode, value, device[0]) if isinstance(value, Tensor) else value

        return pytree.tree_map(fake, out)

    def _make(self, spec: Any, args: tuple[Any, ...]) -> Any:
        if type(spec) is _TensorSpec:
            return spec.make(self.mode, args)
        if type(spec) is list:
            return [s.make(self.mode, args) if type(s) is _TensorSpec else s for s in spec]
        return tuple(s.make(self.mode, args) if type(s) is _TensorSpec else s for s in spec)


class _TensorSpec:
    """One output tensor; `source` is the argument whose storage it shares."""

    __slots__ = ("device", "dtype", "key", "offset", "size", "source", "stride")

    def __init__(self, t: FakeTensor, source: int | None) -> None:
        self.size = tuple(t.size())
        self.stride = tuple(t.stride())
        self.offset = t.storage_offset()
        self.dtype = t.dtype
        self.device = t.fake_device
        self.source = source
        self.key = tensor_key(t)

    def make(self, mode: FakeTensorMode, args: tuple[Any, ...]) -> FakeTensor:
        if self.source is None:
            room = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)
        else:
            storage = args[self.source].untyped_storage()
            if storage.device != _META:  # functionalization swaps the storage of some values
                storage = self._room()
            room = torch.empty(0, dtype=self.dtype, device=_META)
            room.set_(storage, self.offset, self.size, self.stride)
        out = FakeTensor(mode, room, self.device)
        out._aheadgrad_key = self.key  # type: ignore[attr-defined]
        return out

    def _room(self) -> torch.UntypedStorage:
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return torch.empty(max(0, self.offset + last + 1), dtype=self.dtype, device=_META).untyped_storage()


def tensor_key(t: FakeTensor) -> Any:
    """What an op's result may depend on."""
    known = getattr(t, "_aheadgrad_key", None)
    if known is not None:
        return known
    size, stride, offset = tuple(t.size()), tuple(t.stride()), t.storage_offset()
    if t.layout is not torch.strided or not all(type(n) is int for n in (*size, *stride, offset)):
        raise _Uncacheable
    if t.constant is not None or t.is_conj() or t.is_neg():
        raise _Uncacheable
    key = (t.dtype, t.fake_device, size, stride, offset, t.untyped_storage().nbytes() if offset else 0)
    t._aheadgrad_key = key  # type: ignore[attr-defined]
    return key


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        return tensor_key(value)
    if kind in _PLAIN:
        return (kind, value) if kind is not float or value == value else (kind, "nan")
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind, *map(_key, value))
    raise _Uncacheable


def _cacheable(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return not is_mutable(func) and not any(tag in func.tags for tag in _UNCACHED_TAGS)


def _spec(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(out, FakeTensor):
        return _tensor_spec(out, args)
    if type(out) in (tuple, list):
        parts = [_tensor_spec(o, args) if isinstance(o, Tensor) else o for o in out]
        if any(p is None and o is not None for p, o in zip(parts, out, strict=True)):
            return None
        if not all(isinstance(o, FakeTensor) or o is None or type(o) in (int, float, bool) for o in out):
            return None
        return parts if type(out) is list else tuple(parts)
    return None


def _is_fresh(spec: Any) -> bool:
    """Does no result share its storage with an argument?"""
    specs = spec if isinstance(spec, list | tuple) else (spec,)
    return all(s.source is None for s in specs if type(s) is _TensorSpec)


def _tensor_spec(t: Any, args: tuple[Any, ...]) -> _TensorSpec | None:
    if not isinstance(t, FakeTensor) or any(a is t for a in args):
        return None
    try:
        tensor_key(t)
    except _Uncacheable:
        return None
    storage = t.untyped_storage()._cdata
    for i, a in enumerate(args):
        if isinstance(a, FakeTensor) and a.untyped_storage()._cdata == storage:
            return _TensorSpec(t, i)
    return _TensorSpec(t, None)
