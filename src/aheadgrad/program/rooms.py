"""Values that the trace puts at an offset in memory, in a program that does not care where they are.

After `x.mul_(2)` the trace gives an input its offset back (see `recording/ledger`): in a room of everything
before it,

    as_strided(as_strided_scatter(empty(room), mul, size, stride, offset), size, stride, offset)

which is `mul`, unless somebody addresses that memory. A program would make the room at each call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from aheadgrad.program.slots import Saved, Slot, UpdatedInput
from aheadgrad.program.values import Op, Value
from aheadgrad.torchlayer.dispatch import is_view_op

_aten = torch.ops.aten
_AS_STRIDED = _aten.as_strided.default
_SCATTER = _aten.as_strided_scatter.default
_ADDRESSES = (_AS_STRIDED, _SCATTER)


def is_seen(slot: Slot) -> bool:
    """Does the caller get to see the memory of what leaves in this place, and not only its elements?"""
    return not isinstance(slot, UpdatedInput | Saved)


def without_rooms(
    ops: tuple[Op, ...], results: list[Any], handed_out: Collection[Value]
) -> tuple[tuple[Op, ...], list[Any]]:
    """Ops and results without such rooms; `handed_out` are values whose memory the caller gets to see."""
    if not any(op.target is _SCATTER for op in ops):
        return ops, results
    rooms = _Rooms(ops, results)
    dead: set[Any] = set()
    inside: dict[Value, Value] = {}
    for op in ops:
        if op.target is _AS_STRIDED and op.out not in handed_out:
            found = rooms.around(op)
            if found is not None:
                inside[op.out] = found[0]
                dead.update(found[1])
    results = [inside.get(v, v) if type(v) is Value else v for v in results]
    left = [op for op in ops if op not in dead]
    return tuple(_renamed(op, inside) if any(v in inside for v in op.uses) else op for op in left), results


def _renamed(op: Op, inside: dict[Value, Value]) -> Op:
    return op.mapped(lambda v: inside.get(v, v) if type(v) is Value else v)


class _Rooms:
    def __init__(self, ops: Sequence[Op], results: list[Any]) -> None:
        self.makers = {v: op for op in ops for v in op.values}
        self.users: dict[Value, list[Op | None]] = {}
        for op in ops:
            for v in dict.fromkeys(op.uses):
                self.users.setdefault(v, []).append(op)
        for v in dict.fromkeys(v for v in results if type(v) is Value):
            self.users.setdefault(v, []).append(None)

    def around(self, op: Op) -> tuple[Value, list[Op]] | None:
        """The value inside the room that an op makes a view of, and the ops that are for the room alone."""
        room = self.makers.get(op.args[0])
        if room is None or room.target is not _SCATTER or room.args[2:] != op.args[1:]:
            return None
        value = room.args[1]
        chain = self._chain(room.args[0])
        made = chain[-1]
        new = made is not None and made.target is _aten.empty.memory_format
        alone = [room.out, value, *(step.out for step in chain if step is not None)]
        if not new or any(len(self.users.get(v, ())) != 1 for v in alone):
            return None
        if not self._looks_like(value, op.out) or self._addressed(op.out):
            return None
        return value, [op, room, *(step for step in chain if step is not None)]

    def _chain(self, value: Value) -> list[Op | None]:
        """From a value to the op that makes its memory, through aliases of which nobody else knows."""
        found = [self.makers.get(value)]
        while found[-1] is not None and found[-1].target is _aten.detach.default:
            found.append(self.makers.get(found[-1].args[0]))
        return found

    def _looks_like(self, value: Value, other: Value) -> bool:
        made = self.makers.get(value)
        if made is None or is_view_op(made.target):
            return False
        return (value.size(), value.stride()) == (other.size(), other.stride())

    def _addressed(self, value: Value) -> bool:
        """Is its memory addressed, through itself or a view of it?"""
        users = [op for op in self.users.get(value, ()) if op is not None]
        if any(op.target in _ADDRESSES for op in users):
            return True
        return any(is_view_op(op.target) and any(map(self._addressed, op.values)) for op in users)
