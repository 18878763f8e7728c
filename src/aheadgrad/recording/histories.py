"""Questions to recorded histories: what autograd's nodes saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.recording.told_by_name import HOLDS_UNSEEN, RESULT_NOT_USED
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import number_of, same_version_counter
from aheadgrad.torchlayer.fake import quiet_logs

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


def _saved_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The traced tensors that a node saved, but for those that were changed since, with their names."""
    for name in (*saved_attributes(node), "saved_tensors"):
        try:
            value = getattr(node, name, ())
        except RuntimeError:
            continue
        for t in value if isinstance(value, tuple | list) else (value,):
            if isinstance(t, Tensor) and functional.is_wrapped(t):
                yield name, t


def saved_with_history(node: Any) -> Iterator[Tensor]:
    """The traced tensors that one of torch's own nodes saved and that require grad."""
    return (t for name, t in _saved_by(node) if t.requires_grad and name != "saved_tensors")


def saves_same_counter(nodes: Iterable[Any], t: Tensor) -> bool:
    """Did one of these nodes save the memory of a tensor, and will it notice writes to that tensor?"""
    key = functional.storage_key(t)
    saved = (s for node in nodes for _, s in _saved_by(node))
    return any(functional.storage_key(s) == key and same_version_counter(s, t) for s in saved)


def in_order(nodes: Iterable[Any]) -> list[Any]:
    """In the order in which they were made: the same in every recording of one function."""
    return sorted(nodes, key=number_of)


def saved_storages(session: Session, nodes: Iterable[Any]) -> dict[Any, None]:
    """The storages of everything that autograd nodes saved, by their keys."""
    keys: dict[Any, None] = {}
    for node in in_order(nodes):
        keys |= session.hidden.get(node, {})
        for name, value in _saved_by(node):
            keys[functional.storage_key(value)] = None
            if name == "_saved_result" and type(node).__name__ in RESULT_NOT_USED:
                _check_unchanged(session, value)
    return keys


def _check_unchanged(session: Session, result: Tensor) -> None:
    if session.ledger.memory(result).writes:
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
    with quiet_logs():  # a view whose memory was changed is made again, or it fails
        return [
            *(getattr(node, name) for name in saved_attributes(node)),
            *getattr(node, "saved_tensors", ()),
        ]


def holds_something(node: Any) -> bool:
    """Does a node of eager's hold something that its backward frees, so that it cannot run again?"""
    if type(node).__name__ == HOLDS_UNSEEN:
        return True
    try:
        values = _all_saved(node)
    except RuntimeError:  # there is a saved tensor, though it was changed since
        return True
    return any(isinstance(t, Tensor) for v in values for t in (v if isinstance(v, tuple | list) else (v,)))
