"""Are the arguments of a call what an export was made for?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import UnsupportedInput
from aheadgrad.export.signature import Argument, CallSignature, Place
from aheadgrad.export.trees import Tree, tree_of
from aheadgrad.program.values import TensorType
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import is_foreign
from aheadgrad.torchlayer.symbols import Number

_SMALLEST = 2


def match(
    signature: CallSignature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: Callable[[Number, dict[str, Any]], Any],
) -> list[Any]:
    """The flat arguments; raises UnsupportedInput, and names the one that does not fit."""
    leaves = leaves_of(args, kwargs, signature)
    sizes: dict[str, Any] = {}
    called = _names(signature)
    for k, (leaf, argument) in enumerate(zip(leaves, signature.arguments, strict=True)):
        if not argument.is_tensor:
            if not _same(leaf, argument.value):
                raise UnsupportedInput(
                    f"{argument.path} is {leaf!r}; the export was made for {argument.value!r}, and holds for "
                    "that only."
                )
            continue
        _check(leaf, argument, sizes, called)
        _check_identity(k, leaves, signature)
    _check_memory(signature, leaves, lambda n: number(n, sizes) if type(n) is Number else n)
    _check_sizes(signature, leaves)
    for condition in signature.conditions:
        used = set(map(str, condition.expr.free_symbols))
        if used <= set(sizes) and not number(condition, sizes):
            shown = ", ".join(f"{called(symbol)} is {sizes[symbol]}" for symbol in sorted(used))
            raise UnsupportedInput(f"{shown}: the export holds where {called(condition.expr)}.")
    return leaves


def _names(signature: CallSignature) -> Callable[[Any], str]:
    """How sizes are written to a user: by the name that they were given, or as `x.size(0)`."""
    names = {
        s.symbol: s.name or f"{signature.arguments[s.argument].path}.size({s.dimension})"
        for s in signature.sizes
    }
    return lambda expr: re.sub(r"\b[a-z]+\d+\b", lambda found: names.get(found[0], found[0]), str(expr))


def _check_sizes(signature: CallSignature, leaves: list[Any]) -> None:
    """Sizes that may be any are large enough, and the same where they have the same name."""
    known: dict[str, tuple[int, str]] = {}
    for s in signature.sizes:
        path, n = signature.arguments[s.argument].path, int(leaves[s.argument].shape[s.dimension])
        if n < _SMALLEST:
            raise UnsupportedInput(
                f"{path} has size {n} in dimension {s.dimension}{s.name and f' ({s.name})'}; sizes that may "
                f"be any begin at {_SMALLEST}."
            )
        other = known.setdefault(s.name or s.symbol, (n, path))
        if other[0] != n:
            raise UnsupportedInput(
                f"{s.name or 'A size'} is {other[0]} in {other[1]} and {n} in {path}; in this export they "
                "are one size."
            )


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any], signature: CallSignature) -> list[Any]:
    """The flat arguments of a call that is put together as the recorded one was."""
    order = signature.takes.children[1].keys
    if set(order) == set(kwargs):
        kwargs = {key: kwargs[key] for key in order}
    leaves, tree = tree_of((args, kwargs), "the arguments")
    if tree != signature.takes:
        raise UnsupportedInput(
            f"The arguments are not put together as those of the export: {_shown(signature.takes)} was "
            f"recorded, {_shown(tree)} came."
        )
    return leaves


def _check(leaf: Any, argument: Argument, sizes: dict[str, Any], called: Callable[[Any], str]) -> None:
    if argument.form is not None:
        if not is_foreign(leaf) or argument.form.parts(leaf) is None:
            raise UnsupportedInput(
                f"{argument.path} is a {type(leaf).__name__}; the export was made for a "
                f"{argument.form.kind.__name__}."
            )
        return
    assert argument.type is not None
    if not isinstance(leaf, Tensor) or is_foreign(leaf):
        raise UnsupportedInput(
            f"{argument.path} is a {type(leaf).__name__}; the export takes a tensor there."
        )
    if leaf.layout is not torch.strided or leaf.is_quantized:
        kind = "quantized" if leaf.is_quantized else str(leaf.layout).removeprefix("torch.")
        raise UnsupportedInput(f"{argument.path} is {kind}; the export takes a dense tensor (x.to_dense()).")
    if leaf.dtype is not argument.type.dtype or leaf.device.type != argument.type.device.type:
        raise UnsupportedInput(
            f"{argument.path} is {leaf.dtype} on {leaf.device}; the export was made for "
            f"{argument.type.dtype} on {argument.type.device}."
        )
    if not _fits(tuple(leaf.shape), argument.type, sizes):
        raise UnsupportedInput(
            f"{argument.path} has size {tuple(leaf.shape)}; the export was made for "
            f"({', '.join(map(called, argument.type.size))}). Name sizes that may change in dynamic_shapes=."
        )


def _fits(shape: tuple[int, ...], expected: TensorType, sizes: dict[str, Any]) -> bool:
    if len(shape) != len(expected.size):
        return False
    for n, known in zip(shape, expected.size, strict=True):
        if type(known) is Number:
            if sizes.setdefault(str(known.expr), n) != n:
                return False
        elif n != known:
            return False
    return True


def storage_of(t: Tensor) -> Any:
    """Tells the memory of tensors apart; subclasses have none of their own."""
    return id(t) if is_foreign(t) or t.layout is not torch.strided else storage_key(t)


def _check_memory(signature: CallSignature, leaves: list[Any], size: Callable[[Any], Any]) -> None:
    """Where the program changes arguments, or counts on where they lie, they lie as they did."""
    exact = signature.exact_memory
    changed = {signature.place(f.index) for f in signature.facts.inputs if not f.untouched}
    if not exact and not changed:
        return
    first: dict[Any, int] = {}
    for k, (leaf, argument) in enumerate(zip(leaves, signature.arguments, strict=True)):
        if not argument.is_tensor:
            continue
        memory = first.setdefault(storage_of(leaf), k)
        if memory != argument.memory:
            one, other = argument.path, signature.arguments[min(memory, argument.memory)].path
            now = "share memory, and did not" if memory < argument.memory else "do not share memory, and did"
            raise UnsupportedInput(f"{one} and {other} {now} when this was exported.")
        if (exact or Place("argument", k) in changed) and argument.type is not None:
            t = argument.type
            strides, offset = tuple(map(size, t.stride)), size(t.offset)
            if not _same_strides(leaf, strides) or (exact and leaf.storage_offset() != offset):
                raise UnsupportedInput(
                    f"{argument.path} has strides {leaf.stride()} and offset {leaf.storage_offset()}; this "
                    f"export holds for strides {strides} and offset {offset} only, since the function "
                    "changes it or asks where it lies."
                )


def _same_strides(t: Tensor, strides: tuple[int, ...]) -> bool:
    """But for dimensions in which there is nowhere to go."""
    return all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True))


def _check_identity(k: int, leaves: list[Any], signature: CallSignature) -> None:
    """What was one tensor is one, and no two others are."""
    same = signature.arguments[k].same_as
    if same is not None and same.kind == "argument":
        if leaves[k] is not leaves[same.of]:
            one, other = signature.arguments[k].path, signature.arguments[same.of].path
            raise UnsupportedInput(f"{one} and {other} were one tensor when this was exported, and are two.")
        return
    twin = next((i for i in range(k) if leaves[i] is leaves[k]), None)
    if twin is not None and same is None and _matters(signature, k, twin):
        one, other = signature.arguments[k].path, signature.arguments[twin].path
        raise UnsupportedInput(f"{one} and {other} are one tensor, one of which the program changes.")


def _matters(signature: CallSignature, *arguments: int) -> bool:
    """Is one of these changed, or handed out?"""
    changed = [signature.place(f.index) for f in signature.facts.inputs if not f.untouched]
    return any(Place("argument", k) in changed for k in arguments)


def _same(value: Any, known: Any) -> bool:
    if type(value) is not type(known):
        return False
    if isinstance(value, float):
        return repr(value) == repr(known)
    return bool(value == known)


def _shown(tree: Tree) -> str:
    if tree.kind == "leaf":
        return "*"
    inside = [_shown(c) for c in tree.children]
    if tree.keys:
        inside = [f"{key}: {text}" for key, text in zip(tree.keys, inside, strict=True)]
    return f"{tree.where[1] if tree.where else tree.kind}({', '.join(inside)})"
