"""What the function finds in dictionaries (modules, attributes, tables), checked without looking inside.

A module with 150 parameters has hundreds of places that an entry depends on. They are looked at one by
one (`find`) only when a dictionary has changed since the last time; otherwise one call into C++ compares
the versions that Python keeps of its dictionaries. The tensors found last time are kept with them.

    held, state, pointers, storages = surroundings.stamp
    if any(empty) or not held(tables): ...renew...

Parameters can change without their dictionary knowing (`requires_grad_`, `.data = `), so the tensors
themselves are checked at every call, by the entry's own check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import dict_version, unchanged_check

Stamp = tuple[Callable[[Any], bool], tuple[Tensor, ...], tuple[int, ...], frozenset[int]]
_WORTH_BUILDING = 8  # calls without a change after which the check in C++ is built

data_ptr = Tensor.data_ptr


def _never(tables: Any) -> bool:
    return False


class Surroundings:
    """The last look at the tables: `find` looks again and gives the tensors, or None for a miss.

    An entry that leaves tensors in the tables at each call never `stamps`: it would only keep the old
    ones alive. `keep_pointers` is for entries that change their inputs: which tensors share memory matters to
    them, and a tensor that moves to other memory has another pointer.
    """

    def __init__(
        self,
        find: Callable[[], tuple[Tensor, ...] | None],
        tables: list[dict[Any, Any]],
        *,
        keep_pointers: bool,
        stamps: bool,
    ) -> None:
        self.find = find
        self.tables = tuple(tables)
        self.keep_pointers = keep_pointers
        self.stamps = stamps
        self.stamp: Stamp = (_never, (), (), frozenset())

    def renew(self) -> Stamp | None:
        """Looks at every place again."""
        before = self._versions()
        tensors = self.find()
        if tensors is None:
            self.stamp = (_never, (), (), frozenset())
            return None
        pointers, storages = (), frozenset[int]()
        if self.keep_pointers:
            pointers = tuple(map(data_ptr, tensors))
            storages = frozenset(map(storage_key, tensors))
        found: Stamp = (_never, tensors, pointers, storages)
        if self.stamps and self._versions() == before:
            self.stamp = (self._compare(before), tensors, pointers, storages)
        return found

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(dict_version, self.tables))

    def _compare(self, versions: tuple[int, ...]) -> Callable[[Any], bool]:
        """Compares in Python at first: modules that change at each call are not worth more."""
        calls = 0

        def held(tables: Any) -> bool:
            nonlocal calls
            if self._versions() != versions:
                return False
            calls += 1
            if calls == _WORTH_BUILDING:
                self._build(versions)
            return True

        return held

    def _build(self, versions: tuple[int, ...]) -> None:
        check = unchanged_check(self.tables)
        _, *rest = self.stamp
        if self._versions() == versions:
            self.stamp = (check, rest[0], rest[1], rest[2])
