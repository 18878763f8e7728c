"""Questions to recorded histories: what autograd's nodes saved, where views come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from aheadgrad.recording.trace import Trace
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.subclasses import Bundle

_ATTRIBUTES: dict[type, list[str]] = {}


def saved_attributes(node: Any) -> list[str]:
    """The names under which a node offers the tensors that it saved.

    Numbers are left alone: to read a symbolic one is to assume it. Tensors are also offered raw.
    """
    kind = type(node)
    names = _ATTRIBUTES.get(kind)
    if names is None:
        names = [n for n in dir(kind) if n.startswith("_saved_") and hasattr(kind, f"_raw{n}")]
        _ATTRIBUTES[kind] = names
    return names


def saved_with_history(node: Any) -> Iterator[Tensor]:
    """The traced tensors that one of torch's own nodes saved and that require grad."""
    for name in saved_attributes(node):
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed since
            continue
        for t in value if isinstance(value, tuple | list) else (value,):
            if isinstance(t, Tensor) and t.requires_grad and functional.is_wrapped(t):
                yield t


def kept_by_eager(
    trace: Trace, nodes: Iterable[Any], used: Iterable[Tensor], source: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Values with a history that torch's own nodes saved and that are not among those used.

    Some of torch's derivative formulas take another way when they are differentiated themselves (that
    of `linalg.solve` reuses the LU factors in a plain backward, and goes back to the matrix otherwise),
    or for another part of the outputs. Eager keeps what serves all of them.
    """
    known = {id(v) for v in used}
    found: dict[int, Tensor] = {}
    for node in nodes:
        for t in saved_with_history(node):
            value = source(functional.unwrap(t))
            if not any(id(v) in known for v in views_back(trace, value)):
                found.setdefault(id(value), value)
    return list(found.values())


def views_back(trace: Trace, value: Tensor) -> Iterator[Tensor]:
    """A value, what it is a view of, what that is a view of, and so on."""
    while True:
        yield value
        made = trace.producer(value)
        if made is None or not is_view_op(trace.records[made.record].target):
            return
        value = trace.records[made.record].args[0]


def at_hand(trace: Trace, value: Tensor, given: set[int], here: set[int]) -> Tensor | None:
    """The value, or what it is a view of, if given (by id) or made by one of these records."""
    for v in views_back(trace, value):
        made = trace.producer(v)
        if id(v) in given or (made is not None and made.record in here):
            return v
    return None


def view_source(trace: Trace, value: Any) -> Any:
    """The value that a chain of view ops starts from."""
    if type(value) is Bundle:
        return value
    *_, first = views_back(trace, value)
    return first
