"""Questions to recorded histories: what autograd's nodes saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.told_by_name import HOLDS_UNSEEN, RESULT_NOT_USED
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import number_of

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session

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


def in_order(nodes: Iterable[Any]) -> list[Any]:
    """In the order in which they were made: the same in every recording of one function."""
    return sorted(nodes, key=number_of)


def saved_storages(session: Session, nodes: Iterable[Any]) -> dict[Any, None]:
    """The storages of everything that autograd nodes saved, by their keys."""
    keys: dict[Any, None] = {}
    for node in in_order(nodes):
        keys |= session.hidden.get(node, {})
        for name in saved_attributes(node):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue
            _add(value, keys)
            if name == "_saved_result" and type(node).__name__ in RESULT_NOT_USED:
                _check_unchanged(session, value)
        try:
            _add(getattr(node, "saved_tensors", ()), keys)
        except RuntimeError:
            continue
    return keys


def _check_unchanged(session: Session, result: Any) -> None:
    if isinstance(result, Tensor) and session.ledger.memory(result).writes:
        raise FallbackError("the result of a product is changed behind autograd's back")


def is_spoiled(node: Any) -> bool:
    """Was something changed that a node of eager's saved (rather than freed by a backward inside)? Then it
    raises, wherever it leads to."""
    try:
        _all_saved(node)
    except RuntimeError as error:
        return "inplace" in str(error)
    return False


def _all_saved(node: Any) -> list[Any]:
    return [*(getattr(node, name) for name in saved_attributes(node)), *getattr(node, "saved_tensors", ())]


def holds_something(node: Any) -> bool:
    """Does a node of eager's hold something that its backward frees, so that it cannot run again?"""
    if type(node).__name__ == HOLDS_UNSEEN:
        return True
    try:
        values = _all_saved(node)
    except RuntimeError:  # there is a saved tensor, though it was changed since
        return True
    return any(isinstance(t, Tensor) for v in values for t in (v if isinstance(v, tuple | list) else (v,)))


def _add(value: Any, keys: dict[Any, None]) -> None:
    if isinstance(value, Tensor):
        if functional.is_wrapped(value):
            keys[functional.storage_key(value)] = None
    elif isinstance(value, tuple | list):
        for part in value:
            _add(part, keys)
