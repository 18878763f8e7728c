"""What the function finds in modules, cells and globals, checked without looking inside.

A module with 150 parameters has hundreds of places that an entry depends on. They are looked at one by
one only when a dictionary has changed since the last time, or a name holds another object; otherwise one call
into C++ compares the versions that Python keeps of its dictionaries, and another looks at the tensors found
last time, which can change by themselves (`requires_grad_`, `.data = `).

    held, things, state, ... = surroundings.stamp
    if hooks != Handle.next_id or not held(things) or not match(*state): ...renew...

Hooks live in dictionaries of their own, four for each module. Whoever registers one draws a number
(`RemovableHandle.next_id`); as long as no number was drawn the empty ones are still empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aheadgrad.frontends.checks import Memory
from aheadgrad.frontends.misses import Reason, tensor_reason
from aheadgrad.frontends.state import HOOKS, Look, State
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import tensor_guards, unchanged_check
from aheadgrad.torchlayer.lock import RECORDING


def _never(things: Any) -> bool:
    return False


def _always(things: Any) -> bool:
    return True


# held, things, state, named, number of hooks, ids of all tensors there, pointers, storages
STAMP = "held, things, state, named, hooks, ids, pointers, storages"
_NOTHING: tuple[Any, ...] = (_never, (), (), (), -1, frozenset(), (), frozenset())


class Surroundings:
    """The last look at the state; `inputs` are those of an entry's that it holds.

    Entries that depend on memory keep pointers: a tensor that moves to other memory has another one.
    """

    def __init__(self, state: State, look: Look, inputs: Sequence[Tensor], memory: Memory) -> None:
        self._state, self._look, self._memory = state, look, memory
        self._numbers = [next(i for i, t in enumerate(look.tensors) if t is real) for real in inputs]
        self.paths = [look.places[id(real)].path for real in inputs]
        self._pattern = memory.pattern(inputs)
        self.guards = tensor_guards(list(inputs)) if inputs else None
        self.keeps_pointers = memory.matters and bool(inputs)
        hooks = {id(vars(m).get(name)) for _, m in state.modules for name in HOOKS}
        hooks.update(map(id, state.hooks().values()))
        tables = state.dictionaries()
        self._empty_hooks = [t for t in tables if not t and id(t) in hooks]
        self._watched = tuple(t for t in tables if t or id(t) not in hooks)
        self.stamp = _NOTHING

    def renew(self) -> tuple[Any, ...] | None:
        """Looks at every place again; not while another thread has traced tensors in the module."""
        with RECORDING:
            hooks = RemovableHandle.next_id
            named = tuple(place.get() for place in self._state.names)
            held, things = unchanged_check(self._watched) if self._watched else (_always, ())
            now = self._state.look()
            fits = now.found == self._look.found
            tensors = tuple(now.tensors[i] for i in self._numbers) if fits else ()
            if not fits or not self._match(tensors):
                self.stamp = _NOTHING
                return None
            kept = tensors if self.keeps_pointers else ()
            pointers, storages = tuple(map(Tensor.data_ptr, kept)), frozenset(map(storage_key, kept))
            rest = (tensors, named, hooks, frozenset(now.places), pointers, storages)
            if held(things) and not any(self._empty_hooks):  # the first check notes the versions
                self.stamp = (held, things, *rest)
            return (_never, (), *rest)

    def _match(self, tensors: tuple[Tensor, ...]) -> bool:
        if self._memory.pattern(tensors) != self._pattern:
            return False
        return self.guards is None or bool(self.guards.check(*tensors))

    def differs(self) -> Reason:
        """What is different now."""
        for path, was, now in self._look.differences(self._state.look(in_words=True)):
            return Reason(path, was, now)
        tensors = self._state.look().tensors
        return tensor_reason(self.guards, self.paths, *(tensors[i] for i in self._numbers))
