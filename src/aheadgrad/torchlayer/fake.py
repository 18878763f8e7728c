"""Fake tensors: tensors with sizes, strides, dtype and device but no data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from aheadgrad.torchlayer.lock import here
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.symbols import Number, hints_of

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "Fakes",
    "GuardOnDataDependentSymNode",
    "fake_like",
    "is_fake_mode_on",
    "marked_sizes",
    "mode_of",
    "new_mode",
    "quiet_logs",
    "symbolic_like",
    "symbolic_number",
    "value_is_read",
    "with_strides",
]

_LOG = logging.getLogger("torch._subclasses.fake_tensor")

DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
)


def value_is_read() -> Exception:
    """What a backend raises so that Dynamo breaks the graph where a value is read."""
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """The fake mode logs an error before it raises one; the raised one is enough. (In this thread.)"""
    is_here = here()

    def of_others(record: logging.LogRecord) -> bool:
        return not is_here()

    _LOG.addFilter(of_others)
    try:
        yield
    finally:
        _LOG.removeFilter(of_others)


def is_fake_mode_on() -> bool:
    """Is a fake mode entered, by whomever? It stands below all modes that are no part of torch."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def new_mode(*, dynamic: bool) -> FakeTensorMode:
    """A fresh fake mode; a dynamic one turns sizes into symbols."""
    shapes = ShapeEnv() if dynamic else None
    return FakeTensorMode(shape_env=shapes, static_shapes=not dynamic)


def mode_of(tensors: list[Any]) -> FakeTensorMode | None:
    """The fake mode that the given inputs already live in, if any."""
    for t in tensors:
        if isinstance(t, FakeTensor):
            mode: FakeTensorMode = t.fake_mode
            return mode
    return None


def fake_like(mode: FakeTensorMode, t: Tensor) -> FakeTensor:
    """A fake tensor with the geometry of `t`, in a storage of its own.

    Must run outside functionalization and modes. Much cheaper than `FakeTensorMode.from_tensor`,
    which also rebuilds the autograd history and the view chain that we set up ourselves.
    """
    return _fake_of(mode, t, t.size(), t.stride(), t.storage_offset())


def with_strides(fake: FakeTensor, strides: Iterable[Any]) -> FakeTensor:
    """A fake tensor like this one, laid out otherwise; strides may be numbers of ours."""
    numbers = Fakes(fake.fake_mode, ())
    with fake.fake_mode:
        stride = [numbers.number(s) for s in strides]
        made = torch.empty_strided(fake.size(), stride, dtype=fake.dtype, device=fake.device)
    assert isinstance(made, FakeTensor)
    return made


def _fake_of(mode: FakeTensorMode, t: Tensor, size: Any, stride: Any, offset: Any) -> FakeTensor:
    device = t.fake_device if isinstance(t, FakeTensor) else t.device
    if isinstance(offset, int) and offset == 0:
        meta = torch.empty_strided(size, stride, dtype=t.dtype, device="meta")
    else:
        length = reach(size, stride, offset)
        if not isinstance(t, FakeTensor) and t.device.type != "meta" and isinstance(length, int):
            length = max(length, t.untyped_storage().nbytes() // t.element_size())
        meta = torch.empty(length, dtype=t.dtype, device="meta").as_strided(size, stride, offset)
        meta = meta.detach()
    if t.is_conj():
        meta = meta.conj().detach()
    if t.is_neg():
        meta = torch._neg_view(meta).detach()
    return FakeTensor(mode, meta, device)


def symbolic_like(
    mode: FakeTensorMode, t: Tensor, source: str, free: frozenset[int] | None = None, *, shared: bool = True
) -> FakeTensor:
    """As `fake_like`, with sizes that are symbols of the mode's shape environment.

    Sizes 0 and 1 stay numbers, and equal sizes share a symbol: what is equal by accident may have to be
    (unless not `shared`). `free` are the dimensions whose sizes become symbols, by default all of them.
    """
    from torch._dynamo.source import ConstantSource

    if t.layout is not torch.strided or not isinstance(mode.shape_env, ShapeEnv):
        return fake_like(mode, t)
    any_size = DimDynamic.DUCK if shared else DimDynamic.DYNAMIC
    kinds = [any_size if free is None or d in free else DimDynamic.STATIC for d in range(t.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    size, stride, offset = mode.shape_env.create_symbolic_sizes_strides_storage_offset(
        t, ConstantSource(source), symbolic_context=context
    )
    return _fake_of(mode, t, size, stride, offset)


def symbolic_number(mode: FakeTensorMode, value: int | float, source: str) -> Any:
    """A symbol for a Python number, which may be any of its type."""
    from torch._dynamo.source import ConstantSource

    env = mode.shape_env
    assert isinstance(env, ShapeEnv)
    origin = ConstantSource(source)
    symbol = env.create_unspecified_symbol(value, origin, DimDynamic.DYNAMIC)
    make: Any = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
    return make(symbol, hint=value, source=origin)


def marked_sizes(t: Tensor) -> tuple[set[int], set[int]]:
    """The dimensions that `torch._dynamo.mark_dynamic` and `mark_static` have marked."""
    marks = t.__dict__ if hasattr(t, "__dict__") else {}
    dynamic = set(marks.get("_dynamo_dynamic_indices", ())) | set(
        marks.get("_dynamo_weak_dynamic_indices", ())
    )
    dynamic |= set(marks.get("_dynamo_unbacked_indices", ()))
    return dynamic, set(marks.get("_dynamo_static_indices", ()))


def _range(symbol: Any) -> ValueRanges[Any]:
    """What is known of a symbol that no environment knows: sizes that are given begin at 2."""
    if symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)):
        return ValueRanges.unknown_int() if symbol.is_integer else ValueRanges.unknown()
    return ValueRanges(2, int_oo)


class Fakes:
    """Makes fake tensors and symbolic numbers from values, in a given mode or in one of its own."""

    def __init__(self, mode: FakeTensorMode | None, numbers: Iterable[Number]) -> None:
        numbers = list(numbers)
        self.mode = mode or new_mode(dynamic=bool(numbers))
        env = self.mode.shape_env
        self.env = env
        self._made: dict[Number, Any] = {}
        if env is not None and not env.var_to_sources:  # or else it knows where its symbols come from
            for n in numbers:
                for symbol in n.expr.free_symbols - env.var_to_range.keys():
                    env.var_to_range[symbol] = _range(symbol)
                if n.expr.is_Symbol and n.hint is not None:
                    hints_of(env).setdefault(n.expr, sympy.sympify(n.hint))

    def number(self, value: Any) -> Any:
        """One of torch's symbolic numbers for one of ours."""
        if type(value) is not Number:
            return value
        if value not in self._made:
            assert self.env is not None
            make: Any = {int: self.env.create_symintnode, float: self.env.create_symfloatnode}.get(
                value.kind, self.env.create_symboolnode
            )
            hints = [hints_of(self.env).get(s) for s in value.expr.free_symbols]
            known = all(isinstance(n, sympy.Number) for n in hints)  # by now perhaps others than recorded
            hint = {} if value.kind is bool else {"hint": None if known else value.hint}
            self._made[value] = make(value.expr, **hint)
        return self._made[value]

    def tensor(self, look: Any, base: FakeTensor | None = None) -> FakeTensor:
        """A fake tensor that looks like this (`TensorType`), in memory of its own or in that of another."""
        size, stride = [self.number(n) for n in look.size], [self.number(n) for n in look.stride]
        dtype, device, offset = look.dtype, look.device, self.number(look.offset)
        if look.layout is not torch.strided:
            room = torch.empty(size, dtype=dtype, layout=look.layout, device="meta")
            return FakeTensor(self.mode, room, device)
        if base is not None and base.layout is torch.strided:
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(base.untyped_storage(), offset, size, stride)
        elif isinstance(offset, int) and offset == 0:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(reach(size, stride, offset), dtype=dtype, device="meta")
            meta = meta.as_strided(size, stride, offset).detach()
        meta = meta.conj().detach() if look.conj else meta
        meta = torch._neg_view(meta).detach() if look.neg else meta
        return FakeTensor(self.mode, meta, device)
