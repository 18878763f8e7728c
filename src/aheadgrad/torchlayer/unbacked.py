"""Sizes that are decided by values: `x[mask]` has as many rows as the mask has true elements.

While a function is recorded such a size is a symbol that no number stands behind (torch calls it unbacked).
The op that makes the tensor is where the number comes from at run time. Nothing may be decided on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    compute_unbacked_bindings,
    free_unbacked_symbols,
)
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from aheadgrad.errors import NeedsNumbers
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.kernels import for_real
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.symbols import expression, free_symbols, hints_of, is_symbolic

__all__ = [
    "Bindings",
    "DataDependentOutputException",
    "Demands",
    "DynamicOutputShapeException",
    "SizesFromValues",
    "decides_sizes",
    "fakes_of_size",
    "follow_numbers",
    "follow_values",
    "follows_values",
    "has_no_number",
    "sample",
    "set_aside",
    "sizes_from_values",
    "sizes_in",
    "sizes_of",
    "strides_agree",
]

_MOST_ELEMENTS = 1 << 20
_ASIDE = "_aheadgrad_set_aside"
_MASKED_SELECT, _NONZERO = torch.ops.aten.masked_select.default, torch.ops.aten.nonzero.default


def follows_values(mode: FakeTensorMode) -> bool:
    """Can a size be decided by values?"""
    return mode.shape_env is not None


def follow_values(mode: FakeTensorMode) -> None:
    """From now on sizes that values decide are symbols. Reading a value stays an error."""
    mode.shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)


def follow_numbers(mode: FakeTensorMode) -> bool:
    """From now on values that are read are symbols, too. Were they not before?"""
    if mode.shape_env is None or mode.shape_env.allow_scalar_outputs:
        return False
    object.__setattr__(mode.shape_env.settings, "allow_scalar_outputs", True)
    return True


def has_no_number(value: Any) -> bool:
    """Is this a symbolic number that values decide?"""
    return isinstance(value, SymInt) and bool(sizes_from_values(value))


def sizes_from_values(value: Any) -> set[Any]:
    """The symbols in a number that values decide."""
    return set(free_unbacked_symbols(value)) if is_symbolic(value) else set()


def sizes_in(t: Any) -> set[Any]:
    """The symbols in a tensor's sizes, strides and offset that values decide."""
    found: set[Any] = set()
    if isinstance(t, Tensor):
        strided = (*t.stride(), t.storage_offset()) if t.layout is torch.strided else ()
        for n in (*t.size(), *strided):
            found |= sizes_from_values(n)
    return found


class Bindings:
    """Which node of a graph each such symbol comes from, and where it stands in the node's value, as torch
    notes it in `meta["unbacked_bindings"]`: who computes the values again knows the new symbols by that."""

    def __init__(self, env: ShapeEnv | None) -> None:
        self.env = env
        self.bound: set[Any] = set()
        if env is not None:
            env.pending_fresh_unbacked_symbols.clear()  # all are bound by the nodes of our own graph

    def of(self, value: Any) -> Any:
        """Of the symbols that this value is the first to show."""
        parts = value if isinstance(value, list | tuple) else (value,)
        new = set().union(*(sizes_in(p) | sizes_from_values(p) for p in parts)) - self.bound
        if self.env is None or not new:
            return None
        self.bound |= new
        self.env.pending_fresh_unbacked_symbols.extend(new)
        found = compute_unbacked_bindings(self.env, value, peek=True)
        self.env.pending_fresh_unbacked_symbols.clear()
        return found


def as_tensor(number: Any) -> Tensor:
    """A symbolic number as a tensor that holds it."""
    kind = torch.float64 if isinstance(number, torch.SymFloat) else torch.int64
    return torch.scalar_tensor(number, dtype=torch.bool if isinstance(number, torch.SymBool) else kind)


def decides_sizes(func: Any) -> bool:
    """Has the op results whose sizes depend on values?"""
    return isinstance(func, OpOverload) and torch.Tag.dynamic_output_shape in func.tags


class SizesFromValues:
    """Ops that decide on sizes, in one fake mode: asked again about the same values they decide the same."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.made: dict[Any, tuple[Any, Any]] = {}  # with the arguments, whose ids are in the key

    def compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _MASKED_SELECT and args[0].size() == args[1].size():
            count = self.compute(_NONZERO, types, (args[1],), {}).size(0)
            with self.mode:
                return args[0].new_empty((count,))
        key = (func, _identity(args), _identity(tuple(kwargs.items())))
        if key not in self.made:
            try:
                out = self.mode.dispatch(func, types, args, kwargs)
            except DynamicOutputShapeException:  # torch does not know how
                out = self._as_always(func, args, kwargs)
            self.made[key] = out, (args, kwargs)
            return out
        return pytree.tree_map(self._again, self.made[key][0])

    def _as_always(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an op that gives sizes which, for these arguments, depend on no values after all."""
        if free_symbols([args, kwargs]):
            raise NeedsNumbers(f"sizes of {func} with symbolic sizes are not known")
        found: list[Any] = []
        for fill in ("random", "different", "zeros"):
            try:
                with for_real():
                    some_args, some_kwargs = sample((args, kwargs), fill)
                    found.append(func(*some_args, **some_kwargs))
            except RuntimeError:  # these values are no good for this op
                continue
        if not found or any(_looks(out) != _looks(found[0]) for out in found):
            raise DynamicOutputShapeException(func)
        return pytree.tree_map(self._again, found[0])

    def _again(self, out: Any) -> Any:
        if not isinstance(out, Tensor):
            return out
        device = out.fake_device if isinstance(out, FakeTensor) else out.device
        room = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="meta")
        return FakeTensor(self.mode, room, device)


def _looks(out: Any) -> list[Any]:
    return [(t.size(), t.stride(), t.dtype) for t in _tensors(out)]


def _identity(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return id(value) if isinstance(value, Tensor) or is_symbolic(value) else (type(value), value)


def set_aside(env: ShapeEnv, sizes: Mapping[Any, int | float]) -> None:
    """Symbols that stand for numbers for a while, because we say so."""
    setattr(env, _ASIDE, sizes)


class Demands:
    """What torch demands of such sizes and leaves to be checked at run time.

    Kernels check most of it themselves. Only where two sizes have to be equal, a kernel may do with a 1.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: set[Any] = set(self._all())

    def _all(self) -> list[Any]:
        if self.mode.shape_env is None:
            return []
        return [one.expr for some in self.mode.shape_env.deferred_runtime_asserts.values() for one in some]

    def equalities(self) -> list[Any]:
        """New demands that sizes are equal."""
        return [e for e in self._all() if e not in self.known and any(map(_is_equality, e.atoms(sympy.Eq)))]

    def replaced(self, symbols: Iterable[Any]) -> list[Any]:
        """Those of the symbols that are known to be a number, or another size, if all demands are met."""
        env = self.mode.shape_env
        if env is None:
            return []
        known, aside = env.replacements, getattr(env, _ASIDE, {})
        return [sympy.Eq(s, known[s]) for s in symbols if s in known and s not in aside]

    def accept(self) -> None:
        """All that is demanded by now is taken care of."""
        self.known.update(self._all())


def _is_equality(relation: Any) -> bool:
    """Must two sizes be equal? Not if one size has to be a multiple of a number (`view(-1, 3)`)."""
    if relation.has(Mod, PythonMod):
        return False
    for whole, rounded in (relation.args, reversed(relation.args)):
        if any(rounded == k.args[1] * k and k.args[0] == whole for k in rounded.atoms(FloorDiv)):
            return False
    return True


def _number(value: Any, n: int, bound: dict[Any, int] | None = None) -> int:
    """A size where those that values decide are `n`, unless they are bound."""
    if not isinstance(value, SymInt):
        return int(value)
    known, expr = hints_of(value.node.shape_env), expression(value)
    return int(
        expr.xreplace({s: sympy.Integer((bound or {}).get(s, known.get(s, n))) for s in expr.free_symbols})
    )


def _numbers(values: Any, n: int, bound: dict[Any, int] | None = None) -> tuple[int, ...]:
    return tuple(_number(v, n, bound) for v in values)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]


def sizes_of(out: Any, n: int) -> list[tuple[int, ...]]:
    """The sizes of an op's results, where those that values decide are `n`."""
    return [_numbers(t.size(), n) for t in _tensors(out)]


def fakes_of_size(mode: FakeTensorMode, values: Any, n: int) -> Any:
    """Recorded arguments with fake tensors of plain sizes, where those that values decide are `n`."""

    def fake(value: Any) -> Any:
        if isinstance(value, SymInt):
            return _number(value, n)
        if not isinstance(value, FakeTensor):
            return value
        size, stride = _numbers(value.size(), n), _numbers(value.stride(), n)
        offset = _number(value.storage_offset(), n)
        last = sum((max(k, 1) - 1) * s for k, s in zip(size, stride, strict=True))
        with torch.utils._python_dispatch._disable_current_modes():
            room = torch.empty(offset + last + 1, dtype=value.dtype, device="meta")
            return FakeTensor(mode, room.as_strided(size, stride, offset), value.fake_device)

    return pytree.tree_map(fake, values)


def sample(values: Any, fill: str, n: int = 3, known: Mapping[int, Tensor] | None = None) -> Any:
    """Real arguments like recorded ones, full of different numbers, zeros or random numbers.

    Masks are true everywhere. Sizes that values decide are `n`; `known` has some arguments by the id of what
    was recorded.
    """
    known = known or {}

    def real(value: Any) -> Any:
        if isinstance(value, SymInt):
            return _number(value, n)
        if id(value) in known or not isinstance(value, Tensor):
            return known.get(id(value), value)
        size, stride = _numbers(value.size(), n), _numbers(value.stride(), n)
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        length = reach(size, stride)
        if value.dtype in (torch.bool, torch.uint8):
            room = torch.ones(length, dtype=value.dtype, device=device)
        elif fill == "zeros":
            room = torch.zeros(length, dtype=value.dtype, device=device)
        elif fill == "random" and value.dtype.is_floating_point:
            room = torch.rand(length, dtype=value.dtype, device=device, generator=_generator(device))
        else:
            room = torch.arange(length, device=device).to(value.dtype)
        return room.as_strided(size, stride)

    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    if any(t.layout is not torch.strided for t in tensors):
        raise TypeError("only strided tensors can be made up")
    if sum(_number(t.numel(), n) for t in tensors) > _MOST_ELEMENTS:
        raise ValueError("too large to be made up")
    return pytree.tree_map(real, values)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def strides_agree(recorded: Any, real: Any) -> bool:
    """Are the strides of results what was recorded, wherever there is more than one element?"""
    for fake, t in zip(_tensors(recorded), _tensors(real), strict=True):
        bound: dict[Any, int] = {}
        for n, k in zip(fake.size(), t.size(), strict=True):
            if isinstance(n, SymInt) and expression(n).is_Symbol:
                bound[expression(n)] = k
        strides = zip(t.size(), t.stride(), _numbers(fake.stride(), 3, bound), strict=True)
        if t.numel() and any(k > 1 and a != b for k, a, b in strides):
            return False
    return True
