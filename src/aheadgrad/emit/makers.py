"""Making a wrapper subclass without its constructor, where that is sure to come to the same.

A constructor in Python takes several times as long as the tensor itself. For a subclass whose instances
are a wrapper tensor, their parts and a few constants, a maker sets just these:

    make = maker(form)            # None when there is more to it
    whole = make(part_0, part_1)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aheadgrad.emit.script import Script
from aheadgrad.torchlayer.dispatch import TorchDispatchMode
from aheadgrad.torchlayer.subclasses import Form, Plain, build, dispatch_keys, make_wrapper

_SIMPLE = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)
_SEEN_FROM_OUTSIDE: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.size(),
    lambda t: t.stride(),
    lambda t: t.storage_offset(),
    lambda t: t.dtype,
    lambda t: t.layout,
    lambda t: t.device,
    lambda t: t.requires_grad,
    lambda t: t.is_leaf,
    lambda t: t.is_contiguous(),
    dispatch_keys,
    lambda t: t.untyped_storage().nbytes(),
)


class _Questions(TorchDispatchMode):
    """Notices when a tensor does not know its own sizes but asks its class."""

    asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked = True
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def maker(form: Form) -> Callable[..., Tensor] | None:
    """A function from the parts to the whole, or None where only the constructor will do."""
    if not all(isinstance(f, Plain) for f in form.inner) or not _has_fixed_size(form):
        return None
    if any(vars(kind).get("__slots__") for kind in form.kind.__mro__[: form.kind.__mro__.index(Tensor)]):
        return None
    try:
        one, two = _sample(form), _sample(form)
        found = _contents(*one)
        if found[0] is None or found != _contents(*two):
            return None
        with _Questions() as questions:
            same = _same(one[0], _write(form, one[0], one[0].device, *found)(*one[1]))
        if not same or questions.asked:
            return None
        meta = one[0].device.type == "meta"  # as that of the parts, or one of its own
        return _write(form, one[0], form.plain[0].device if meta else one[0].device, *found)
    except Exception:  # a constructor that wants real parts: let it have them
        return None


def _has_fixed_size(form: Form) -> bool:
    numbers = [*form.size, *form.stride, form.offset]
    for p in form.plain:
        numbers += [*p.size, *p.stride, p.offset]
    return all(type(n) is int for n in numbers)


def _sample(form: Form) -> tuple[Tensor, list[Tensor]]:
    parts = [torch.empty_strided(p.size, p.stride, dtype=p.dtype, device="meta") for p in form.plain]
    return build(form, iter(parts)), parts


def _contents(whole: Tensor, parts: list[Tensor]) -> Any:
    """Where the parts are among the attributes, and what the others are; None if these are not simple."""
    places: dict[str, int] = {}
    constants: dict[str, Any] = {}
    for name, value in vars(whole).items():
        k = next((k for k, part in enumerate(parts) if part is value), None)
        if k is not None:
            places[name] = k
        elif type(value) in _SIMPLE and name.isidentifier():
            constants[name] = value
        else:
            return None, None
    return (places, constants) if sorted(set(places.values())) == list(range(len(parts))) else (None, None)


def _write(
    form: Form, like: Tensor, device: torch.device, places: dict[str, int], constants: dict[str, Any]
) -> Any:
    script = Script("make")
    literal, name = script.names.literal, script.names.name
    usual = like.stride() == _usual_strides(like) and like.storage_offset() == 0
    given = [
        name(form.kind, form.kind.__name__),
        literal(tuple(like.size())),
        "None" if usual else literal(tuple(like.stride())),  # usual ones need not be read
        "None" if usual else literal(like.storage_offset()),
        "None",  # memory format
        literal(like.dtype),
        literal(like.layout),
        name(device, "device"),
        "False",  # pinned memory
        literal(like.requires_grad),
    ]
    script.line(f"out = {name(make_wrapper, 'wrapper')}({', '.join(given)})")
    for attribute, k in places.items():
        script.line(f"out.{attribute} = p{k}")
    for attribute, value in constants.items():
        script.line(f"out.{attribute} = {literal(value)}")
    script.line("return out")
    return script.function(", ".join(f"p{k}" for k in range(len(form.plain))))[0]


def _usual_strides(t: Tensor) -> tuple[int, ...]:
    strides = itertools.accumulate((max(n, 1) for n in reversed(t.size()[1:])), operator.mul, initial=1)
    return tuple(reversed([*strides])) if t.dim() else ()


def _same(a: Tensor, b: Tensor) -> bool:
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    if any(x is not y and x != y for x, y in ((vars(a)[n], vars(b)[n]) for n in vars(a))):
        return False
    return all(look(a) == look(b) for look in _SEEN_FROM_OUTSIDE)
