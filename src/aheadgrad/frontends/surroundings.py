"""What the function finds in dictionaries (modules, attributes, tables), checked without looking inside.

A module with 150 parameters has hundreds of places that an entry depends on. They are looked at one by
one (`find`) only when a dictionary has changed since the last time; otherwise one call into C++ compares
the versions that Python keeps of its dictionaries, and another looks at the tensors found last time,
which can change by themselves (`requires_grad_`, `.data = `).

    held, things, state, ... = surroundings.stamp
    if hooks != Handle.next_id or not held(things) or not match(*state): ...renew...

Hooks live in dictionaries of their own, four for each module. Whoever registers one draws a number
(`RemovableHandle.next_id`); as long as no number was drawn the empty ones are still empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aheadgrad.frontends.state import HOOKS, State
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import unchanged_check
from aheadgrad.torchlayer.hooks import GLOBAL_HOOKS, global_hooks
from aheadgrad.torchlayer.lock import RECORDING


def _never(things: Any) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Tables:
    """The dictionaries to watch: those with contents, those that are empty, and empty ones for hooks."""

    full: tuple[dict[Any, Any], ...] = ()
    empty: tuple[dict[Any, Any], ...] = ()
    hooks: tuple[dict[Any, Any], ...] = field(default=())


def tables_of(state: State) -> Tables:
    hooks = {id(vars(m)[name]) for _, m in state.modules() for name in HOOKS if name in vars(m)}
    hooks.update(id(global_hooks()[name]) for name in GLOBAL_HOOKS)
    tables = state.dictionaries()
    return Tables(
        tuple(t for t in tables if t),
        tuple(t for t in tables if not t and id(t) not in hooks),
        tuple(t for t in tables if not t and id(t) in hooks),
    )


# held, things, state, number of hooks, ids of all tensors there, pointers, storages
Stamp = tuple[
    Callable[[Any], bool], Any, tuple[Tensor, ...], int, frozenset[int], tuple[int, ...], frozenset[int]
]
_NOTHING: Stamp = (_never, (), (), -1, frozenset(), (), frozenset())


class Surroundings:
    """The last look at the tables: `find` looks again, and gives the inputs and all tensors, or None.

    `match` checks the inputs. `keep_pointers` is for entries that change their inputs: which tensors share
    memory matters to them, and a tensor that moves to other memory has another pointer.
    """

    def __init__(
        self,
        find: Callable[[], tuple[tuple[Tensor, ...], list[Tensor]] | None],
        match: Callable[..., bool],
        tables: Tables,
        *,
        keep_pointers: bool,
    ) -> None:
        self.find = find
        self.match = match
        self.tables = tables
        self.keep_pointers = keep_pointers
        self.stamp: Stamp = _NOTHING

    def renew(self) -> Stamp | None:
        """Looks at every place again; not while another thread has traced tensors in the module."""
        with RECORDING:
            return self._renew()

    def _renew(self) -> Stamp | None:
        hooks = RemovableHandle.next_id
        held, things = unchanged_check((*self.tables.full, *self.tables.empty))
        found = self.find()
        if found is None or not self.match(*found[0]):
            self.stamp = _NOTHING
            return None
        tensors, everything = found
        pointers: tuple[int, ...] = ()
        storages = frozenset[int]()
        if self.keep_pointers:
            pointers = tuple(map(Tensor.data_ptr, tensors))
            storages = frozenset(map(storage_key, tensors))
        rest = (tensors, hooks, frozenset(map(id, everything)), pointers, storages)
        if held(things) and not any(self.tables.hooks):  # the first check notes the versions
            self.stamp = (held, things, *rest)
        return (_never, (), *rest)
