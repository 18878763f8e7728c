"""What goes into a function and comes out: arguments as flat inputs of a call, and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from aheadgrad.errors import FallbackError
from aheadgrad.program.slots import Slot, UserInput
from aheadgrad.recording.compared_values import FIXED, SIMPLE, describe
from aheadgrad.recording.forward import Call, Scalar
from aheadgrad.recording.session import check_dense
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import can_be_traced, is_plain
from aheadgrad.torchlayer.symbols import is_symbolic

# a subclass without a dispatch of its own still gives its type to every result
_EXACT = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


@dataclass(frozen=True, eq=False)
class Flat:
    """Arguments as leaves, with a readable path for each."""

    leaves: list[Any]
    spec: Any
    paths: list[str]
    top_paths: list[str]  # of the positional arguments themselves, by position


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], parameter_names: list[str]) -> Flat:
    top = [*parameter_names, *(f"args[{i}]" for i in range(len(parameter_names), len(args)))]
    with_paths, spec = pytree.tree_flatten_with_path((args, kwargs), is_leaf=pytree.is_size)
    return Flat([leaf for _, leaf in with_paths], spec, [_path(path, top) for path, _ in with_paths], top)


def _path(path: tuple[Any, ...], top: list[str]) -> str:
    """`x`, `batch['tokens']`, `args[3]`: how the user would write it; keys without code of the user's."""
    which, first, *rest = path
    steps = (f"[{describe(step.key)}]" if hasattr(step, "key") else str(step) for step in rest)
    return "".join((top[first.idx] if which.idx == 0 else str(first.key), *steps))


def parameter_names(fn: Any) -> list[str]:
    """Of the positional parameters that a caller gives."""
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    code = getattr(fn, "__code__", None)
    return [] if code is None else list(code.co_varnames[hasattr(fn, "__self__") : code.co_argcount])


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function's own code (and what is defined inside it) mentions."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from names_in(const)


def _check_kind(path: str, t: Tensor, *, exact: bool) -> None:
    if can_be_traced(t):
        return
    if not is_plain(t) or (exact and type(t) not in _EXACT):
        raise FallbackError(f"argument {path} is a {type(t).__name__}, a tensor subclass")
    if exact:
        check_dense(f"argument {path}", t)


def make_call(
    fn: Callable[..., Any],
    flat: Flat,
    state: list[tuple[Slot, Tensor]],
    around: Callable[[Any], Any],
    *,
    exact: bool = True,
) -> Call:
    """`state` are tensors to lift besides the arguments; `around(see)` swaps them in.

    `exact`: nobody else has looked at what kinds of tensors these are.
    """
    inputs = list(state)
    for slot, t in state:
        _check_kind(slot.describe(), t, exact=exact)
    scalars = []
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if not isinstance(leaf, Tensor):
            scalars.append(Scalar(UserInput(path), leaf, len(inputs)))
        else:
            _check_kind(path, leaf, exact=exact)
            inputs.append((UserInput(path), leaf))

    def invoke(see: Callable[[Any], Any]) -> Any:
        args, kwargs = pytree.tree_unflatten([see(v) for v in flat.leaves], flat.spec)
        with around(see):
            return fn(*args, **kwargs)

    return Call(inputs, invoke, scalars=tuple(scalars))


def check_result(result: Any, given: Any, known: Iterable[Any]) -> None:
    """Refuses what no entry can return: `given` are the arguments, `known` objects that are the caller's.

    A container that was given, or an object made inside that can change, would be another one than eager's.
    """
    theirs = {id(v) for v in known}
    containers = theirs.union(map(id, _containers(given)))
    for part in _containers(result):
        if id(part) in containers:
            raise FallbackError(f"the function returns a {type(part).__name__} that it was given")
    for leaf in pytree.tree_leaves(result):
        if not (isinstance(leaf, Tensor) or id(leaf) in theirs or _is_fixed(leaf)):
            kind = type(leaf).__name__
            raise FallbackError(f"the function returns a {kind}, which pytree does not know how to open")


def _containers(value: Any) -> Iterator[Any]:
    if pytree.is_leaf(value) or (type(value) is tuple and not value):
        return
    if not isinstance(value, tuple):
        yield value
    for part in pytree.parts(value):
        yield from _containers(part)


def _is_fixed(value: Any) -> bool:
    """Can this be returned again and again?"""
    if isinstance(value, FunctionType):  # one that was made inside may hold anything
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    if isinstance(value, slice | range):
        parts = value.start, value.stop, value.step
        return all(isinstance(v, SIMPLE) and not is_symbolic(v) for v in parts)
    if isinstance(value, frozenset):
        return all(map(_is_fixed, value))
    return isinstance(value, FIXED) or is_symbolic(value)
